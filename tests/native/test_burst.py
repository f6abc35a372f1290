"""The sandbox that is built ahead in a burst: used by who asks for the same, gone soon, nobody's till then.

After two that were asked for in the same words it is their twin, locked down already; else it waits for a plan.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ringfence import Limits, Sandbox, SandboxSpec
from ringfence.backends.native.backend import NativeBackend
from ringfence.backends.native.prebuilt import burst
from ringfence.backends.native.provision import Provision
from ringfence.backends.native.request import request
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
LONG_S = 30.0


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NativeBackend]:
    """One whose bursts last: tests are not to depend on how fast this machine is."""
    monkeypatch.setattr(burst, "KEEP_S", LONG_S)
    made = NativeBackend(state_dir=str(tmp_path / "snapshots"), ahead=True)
    yield made
    made.close()


def twice(
    backend: NativeBackend, spec: SandboxSpec | None = None, first: SandboxSpec | None = None
) -> int:
    """Begin a burst; returns the host's pid of the process that is ahead after it.

    Args:
        first: What is asked for the first time, if that is something else.
    """
    over = set()
    for each in (first or spec, spec):
        with Sandbox.create(each, backend=backend) as sandbox:
            over.add(init_pid(sandbox))
    zygote = backend.zygote().pid
    # The last one may not have been reaped, and the next one not be there yet.
    assert until(lambda: 1 == len(set(children_of(zygote)) - over))
    assert until(lambda: 1 == len(children_of(zygote)))
    return children_of(zygote)[0]


# Of the same kind as what is asked for by default, in other words.
OTHER_WORDS = SandboxSpec(limits=Limits(open_files=777))


def waits(pid: int) -> bool:
    """Whether its first half is done: it holds nothing of the zygote's any more."""
    return 15 == len(open_fds(pid))


def is_locked_down(pid: int) -> bool:
    """Whether the filter, the last that is put up, is in force."""
    return "\nSeccomp:\t2\n" in Path(f"/proc/{pid}/status").read_text()


def test_after_two_alike_it_is_locked_down_before_anybody_comes(backend: NativeBackend) -> None:
    ahead = twice(backend)
    assert until(lambda: is_locked_down(ahead))

    with Sandbox.create(backend=backend) as third:
        assert ahead == init_pid(third)
        assert third.exec(["true"]).ok
        if 0 == os.geteuid():
            assert third.exec(["true"], user="root").ok  # by an agent, which must know its key


def test_after_two_that_differ_it_waits_for_a_plan(backend: NativeBackend) -> None:
    ahead = twice(backend, first=OTHER_WORDS)
    assert until(lambda: waits(ahead))
    assert not is_locked_down(ahead)

    with Sandbox.create(backend=backend) as third:
        assert ahead == init_pid(third)
        assert is_locked_down(ahead)


def test_each_twin_has_a_key_of_its_own(backend: NativeBackend) -> None:
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
        {"network": ("example.com:443",)},
        {"mounts": ("/usr/share:/srv/shared:ro",)},
    ],
    ids=str,
)
def test_a_twin_is_nobodys_who_asks_in_other_words(
    backend: NativeBackend, other: dict[str, Any]
) -> None:
    """It has become what the last two were, and can become nothing else."""
    ahead = twice(backend)
    pinned = pin([ahead])

    with Sandbox.create(backend=backend, **other) as sandbox:
        assert ahead != init_pid(sandbox)
        assert sandbox.exec(["true"]).ok

    assert [] == survivors(pinned, GONE_WITHIN_S)


def test_what_says_nothing_of_its_isolation_may_differ(backend: NativeBackend) -> None:
    """Names and environments are told with each command."""
    ahead = twice(backend)

    spec = SandboxSpec(env={"OWN": "value"}, labels={"task": "third"})
    with Sandbox.create(spec, backend=backend) as third:
        assert ahead == init_pid(third)
        assert "value\n" == third.exec(["printenv", "OWN"]).text


