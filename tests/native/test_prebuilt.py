"""The sandbox that is prebuilt after a create: locked down by an equal plan, and used for nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ringfence import Limits, Sandbox, SandboxSpec
from ringfence.backends.native.backend import NativeBackend
from ringfence.backends.native.prebuilt import prebuilder
from ringfence.errors import InvalidRequest
from tests.native.callers import Caller
from tests.native.outside import (
    cgroups_of,
    children_of,
    init_pid,
    open_fds,
    pin,
    survivors,
    until,
)

pytestmark = pytest.mark.full

GONE_WITHIN_S = 30.0
LONG_S = 600.0


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[NativeBackend]:
    made = NativeBackend(state_dir=str(tmp_path / "snapshots"), prebuilt_s=LONG_S)
    yield made
    made.close()


def prebuilt_after(
    backend: NativeBackend, spec: SandboxSpec | None = None, besides: Iterable[int] = ()
) -> int:
    """Create and end a sandbox; return the host's pid of the one that is prebuilt then, locked down.

    Args:
        besides: Those that it replaces, which may not have ended yet.
    """
    with Sandbox.create(spec, backend=backend) as sandbox:
        over = init_pid(sandbox)
    zygote = backend.zygote().pid
    found: list[int] = []

    def is_there() -> bool:
        """The last one may not have been reaped, the next one not be there yet, and a helper be at work."""
        children = set(children_of(zygote))
        found[:] = [each for each in children - {*besides} if is_locked_down(each)]
        return over not in children and len(found) == 1

    assert until(is_there), (over, found)
    return found[0]


def is_locked_down(pid: int) -> bool:
    """Whether the filter, the last protection that is put up, is in force."""
    try:
        return "\nSeccomp:\t2\n" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def prebuilt_id(backend: NativeBackend) -> str:
    prebuilt = backend.prebuilder._prebuilt
    assert prebuilt is not None
    return prebuilt.id


def test_it_is_locked_down_before_it_is_asked_for(backend: NativeBackend) -> None:
    prebuilt = prebuilt_after(backend)

    with Sandbox.create(backend=backend) as second:
        assert prebuilt == init_pid(second)
        assert second.exec(["true"]).ok
        assert backend.prebuilder._prebuilt is not None  # and so on
        if 0 == os.geteuid():
            assert second.exec(["true"], user="root").ok  # by an agent, which must know its key


def test_each_has_a_key_of_its_own(backend: NativeBackend) -> None:
    keys, filters = [], []
    for _ in range(4):
        with Sandbox.create(backend=backend) as sandbox:
            keys.append(sandbox._inner.lockdown["tag_key"])  # type: ignore[attr-defined]
            filters.append(sandbox._inner.lockdown["seccomp"])  # type: ignore[attr-defined]
            assert sandbox.exec(["true"], timeout_s=30).ok

    assert 4 == len(set(keys)) == len(set(filters))


@pytest.mark.parametrize(
    "other",
    [
        {"limits": Limits(open_files=99)},
        {"limits": Limits(pids=37)},
        {"limits": Limits(memory_bytes=64 << 20)},
        {"limits": Limits(disk_bytes=5 << 20)},
        {"workdir": "/srv/elsewhere"},
        {"deny": ("/usr/share",)},
        {"profile": "debug"},
        {"profile": "unrestricted"},
        {"network": ("example.com:443",)},
        {"network": "unrestricted"},
        {"mounts": ("/usr/share:/srv/shared:ro",)},
        {"user": "nobody"},
        {"python_env": True},
        {"id": "one-of-our-own"},
    ],
    ids=str,
)
def test_another_request_gets_a_new_one(backend: NativeBackend, other: dict[str, Any]) -> None:
    prebuilt = prebuilt_after(backend)

    with Sandbox.create(backend=backend, **other) as sandbox:
        assert prebuilt != init_pid(sandbox)
        assert sandbox.exec(["true"]).ok
        limits = other.get("limits", Limits())
        if limits.open_files:
            assert "99" == sandbox.shell("ulimit -n").text.strip()


def test_one_of_another_kind_replaces_it(backend: NativeBackend) -> None:
    first = pin([prebuilt_after(backend)])
    name = prebuilt_id(backend)

    second = prebuilt_after(backend, SandboxSpec(limits=Limits(pids=37)), besides=first)

    assert [] == survivors(first, GONE_WITHIN_S)
    assert until(lambda: not cgroups_of(name))
    with Sandbox.create(backend=backend, limits=Limits(pids=37)) as sandbox:
        assert second == init_pid(sandbox)
        protections = {each.name: each for each in sandbox.protections()}
        assert "37 by" in protections["pids_limit"].why


@pytest.mark.parametrize(
    "own",
    [{"mounts": ("/usr/share:/srv/shared:ro",)}, {"id": "of-our-own"}, {"network": "unrestricted"}],
    ids=str,
)
def test_none_is_built_of_what_is_the_callers_own(
    backend: NativeBackend, own: dict[str, Any]
) -> None:
    Sandbox.create(backend=backend, **own).terminate()
    assert backend.prebuilder._prebuilt is None

    Sandbox.create(backend=backend).terminate()
    assert backend.prebuilder._prebuilt is not None


def test_what_says_nothing_of_its_isolation_may_differ(backend: NativeBackend) -> None:
    """Names and environments are told with each command."""
    prebuilt = prebuilt_after(backend)

    spec = SandboxSpec(env={"OWN": "value"}, labels={"task": "third"})
    with Sandbox.create(spec, backend=backend) as second:
        assert prebuilt == init_pid(second)
        assert "value\n" == second.exec(["printenv", "OWN"]).text


def test_it_equals_one_that_is_built_at_once(backend: NativeBackend) -> None:
    """The same report, the same limits, and the same filter but for its key."""
    limits = Limits(pids=37, disk_bytes=5 << 20, inodes=300, open_files=99, memory_bytes=64 << 20)
    cold = NativeBackend(prebuilt_s=0)
    try:
        with Sandbox.create(limits=limits, backend=cold) as new:
            prebuilt = prebuilt_after(backend, SandboxSpec(limits=limits))
            with Sandbox.create(limits=limits, backend=backend) as claimed:
                assert prebuilt == init_pid(claimed)
                assert report_of(new) == report_of(claimed)
                assert plan_of(new) == plan_of(claimed)
                script = "ulimit -a; sed 's/[ug]id=[0-9]*/own id/g' /proc/self/mounts"
                assert new.shell(script).text == claimed.shell(script).text
    finally:
        cold.close()


def report_of(sandbox: Sandbox) -> dict[str, tuple[str, str]]:
    """Without the ids of each."""
    return {
        each.name: (each.status, "" if "identity" in each.name else each.why)
        for each in sandbox.protections()
    }


def plan_of(sandbox: Sandbox) -> dict[str, Any]:
    """What it was locked down by, without what is drawn for each."""
    plan = sandbox._inner.lockdown  # type: ignore[attr-defined]
    own = (
        "id",
        "uid_map",
        "gid_map",
        "cgroup_dirs",
        "cgroup_values",
        "programs_cgroups",
        "tag_key",
    )
    key = plan["tag_key"].to_bytes(8, "big")
    code = plan["seccomp"]
    for half in (key[:4], key[4:]):
        assert half[::-1] in code
        code = code.replace(half[::-1], b"....")
    return {**{name: each for name, each in plan.items() if name not in own}, "seccomp": code}


def test_one_that_was_stopped_is_waited_for(backend: NativeBackend) -> None:
    prebuilt = prebuilt_after(backend)
    first = backend.prebuilder._prebuilt
    stopped = os.pidfd_open(prebuilt)
    signal.pidfd_send_signal(stopped, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(lambda: Sandbox.create(backend=backend).terminate())
            # The create has taken it, and waits; or its claim has just woken it.
            assert until(lambda: backend.prebuilder._prebuilt is not first, GONE_WITHIN_S)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(stopped, signal.SIGCONT)
            result.result()
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(stopped, signal.SIGCONT)
        os.close(stopped)


@pytest.fixture
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is built while a sandbox runs, and no create is in haste."""
    monkeypatch.setattr(prebuilder, "CALM_S", LONG_S)
    monkeypatch.setattr(prebuilder, "_HASTE_S", 0.0)


