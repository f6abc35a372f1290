"""A prebuilt sandbox cannot be told from one that was made anew."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ringfence import Limits, Sandbox, SandboxSpec
from ringfence.backends.native.backend import NativeBackend
from tests.native.outside import children_of, init_pid, open_fds, until
from tests.posture import expected
from tests.posture.reading import Process, anonymous, mounts_of, processes_in, read_process

pytestmark = pytest.mark.root

SPEC = SandboxSpec(
    limits=Limits(memory_bytes=64 << 20, pids=99, disk_bytes=9 << 20), deny=("/usr/share/misc",)
)


@pytest.fixture(scope="module")
def new() -> Iterator[Sandbox]:
    backend = NativeBackend(prebuilt_s=0)
    with Sandbox.create(SPEC, backend=backend) as sandbox:
        sandbox.start(["sleep", "6001"])
        yield sandbox
    backend.close()


@pytest.fixture(scope="module")
def backend() -> Iterator[NativeBackend]:
    made = NativeBackend(prebuilt_s=600)
    yield made
    made.close()


@pytest.fixture(scope="module")
def unclaimed(backend: NativeBackend) -> Process:
    """The prebuilt sandbox before it is claimed."""
    with Sandbox.create(SPEC, backend=backend) as sandbox:
        over = {init_pid(sandbox)}
    zygote = backend.zygote().pid
    assert until(lambda: 1 == len(set(children_of(zygote)) - over))
    (pid,) = set(children_of(zygote)) - over
    assert until(lambda: "\nSeccomp:\t2\n" in Path(f"/proc/{pid}/status").read_text())
    assert until(lambda: open_fds(pid).keys() <= expected.INIT.keys())
    return read_process(pid)


@pytest.fixture(scope="module")
def claimed(backend: NativeBackend, unclaimed: Process) -> Iterator[Sandbox]:
    with Sandbox.create(SPEC, backend=backend) as sandbox:
        assert unclaimed.pid == init_pid(sandbox)
        sandbox.start(["sleep", "6001"])
        yield sandbox


def of(sandbox: Sandbox) -> dict[str, Process]:
    """PID 1 and what it has started, by name."""
    assert until(lambda: 2 == len(processes_in(init_pid(sandbox))))
    assert until(lambda: "sleep" in {each.name for each in processes_in(init_pid(sandbox))})
    return {each.name: each for each in processes_in(init_pid(sandbox))}


def posture(process: Process) -> Process:
    """Without what is drawn for each sandbox; its identity is what `expected` says."""
    (seen,) = process.identities
    assert expected.identity_made_by_root(seen) == seen
    return replace(
        process,
        pid=0,
        identities=frozenset(),
        control_groups=frozenset(),
        files=anonymous(process.files),
    )


def test_all_its_processes_are_as_in_a_new_one(new: Sandbox, claimed: Sandbox) -> None:
    ours, theirs = of(claimed), of(new)

    assert {name: posture(each) for name, each in theirs.items()} == {
        name: posture(each) for name, each in ours.items()
    }
    for name in ours:  # dataclasses leave these out of what they compare
        assert theirs[name].limits == ours[name].limits
        assert anonymous(theirs[name].files) == anonymous(ours[name].files)


def test_its_mounts_are_as_in_a_new_one(new: Sandbox, claimed: Sandbox) -> None:
    assert mounts_of(init_pid(new)) == mounts_of(init_pid(claimed))


def test_its_protections_are_as_in_a_new_one(new: Sandbox, claimed: Sandbox) -> None:
    """The ids of each are its own."""
    ours, theirs = (
        {each.name: (each.status, "" if "identity" in each.name else each.why) for each in found}
        for found in (claimed.protections(), new.protections())
    )

    assert theirs == ours


@pytest.mark.usefixtures("claimed")
def test_it_was_locked_down_before(unclaimed: Process) -> None:
    """And holds what every PID 1 holds."""
    (seen,) = unclaimed.identities

    assert expected.identity_made_by_root(seen) == seen
    assert not unclaimed.traceable
    rest = {fd: text for fd, text in anonymous(unclaimed.files).items() if fd not in expected.INIT}
    assert not rest


def test_its_counters_begin_with_it(claimed: Sandbox) -> None:
    assert 1 == claimed.stats().execs
    assert os.path.exists(f"/proc/{init_pid(claimed)}")