def test_a_twin_that_was_stopped_for_long_is_not_given_to_two(backend: NativeBackend) -> None:
    """The word of its owner lies there when the zygote closes its end: it looks for that first."""
    ahead = twice(backend)
    assert until(lambda: is_locked_down(ahead))
    os.kill(ahead, signal.SIGSTOP)

    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(lambda: Sandbox.create(backend=backend))
        assert until(lambda: 2 == len(children_of(backend.zygote().pid)))
        os.kill(ahead, signal.SIGCONT)

        with made.result() as sandbox:
            assert ahead == init_pid(sandbox)
            assert sandbox.exec(["true"]).ok


def test_who_asks_for_the_same_gets_it(backend: NativeBackend) -> None:
    ahead = twice(backend)

    with Sandbox.create(backend=backend) as sandbox:
        assert ahead == init_pid(sandbox)
        assert sandbox.exec(["true"]).ok


@pytest.fixture
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is built while a sandbox runs, and nobody is in haste."""
    monkeypatch.setattr(burst, "CALM_S", LONG_S)
    monkeypatch.setattr(burst, "_HASTE_S", 0.0)


@pytest.mark.usefixtures("calm")
def test_it_is_built_when_the_one_before_it_has_ended(backend: NativeBackend) -> None:
    Sandbox.create(backend=backend).terminate()
    zygote = backend.zygote().pid
    assert until(lambda: not children_of(zygote))

    with Sandbox.create(backend=backend) as second:
        assert second.exec(["true"]).ok
        expected = backend.burst._ahead
        assert expected is not None
        assert [init_pid(second)] == children_of(zygote)
        over = init_pid(second)

    assert until(lambda: [each for each in children_of(zygote) if each != over])
    with Sandbox.create(backend=backend) as third:
        assert expected.id == third.id


@pytest.mark.usefixtures("calm")
@pytest.mark.parametrize("limits", [None, Limits(memory_bytes=64 << 20)], ids=["same", "less"])
def test_who_asks_before_it_is_built_gets_it(backend: NativeBackend, limits: Limits | None) -> None:
    """Whether the sandbox is told itself or the zygote sets its limits first."""
    Sandbox.create(OTHER_WORDS, backend=backend).terminate()

    with Sandbox.create(backend=backend):
        expected = backend.burst._ahead
        assert expected is not None
        with Sandbox.create(backend=backend, limits=limits) as third:
            assert expected.id == third.id
            assert third.exec(["true"]).ok


@pytest.mark.usefixtures("calm")
def test_one_that_is_not_built_yet_can_be_given_up(backend: NativeBackend) -> None:
    Sandbox.create(backend=backend).terminate()

    with Sandbox.create(backend=backend):
        expected = backend.burst._ahead
        assert expected is not None
        with Sandbox.create(backend=backend, user="nobody") as other:
            assert expected.id != other.id
        assert [] == cgroups_of(expected.id)


@pytest.mark.usefixtures("calm")
def test_one_that_is_taken_is_not_forgotten_for_the_next(backend: NativeBackend) -> None:
    """Somebody has it, and has not said so yet, when another one is asked for ahead."""
    Sandbox.create(backend=backend).terminate()
    spec = SandboxSpec()
    asked = request(spec, backend.profiles)

    with Sandbox.create(backend=backend):
        taken = backend.burst.take(asked, backend.zygote())
        assert taken is not None
        with Sandbox.create(backend=backend) as between:
            assert taken.id != between.id
            made = Provision(backend, backend.burst, asked, taken).run()
            with Sandbox(made, spec) as late:
                assert late.exec(["true"]).ok


@pytest.mark.usefixtures("calm")
def test_in_a_loop_without_a_pause_it_is_built_at_once(
    backend: NativeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(burst, "_HASTE_S", LONG_S)
    Sandbox.create(backend=backend).terminate()
    zygote = backend.zygote().pid
    assert until(lambda: not children_of(zygote))

    with Sandbox.create(backend=backend):
        assert until(lambda: len(children_of(zygote)) == 2)


def test_a_single_sandbox_has_no_successor(backend: NativeBackend) -> None:
    with Sandbox.create(backend=backend) as sandbox:
        # For a moment there may be who makes what it sleeps in.
        assert until(lambda: [init_pid(sandbox)] == children_of(backend.zygote().pid))


def test_nobody_comes(tmp_path: Path) -> None:
    """At rest there is none: no process, no cgroup, no descriptor of the zygote's."""
    quick = NativeBackend(state_dir=str(tmp_path), ahead=True)
    try:
        Sandbox.create(backend=quick).terminate()
        zygote = quick.zygote().pid
        assert until(lambda: not children_of(zygote))
        before = lasting_fds(zygote)
        deadline_s = time.monotonic() + 60
        while quick.burst._ahead is None:  # a slow machine has bursts too, now and then
            Sandbox.create(backend=quick).terminate()
            assert time.monotonic() < deadline_s
        name = quick.burst._ahead.id

        assert until(lambda: not children_of(zygote), GONE_WITHIN_S)
        assert until(lambda: [] == cgroups_of(name), GONE_WITHIN_S)
        assert until(lambda: before == lasting_fds(zygote))
    finally:
        quick.close()