@pytest.mark.usefixtures("calm")
def test_it_is_built_when_the_one_before_it_has_ended(backend: NativeBackend) -> None:
    with Sandbox.create(backend=backend) as first:
        assert first.exec(["true"]).ok
        expected, over = prebuilt_id(backend), init_pid(first)
        assert [over] == children_of(backend.zygote().pid)

    assert until(lambda: [each for each in children_of(backend.zygote().pid) if each != over])
    with Sandbox.create(backend=backend) as second:
        assert expected == second.id


@pytest.mark.usefixtures("calm")
def test_a_create_before_it_is_built_gets_it(backend: NativeBackend) -> None:
    with Sandbox.create(backend=backend):
        expected = prebuilt_id(backend)
        with Sandbox.create(backend=backend) as second:
            assert expected == second.id
            assert second.exec(["true"]).ok


@pytest.mark.usefixtures("calm")
def test_one_that_is_not_built_yet_can_be_discarded(backend: NativeBackend) -> None:
    with Sandbox.create(backend=backend):
        expected = prebuilt_id(backend)
        with Sandbox.create(backend=backend, user="nobody") as other:
            assert expected not in (other.id, prebuilt_id(backend))
        assert [] == cgroups_of(expected)


@pytest.mark.usefixtures("calm")
def test_in_a_loop_without_a_pause_it_is_built_at_once(
    backend: NativeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prebuilder, "_HASTE_S", LONG_S)
    Sandbox.create(backend=backend).terminate()
    zygote = backend.zygote().pid

    with Sandbox.create(backend=backend):
        assert until(lambda: len(children_of(zygote)) == 2)


