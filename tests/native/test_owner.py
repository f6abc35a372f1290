"""Whose leftovers may be swept: only those of a process that is gone for certain."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ringfence.backends.local.host import cgroups, owner
from ringfence.backends.native.backend import NativeBackend
from ringfence.cli.diagnosis.doctor import _left_behind
from ringfence.launcher import cgroups as launcher_cgroups
from tests.native.outside import until

_IN_ANOTHER_PID_NAMESPACE = """
import sys
from ringfence import Sandbox
with Sandbox.create() as sandbox:
    print("ready", flush=True)
    sys.stdin.readline()
    print(sandbox.exec(["echo", "alive"]).stdout, flush=True)
"""


def whose() -> tuple[int, int, int]:
    found = owner.read(owner.label().split("."))
    assert found is not None
    return found


def test_this_process_is_not_gone() -> None:
    assert not owner.is_gone(whose())


def test_a_reused_pid_is_somebody_else() -> None:
    pid, started, namespace = whose()

    assert owner.is_gone((pid, started - 1, namespace))


def test_an_ended_process_is_gone() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    _, started, namespace = whose()

    assert owner.is_gone((child.pid, started, namespace))


def test_what_cannot_be_known_is_not_gone() -> None:
    """A process out of descriptors must not take everybody else for dead."""
    pid, started, namespace = whose()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        gone = owner.is_gone((pid, started - 1, namespace))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert not gone


@pytest.mark.parametrize("words", [[], ["1"], ["1", "2"], ["1", "2", "x"], ["", "", ""]])
def test_other_names_have_no_owner(words: list[str]) -> None:
    assert owner.read(words) is None


@pytest.mark.root
def test_a_dead_process_leaves_nothing_for_long() -> None:
    """The control of the next test: the same name with a pid that is no more goes."""
    layout = cgroups.Layout()
    base = next(iter(layout.bases.values()))
    _, started, namespace = whose()
    child = subprocess.Popen(["true"])
    child.wait()
    left = f"{base}/ringfence.{child.pid}.{started}.{namespace}.left"
    os.mkdir(left)

    assert left in cgroups.sweep(layout)
    assert not os.path.exists(left)


def _plant(layout: cgroups.Layout, names: list[str]) -> list[str]:
    """Cgroups of a process that is no more, with two below each, as container managers leave them."""
    base = next(iter(layout.bases.values()))
    _, started, namespace = whose()
    child = subprocess.Popen(["true"])
    child.wait()
    planted = [f"{base}/ringfence.{child.pid}.{started}.{namespace}.{name}" for name in names]
    for each in planted:
        os.makedirs(f"{each}/child/below")
    return planted


@pytest.mark.root
def test_what_has_children_goes_with_them() -> None:
    layout = cgroups.Layout()
    [left] = _plant(layout, ["nested"])

    assert left in cgroups.sweep(layout)
    assert not os.path.exists(left)


@pytest.mark.root
def test_a_start_does_not_wait_for_many_that_are_left() -> None:
    """It removes some itself, a thread the rest; before, each took a second, of every start for ever."""
    layout = cgroups.Layout()
    planted = _plant(layout, [f"left{i}" for i in range(40)])

    removed = cgroups.sweep(layout)

    assert len(removed) <= 16
    assert until(lambda: not any(map(os.path.exists, planted)))


@pytest.mark.root
def test_what_is_not_empty_is_left_and_named() -> None:
    """A process in one below: all of them have the same time together, and those that went are gone."""
    layout = cgroups.Layout()
    busy, empty = _plant(layout, ["busy", "empty"])
    with subprocess.Popen(["sleep", "600"]) as inside:
        try:
            with open(f"{busy}/child/cgroup.procs", "w") as file:
                file.write(str(inside.pid))

            assert [busy] == launcher_cgroups.remove([busy, empty], 0)
            assert not os.path.exists(empty)
            assert busy in cgroups.left_behind(layout)[0]
            assert busy in "".join(_left_behind())
        finally:
            inside.kill()
    assert until(lambda: not launcher_cgroups.remove([busy], 0))


@pytest.mark.root
def test_a_sandbox_of_another_pid_namespace_lives_on() -> None:
    """Its owner's pid means nothing here: a sweep that trusted it would end the sandbox."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    with subprocess.Popen(
        [*command, sys.executable, "-c", _IN_ANOTHER_PID_NAMESPACE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as there:
        assert there.stdin is not None
        assert there.stdout is not None
        assert "ready\n" == there.stdout.readline()

        cgroups.sweep(cgroups.Layout())
        there.stdin.write("go\n")
        there.stdin.flush()

        assert "b'alive\\n'\n" == there.stdout.readline()


class _Path(str):
    """A path that counts how often it is compared."""

    __slots__ = ()
    compared = 0

    def __eq__(self, other: object) -> bool:
        _Path.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_thousands_that_are_left_are_not_compared_with_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """10,000 cgroups of a killed daemon: each with each took 17 s of a start."""
    left = [_Path(f"/sys/fs/cgroup/none/{i}") for i in range(2000)]
    monkeypatch.setattr(cgroups, "left_behind", lambda _layout: (left, []))

    removed = cgroups.sweep(cgroups.Layout())

    assert left[:16] == removed
    assert _Path.compared < 10 * len(left)


def test_an_owner_is_looked_up_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, started, namespace = whose()
    for i in range(100):
        (tmp_path / f"ringfence.4194303.{started}.{namespace}.left{i}").mkdir()
    asked, is_gone = [], owner.is_gone

    def counted(each: tuple[int, int, int]) -> bool:
        asked.append(each)
        return is_gone(each)

    monkeypatch.setattr(owner, "is_gone", counted)

    orphaned, strangers = cgroups.left_behind(cgroups.Layout((2, {"": str(tmp_path)}, "")))

    assert (100, []) == (len(orphaned), strangers)
    assert 1 == len(asked)


def test_anchors_that_are_gone_are_swept_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a daemon's zygotes that died is one; to look for the leftovers of each took seconds."""
    sweeps: list[cgroups.Layout] = []
    monkeypatch.setattr(cgroups, "sweep", sweeps.append)
    backend = NativeBackend()
    try:
        for pid in range(4_000_000, 4_000_050):
            backend.end_leftovers(pid, 1)
    finally:
        backend.close()

    assert 1 == len(sweeps)