def lasting_fds(zygote: int) -> set[int]:
    """Those of the zygote's that are not the namespaces of one that has ended, which it closes."""
    kinds = ("mnt:", "pid:")
    return {fd for fd, what in open_fds(zygote).items() if not what.startswith(kinds)}


def test_it_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burst, "KEEP_S", LONG_S)
    monkeypatch.setenv("RINGFENCE_AHEAD", "off")
    for cold in (NativeBackend(state_dir=str(tmp_path)), NativeBackend(ahead=False)):
        for _ in range(3):
            Sandbox.create(backend=cold).terminate()
        assert cold.burst._ahead is None
        cold.close()


@pytest.mark.parametrize(
    "other",
    [
        {"network": "unrestricted"},
        {"user": "nobody"},
        {"profile": "unrestricted"},
        {"python_env": True},
        {"id": "one-of-our-own"},
    ],
    ids=str,
)
def test_who_asks_for_something_else_gets_a_new_one(
    backend: NativeBackend, other: dict[str, object]
) -> None:
    """The one ahead has ended before the new one is made: it could have the same ids."""
    ahead = pin([twice(backend)])

    with Sandbox.create(backend=backend, **other) as sandbox:  # type: ignore[arg-type]
        assert [] == survivors(ahead, 0)
        assert sandbox.exec(["true"]).ok


@pytest.mark.parametrize("memory_mib", [32, 64, 256])
def test_its_limits_are_those_that_were_asked_for(backend: NativeBackend, memory_mib: int) -> None:
    """Whether more or less than the last one's, which were set already."""
    before = Limits(disk_bytes=9 << 20, pids=99, inodes=900, memory_bytes=memory_mib << 20)
    ahead = twice(backend, SandboxSpec(limits=before), OTHER_WORDS)
    limits = Limits(pids=37, disk_bytes=5 << 20, inodes=300, open_files=99, memory_bytes=64 << 20)

    with Sandbox.create(backend=backend, limits=limits) as sandbox:
        assert ahead == init_pid(sandbox)
        said = sandbox.shell("ulimit -n; df -i / | tail -1; df -k / | tail -1").text.split()
        assert "99" == said[0]
        assert "300" == said[2]
        assert str(5 << 10) in said
        protections = {each.name: each for each in sandbox.protections()}
        assert "37 by" in protections["pids_limit"].why
        assert "64 MiB" in protections["memory_limit"].why


def test_a_share_of_processors_is_not_passed_on(backend: NativeBackend) -> None:
    """One that was not asked for limits nobody, and one that was is not the last one's."""
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
            assert any("cpu" in line.split(":")[1] and name in line for line in joined.splitlines())
            quota = int((directory / "cpu.cfs_quota_us").read_text())
            return quota / int((directory / "cpu.cfs_period_us").read_text())
        if (directory / "cpu.max").exists():
            share, period = (directory / "cpu.max").read_text().split()
            return None if "max" == share else int(share) / int(period)
    assert not any("cpu" == line.split(":")[1] and name in line for line in joined.splitlines())
    return None