def test_it_is_discarded_when_its_time_is_up(tmp_path: Path) -> None:
    """Then there is no process, no cgroup and no descriptor of the zygote's, and its ids are free."""
    quick = NativeBackend(state_dir=str(tmp_path), prebuilt_s=0.3)
    try:
        Sandbox.create(backend=quick, id="first").terminate()
        zygote = quick.zygote().pid
        assert until(lambda: not children_of(zygote))
        before = lasting_fds(zygote)
        free = len(quick.host_ids()._free)
        for _ in range(2):  # an alarm that has come is set again
            Sandbox.create(backend=quick).terminate()
            name = quick.prebuilder._prebuilt.id if quick.prebuilder._prebuilt else ""

            assert until(lambda: quick.prebuilder._prebuilt is None, GONE_WITHIN_S)
            assert until(lambda: not children_of(zygote), GONE_WITHIN_S)
            assert until(lambda name=name: not name or [] == cgroups_of(name), GONE_WITHIN_S)  # type: ignore[misc]
            assert until(lambda: lasting_fds(zygote) <= before)
            assert free <= len(quick.host_ids()._free)
    finally:
        quick.close()


def lasting_fds(zygote: int) -> set[int]:
    """Those of the zygote's that are not the namespaces of one that has ended, which it closes."""
    kinds = ("mnt:", "pid:")
    return {fd for fd, what in open_fds(zygote).items() if not what.startswith(kinds)}


def test_it_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    off = NativeBackend(state_dir=str(tmp_path), prebuilt_s=0)
    monkeypatch.setenv("RINGFENCE_PREBUILT", "off")
    for cold in (NativeBackend(state_dir=str(tmp_path)), off):
        for _ in range(3):
            Sandbox.create(backend=cold).terminate()
        assert cold.prebuilder._prebuilt is None
        cold.close()

    monkeypatch.delenv("RINGFENCE_PREBUILT")
    on = NativeBackend(state_dir=str(tmp_path))
    Sandbox.create(backend=on).terminate()
    assert on.prebuilder._prebuilt is not None
    on.close()


def test_closing_the_backend_leaves_nothing(tmp_path: Path) -> None:
    backend = NativeBackend(state_dir=str(tmp_path), prebuilt_s=LONG_S)
    pinned = pin([prebuilt_after(backend)])
    name = prebuilt_id(backend)

    backend.close()

    assert [] == survivors(pinned, GONE_WITHIN_S)
    assert [] == cgroups_of(name)


def test_it_is_no_sandbox_of_the_backend(backend: NativeBackend) -> None:
    """It has no record, counts for nothing, and its id names nothing."""
    prebuilt_after(backend)

    assert [] == backend.living()
    assert backend.adopt(prebuilt_id(backend)) is None


