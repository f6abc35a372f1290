"""A gVisor sandbox as the host has it: standing still, ending, mounts to come, what cannot be saved."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.backends.gvisor import places, runsc
from ringfence.backends.gvisor import sandbox as module
from ringfence.backends.gvisor.asked import NO_MEMORY, NO_MEMORY_OF_SOCKETS, check
from ringfence.backends.gvisor.sandbox import GvisorNetwork, GvisorSandbox
from ringfence.backends.local.answers import Refused
from ringfence.backends.local.host import identity
from ringfence.backends.local.network import SandboxNetwork
from ringfence.errors import ExecError, LifecycleError, NetworkPolicyError, SandboxLost, Unsupported
from ringfence.launcher import wire
from ringfence.model.limits import Limits
from ringfence.model.mount import Mount
from ringfence.model.net.network import NetworkPolicy
from ringfence.model.spec import SandboxSpec
from ringfence.model.state import State
from ringfence.model.stats import SandboxStats

pytestmark = pytest.mark.anyone


class Group:
    """A cgroup that notes what is done to it, with what PID 1 was then."""

    version, can_freeze = 2, True

    def __init__(self) -> None:
        self.done: list[str] = []
        self.fails = ""

    def _do(self, what: str) -> None:
        if what == self.fails:
            raise OSError(errno.ENOENT, "no such cgroup")
        self.done.append(what)

    def freeze(self) -> None:
        self._do("freeze")

    def thaw(self) -> None:
        self._do("thaw")

    def unthrottle(self, on: bool) -> None:
        self._do("unthrottle" if on else "throttle")

    def oom_kills(self) -> int:
        return 0


class Owner:
    name = "gvisor"

    def __init__(self) -> None:
        self.released_ones: list[str] = []
        self.attached: list[tuple[Mount, str]] = []
        self.problem: Exception | None = None

    def released(self, sandbox: GvisorSandbox) -> None:
        self.released_ones.append(sandbox.id)

    def attach(self, _sandbox: GvisorSandbox, mount: Mount, more: Any) -> None:
        self.attached.append((mount, f"{more.count}"))
        if self.problem is not None:
            raise self.problem
        more.places[mount.target] = f"{places.MOUNTS}/{more.count}"


class Quiet(GvisorSandbox):
    """One whose agent tells no usage."""

    def _read_stats(self, state: State) -> SandboxStats:
        raise SandboxLost(f"nobody tells, {state.value}")


class Made:
    """One whose PID 1 is a process that waits."""

    def __init__(self, spec: SandboxSpec | None = None) -> None:
        spec = spec or SandboxSpec(tier="strong")
        self.owner, self.group = Owner(), Group()
        self.process = subprocess.Popen(["sleep", "1000"])
        self.agent, control = wire.socketpair()
        draft = SimpleNamespace(
            spec=spec, id="gvisor-1", uid=1000, mounts=[], first_host_id=0, image=None, disk=None,
            shares_pages=False, protected=[], note=None, places={"/there": "/mounts/0"}, count=1,
        )  # fmt: skip
        owner: Any = self.owner
        plan: Any = draft
        group: Any = self.group
        sizes: Any = SimpleNamespace(pids=50)
        no: Any = SimpleNamespace(flags=lambda **how: [f"{key}={how[key]}" for key in how])
        self.sandbox = Quiet(
            owner, plan, sizes, group, control, self.process.pid, os.pidfd_open(self.process.pid),
            os.memfd_create("errors"), no, no, 3,
        )  # fmt: skip
        self.sandbox._state = State.RUNNING

    def close(self) -> None:
        self.group.fails = ""
        self.sandbox.terminate()
        self.process.wait()
        self.agent.close()


@pytest.fixture
def made() -> Iterator[Made]:
    before = len(os.listdir("/proc/self/fd"))
    one = Made()
    yield one
    one.close()
    assert before == len(os.listdir("/proc/self/fd"))
    assert ["gvisor-1"] == one.owner.released_ones


class TestStandingStill:
    def test_one_that_runs_stands_still_for_a_moment(self, made: Made) -> None:
        for _ in range(2):
            with made.sandbox.stand_still():
                assert ["freeze"] == made.group.done
                assert State.RUNNING is made.sandbox.state
            assert ["freeze", "thaw"] == made.group.done
            made.group.done.clear()

    def test_one_that_is_suspended_stays_it(self, made: Made) -> None:
        made.sandbox.suspend()
        assert ["freeze"] == made.group.done
        for _ in range(2):
            with made.sandbox.stand_still():
                pass
            assert ["freeze"] == made.group.done
            assert State.SUSPENDED is made.sandbox.state
        made.sandbox.resume()
        assert ["freeze", "thaw"] == made.group.done

    def test_it_goes_on_although_what_was_done_meanwhile_failed(self, made: Made) -> None:
        with pytest.raises(ValueError, match="x"), made.sandbox.stand_still():
            raise ValueError("x")
        assert ["freeze", "thaw"] == made.group.done
        assert made.sandbox._lock.acquire(blocking=False)
        made.sandbox._lock.release()

    def test_nobody_suspends_resumes_or_ends_it_meanwhile(self, made: Made) -> None:
        import threading

        tried: list[bool] = []

        def other() -> None:
            tried.append(made.sandbox._lock.acquire(blocking=False))
            if tried[-1]:
                made.sandbox._lock.release()

        def ask() -> None:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join(30)

        with made.sandbox.stand_still():
            ask()
        ask()
        made.group.fails = "thaw"
        with pytest.raises(OSError, match="no such"), made.sandbox.stand_still():
            pass
        ask()
        assert [False, True, True] == tried

    def test_awake_is_the_other_way_round(self, made: Made) -> None:
        with made.sandbox.awake():
            assert [] == made.group.done
        made.sandbox.suspend()
        made.group.done.clear()
        with made.sandbox.awake():
            assert ["thaw"] == made.group.done
        assert ["thaw", "freeze"] == made.group.done
        assert State.SUSPENDED is made.sandbox.state
        made.group.done.clear()
        with made.sandbox.awake():
            made.sandbox.terminate()
        assert "freeze" not in made.group.done

    def test_both_can_be_asked_for_twice(self, made: Made) -> None:
        for _ in range(2):
            made.sandbox.suspend()
        for _ in range(2):
            made.sandbox.resume()
        assert ["freeze", "thaw"] == made.group.done

    def test_one_that_cannot_be_frozen_runs_on(self, made: Made) -> None:
        made.group.fails = "freeze"
        with pytest.raises(OSError, match="no such"):
            made.sandbox.suspend()
        assert State.RUNNING is made.sandbox.state
        made.group.fails = ""
        made.sandbox.suspend()
        made.group.fails = "thaw"
        with pytest.raises(OSError, match="no such"):
            made.sandbox.resume()
        assert made.sandbox.paused
        made.group.fails = ""
        made.sandbox.resume()

    @pytest.mark.parametrize("frozen", [True, False])
    def test_without_a_freezer_gvisor_is_asked(
        self, made: Made, frozen: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        entered: list[Any] = []

        def enter(verb: str, request: dict[str, Any], fds: list[int]) -> None:
            entered.append((verb, request["argv"], request["env"], fds))

        monkeypatch.setattr(made.group, "can_freeze", False)
        monkeypatch.setattr(made.sandbox, "enter", enter)
        made.sandbox._freeze(frozen)
        [(verb, argv, env, fds)] = entered
        assert ("run", {"PATH": "/bin"}, []) == (verb, env, fds)
        assert [places.RUNSC, f"--root={places.STATE}"] == argv[:2]
        assert ["pause" if frozen else "resume", "gvisor-1"] == argv[-2:]
        assert [] == made.group.done

        def refuse(*_args: Any) -> None:
            raise Refused(1, "not now")

        monkeypatch.setattr(made.sandbox, "enter", refuse)
        with pytest.raises(ExecError, match=f"{'pause' if frozen else 'resume'}: not now"):
            made.sandbox._freeze(frozen)


class TestEnds:
    def test_a_suspended_one_is_killed_and_then_thawed(self, made: Made) -> None:
        made.sandbox.suspend()
        made.group.done.clear()
        made.sandbox.terminate()
        assert ["unthrottle", "thaw"] == made.group.done
        assert -signal.SIGKILL == made.process.wait(30)
        assert made.sandbox.ended_on_request
        assert (-1, -1) == (made.sandbox.pidfd, made.sandbox.errors)
        made.sandbox.terminate()
        assert ["gvisor-1"] == made.owner.released_ones

    def test_one_that_runs_is_not_thawed_and_a_gone_cgroup_hinders_nobody(self, made: Made) -> None:
        made.group.fails = "unthrottle"
        made.sandbox.terminate()
        assert [] == made.group.done
        assert State.TERMINATED is made.sandbox.state

    def test_one_that_ended_by_itself_is_noticed_and_says_why(self, made: Made) -> None:
        os.write(made.sandbox.errors, b"")
        made.process.kill()
        made.process.wait(30)
        assert State.TERMINATED is made.sandbox.state
        assert not made.sandbox.ended_on_request
        with pytest.raises(LifecycleError, match="ended unexpectedly"):
            made.sandbox.require_awake()
        with pytest.raises(SandboxLost):
            made.sandbox.borrow_pidfd()
        for act in (made.sandbox.suspend, made.sandbox.resume, made.sandbox.end_processes):
            with pytest.raises(LifecycleError, match="terminated"):
                act()
        assert ["gvisor-1"] == made.owner.released_ones

    def test_the_reason_for_which_it_was_ended_is_told(self, made: Made) -> None:
        made.sandbox.end_because("it took too much")
        assert "ended: it took too much" in str(made.sandbox.lost_error())
        assert "was ended: it took too much" in str(made.sandbox.terminated_error())
        assert not made.sandbox.ended_on_request

    def test_limits_are_lifted_until_the_last_of_those_is_killed(self, made: Made) -> None:
        for on in (True, True, False, True, False):
            made.sandbox.unthrottle(on)
        assert ["unthrottle"] == made.group.done
        made.sandbox.unthrottle(False)
        assert ["unthrottle", "throttle"] == made.group.done
        made.group.fails = "unthrottle"
        made.sandbox.unthrottle(True)
        made.group.fails = ""
        made.sandbox.unthrottle(False)
        assert ["unthrottle", "throttle", "throttle"] == made.group.done

    def test_too_few_processes_of_the_host_are_named_as_the_cause(
        self, made: Made, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(runsc, "last_words", lambda _fd: "it said so")
        monkeypatch.setattr(runsc, "lacks_processes", lambda _said: False)
        assert "gVisor: it said so" == made.sandbox._cause()
        monkeypatch.setattr(runsc, "lacks_processes", lambda _said: True)
        most = runsc.host_pids(50)
        assert f"may have {most} processes" in made.sandbox._cause()
        assert "limits.pids=50" in made.sandbox._cause()
        monkeypatch.setattr(made.group, "oom_kills", lambda: 1)
        assert "out of the memory" in made.sandbox._cause()

    def test_what_remains_is_ended_again_and_limits_hold_afterwards(
        self, made: Made, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        left = [2, 1, 0]
        monkeypatch.setattr(made.sandbox, "_end_programs", lambda: left.pop(0))
        made.sandbox.end_processes()
        assert [] == left
        assert ["unthrottle", "throttle"] == made.group.done
        monkeypatch.setattr(made.sandbox, "_end_programs", lambda: 3)
        monkeypatch.setattr("ringfence.backends.local.sandbox._CLEARING_S", 0.0)
        with pytest.raises(ExecError, match="3 processes"):
            made.sandbox.end_processes()
        assert ["unthrottle", "throttle"] * 2 == made.group.done
        made.sandbox.suspend()
        with pytest.raises(LifecycleError, match="suspended"):
            made.sandbox.end_processes()


class TestMounts:
    def test_each_later_mount_has_a_place_of_its_own_also_after_one_that_failed(
        self, made: Made
    ) -> None:
        made.sandbox.has_network = False
        for i, fails in ((1, False), (2, True), (3, False)):
            made.owner.problem = Unsupported("no") if fails else None
            more = made.sandbox._more_mounts()
            mount = Mount(f"/m{i}", "/srv")
            if fails:
                with pytest.raises(Unsupported):
                    made.sandbox._attach(mount, more)
            else:
                made.sandbox._attach(mount, more)
        assert ["1", "2", "3"] == [number for _mount, number in made.owner.attached]
        expected = {target: f"{places.MOUNTS}/{i}" for target, i in (("/m1", 1), ("/m3", 3))}
        assert {"/there": "/mounts/0", **expected} == made.sandbox.places

    def test_a_mount_under_way_changes_nothing_of_what_is_there(self, made: Made) -> None:
        more = made.sandbox._more_mounts()
        more.places["/x"] = "/y"
        more.mounts.append(more)  # type: ignore[arg-type]
        assert {"/there": "/mounts/0"} == made.sandbox.places
        assert [] == made.sandbox.mounts


class TestRefusals:
    @pytest.mark.parametrize(
        ("trusted", "network", "later", "why"),
        [
            (False, False, False, NO_MEMORY),
            (True, True, False, NO_MEMORY_OF_SOCKETS),
            (True, True, True, NO_MEMORY_OF_SOCKETS),
            (True, False, True, "gVisor does not restore mounts that were added while it ran"),
            (True, False, False, ""),
        ],
    )
    def test_what_cannot_be_saved_with_its_memory(
        self, made: Made, monkeypatch: pytest.MonkeyPatch,
        trusted: bool, network: bool, later: bool, why: str,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(module, "host", lambda: SimpleNamespace(trusted_root=trusted))
        made.sandbox.has_network, made.sandbox.shows_later = network, later
        assert why == made.sandbox.not_saved()[0]

    @pytest.mark.parametrize("trusted", [True, False])
    @pytest.mark.parametrize(
        ("uid", "is_mapped"),
        [
            (0, True), (identity.LOW_IDS - 1, True), (identity.LOW_IDS, False),
            (identity.NOBODY, True), (identity.NOBODY + 1, False),
        ],
    )  # fmt: skip
    def test_whom_programs_may_be(
        self, made: Made, monkeypatch: pytest.MonkeyPatch, trusted: bool, uid: int, is_mapped: bool
    ) -> None:
        monkeypatch.setattr(module, "host", lambda: SimpleNamespace(trusted_root=trusted))
        is_of_it = uid == 1000
        assert made.sandbox._may_be(1000)
        assert (is_of_it or (trusted and is_mapped)) == made.sandbox._may_be(uid)
        assert [f"rootless={not trusted}", "network=False"] == made.sandbox.flags()

    @pytest.mark.parametrize(("version", "lost"), [(0, True), (1, False), (2, False)])
    def test_without_a_cgroup_its_memory_is_not_limited(
        self, made: Made, version: int, lost: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(made.group, "version", version)
        assert lost == ("memory_limit" in made.sandbox._degraded())

    @pytest.mark.parametrize("has_network", [True, False])
    def test_one_without_network_gets_none_later(
        self, made: Made, has_network: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(SandboxNetwork, "check", lambda _self, _policy: None)
        made.sandbox.has_network = has_network
        network = GvisorNetwork.__new__(GvisorNetwork)
        network._sandbox = made.sandbox
        network.check(NetworkPolicy())
        if has_network:
            network.check(NetworkPolicy.parse("a.test"))
        else:
            with pytest.raises(NetworkPolicyError):
                network.check(NetworkPolicy.parse("a.test"))


@pytest.mark.parametrize(
    ("limits", "refused"),
    [
        ({}, ""),
        ({"idle_timeout_s": 60.0}, "idle_timeout_s"),
        ({"io_bytes_per_s": 1 << 20}, "io_bytes_per_s"),
    ],
)
def test_limits_that_nobody_watches_are_refused(limits: dict[str, Any], refused: str) -> None:
    spec = SandboxSpec(tier="strong", limits=Limits(**limits))
    if not refused:
        check(spec)
        return
    with pytest.raises(Unsupported) as problem:
        check(spec)
    assert f"limits.{refused}" == problem.value.field