def test_mounts_of_the_last_one_are_not_in_it(backend: NativeBackend, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for place in (first, second):
        place.mkdir()
        (place / "name").write_text(place.name)
    twice_with = [f"{first}:/mnt/first:ro", f"{first}:/srv/data:rw"]
    for _ in range(2):
        Sandbox.create(backend=backend, mounts=twice_with).terminate()

    with Sandbox.create(backend=backend, mounts=[f"{second}:/mnt/second:ro"]) as sandbox:
        assert "second" == sandbox.shell("cat /mnt/*/name").text
        assert not sandbox.exec(["ls", "/srv"]).ok


def test_a_refused_request_ends_it(backend: NativeBackend, tmp_path: Path) -> None:
    """What it needed is free again: many refusals use up nothing."""
    for _ in range(3):
        ahead = pin([twice(backend)])
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to("elsewhere")

        with pytest.raises(InvalidRequest):
            Sandbox.create(backend=backend, mounts=[f"{tmp_path}:/work:rw"], protect=["link/below"])

        assert [] == survivors(ahead, GONE_WITHIN_S)
        assert until(lambda: not children_of(backend.zygote().pid))


def test_a_claim_that_lies_there_holds(backend: NativeBackend) -> None:
    """The zygote has closed its end before the one ahead reads its plan: it looks for that first."""
    ahead = twice(backend, first=OTHER_WORDS)
    assert until(lambda: waits(ahead))
    offer = backend.burst._ahead.control  # type: ignore[union-attr]
    os.kill(ahead, signal.SIGSTOP)

    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(lambda: Sandbox.create(backend=backend))
        zygote = backend.zygote().pid
        assert until(lambda: 2 == len(children_of(zygote)))  # it has read the note, and goes on
        assert not made.done()
        os.kill(ahead, signal.SIGCONT)

        with made.result() as sandbox:
            assert (ahead, offer) == (init_pid(sandbox), sandbox._inner.control)  # type: ignore[attr-defined]
            assert sandbox.exec(["true"]).ok


def test_what_brings_a_mount_is_claimed_by_the_zygote(
    backend: NativeBackend, tmp_path: Path
) -> None:
    ahead = twice(backend, first=OTHER_WORDS)
    offer = backend.burst._ahead.control  # type: ignore[union-attr]

    with Sandbox.create(backend=backend, mounts=[f"{tmp_path}:/work:ro"]) as sandbox:
        assert ahead == init_pid(sandbox)
        assert offer is not sandbox._inner.control  # type: ignore[attr-defined]
        assert -1 == offer.fileno()


def test_it_died_meanwhile(backend: NativeBackend) -> None:
    """Who comes for it gets a new one, and never hears of it."""
    ahead = twice(backend)
    pinned = pin([ahead])
    os.kill(ahead, signal.SIGKILL)
    assert [] == survivors(pinned, GONE_WITHIN_S)

    with Sandbox.create(backend=backend) as sandbox:
        assert ahead != init_pid(sandbox)
        assert sandbox.exec(["true"]).ok


def test_the_zygote_is_killed(backend: NativeBackend) -> None:
    ahead = twice(backend)
    assert until(lambda: is_locked_down(ahead))
    pinned = pin([ahead])

    os.kill(backend.zygote().pid, signal.SIGKILL)

    assert [] == survivors(pinned, GONE_WITHIN_S)
    with Sandbox.create(backend=backend) as sandbox:
        assert sandbox.exec(["true"]).ok


_BURST = """
from ringfence.backends.native.prebuilt import burst
burst.KEEP_S = 30
for _ in range(2):
    Sandbox.create().terminate()
from ringfence.backends.registry import backend_named
backend = backend_named("native")
say([backend.zygote().pid, backend.burst._ahead.id])
listen()
"""


def test_the_caller_is_killed() -> None:
    with Caller(_BURST) as caller:
        zygote, name = caller.hear()
        assert until(lambda: 1 == len(children_of(zygote)))
        pinned = pin([zygote, *children_of(zygote)])

        caller.kill(signal.SIGKILL)

        assert [] == survivors(pinned, GONE_WITHIN_S)
        assert until(lambda: not cgroups_of(name))


_FORK = """
from ringfence.backends.native.prebuilt import burst
burst.KEEP_S = 30
for _ in range(2):
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
    with Caller(_FORK, env={"PYTHONWARNINGS": "ignore"}) as caller:
        assert "of the child\n" == caller.hear()
        assert "of the parent\n" == caller.hear()