def test_a_share_of_processors_is_that_of_each(backend: NativeBackend) -> None:
    asked: list[float | None] = [0.5, 0.5, None, 0.25, 0.25, 0.75]
    for cpus in asked:
        spec = SandboxSpec(limits=Limits(cpus=cpus), allow_degraded=("cpu_limit",))
        with Sandbox.create(spec, backend=backend) as sandbox:
            group = sandbox._inner.group  # type: ignore[attr-defined]
            if cpus is None or group.holds_cpus:
                assert cpus == cpu_share(init_pid(sandbox), sandbox.id)
            name = sandbox.id
        assert until(lambda name=name: not cgroups_of(name))  # type: ignore[misc]


def cpu_share(pid: int, name: str) -> float | None:
    """Cores that the kernel allows a process by a cgroup of this sandbox; None: all there are."""
    joined = Path(f"/proc/{pid}/cgroup").read_text()
    for directory in map(Path, cgroups_of(name)):
        if (directory / "cpu.cfs_quota_us").exists():
            ours = [line for line in joined.splitlines() if name in line]
            names = [line.split(":")[1].split(",") for line in ours]
            everywhere = [line.split(":")[1].split(",") for line in joined.splitlines()]
            quota = int((directory / "cpu.cfs_quota_us").read_text())
            assert any("cpu" in each for each in names) == (["cpu"] not in everywhere)
            return quota / int((directory / "cpu.cfs_period_us").read_text()) if quota > 0 else None
        if (directory / "cpu.max").exists():
            share, period = (directory / "cpu.max").read_text().split()
            return None if "max" == share else int(share) / int(period)
    assert not any("cpu" == line.split(":")[1] and name in line for line in joined.splitlines())
    return None


def test_a_refused_request_uses_up_nothing(backend: NativeBackend, tmp_path: Path) -> None:
    prebuilt = prebuilt_after(backend)
    (tmp_path / "link").symlink_to("elsewhere")
    for _ in range(3):
        with pytest.raises(InvalidRequest):
            Sandbox.create(backend=backend, mounts=[f"{tmp_path}:/work:rw"], protect=["link/below"])

    with Sandbox.create(backend=backend) as sandbox:
        assert prebuilt == init_pid(sandbox)


@pytest.mark.parametrize("is_heard", [True, False])
def test_it_died_meanwhile(
    backend: NativeBackend, is_heard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The create gets a new one, also where it is faster than the thread that hears of the end."""
    prebuilt = prebuilt_after(backend)
    if not is_heard:
        monkeypatch.setattr(backend.prebuilder, "hear", lambda *_: None)
    pinned = pin([prebuilt])
    os.kill(prebuilt, signal.SIGKILL)
    assert [] == survivors(pinned, GONE_WITHIN_S)

    with Sandbox.create(backend=backend) as sandbox:
        assert prebuilt != init_pid(sandbox)
        assert sandbox.exec(["true"]).ok


def test_the_zygote_is_killed(backend: NativeBackend) -> None:
    prebuilt = prebuilt_after(backend)
    pinned = pin([prebuilt])

    os.kill(backend.zygote().pid, signal.SIGKILL)

    assert [] == survivors(pinned, GONE_WITHIN_S)
    with Sandbox.create(backend=backend) as sandbox:
        assert sandbox.exec(["true"]).ok


_ONE = """
Sandbox.create().terminate()
from ringfence.backends.registry import backend_named
backend = backend_named("native")
say([backend.zygote().pid, backend.prebuilder._prebuilt.id])
listen()
"""


def test_the_caller_is_killed() -> None:
    with Caller(_ONE, env={"RINGFENCE_PREBUILT": "on"}) as caller:
        zygote, name = caller.hear()
        assert until(lambda: 1 == len(children_of(zygote)))
        pinned = pin([zygote, *children_of(zygote)])

        caller.kill(signal.SIGKILL)

        assert [] == survivors(pinned, GONE_WITHIN_S)
        assert until(lambda: not cgroups_of(name))


_FORK = """
Sandbox.create().terminate()
child = os.fork()
if child == 0:
    with Sandbox.create() as own:
        say(own.exec(["echo", "of the child"]).stdout_text)
    os._exit(0)
os.waitpid(child, 0)
with Sandbox.create() as own:
    say(own.exec(["echo", "of the parent"]).stdout_text)
"""


@pytest.mark.filterwarnings("ignore")
def test_a_forked_child_leaves_its_parents_alone() -> None:
    with Caller(_FORK, env={"PYTHONWARNINGS": "ignore", "RINGFENCE_PREBUILT": "on"}) as caller:
        assert "of the child\n" == caller.hear()
        assert "of the parent\n" == caller.hear()
