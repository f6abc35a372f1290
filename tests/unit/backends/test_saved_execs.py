"""What goes on after its sandbox was saved with its memory: streams apart, holds, and what is given back."""

from __future__ import annotations

import errno
import os
import resource
import select
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.backends.local.jailed import saving, whole
from ringfence.backends.local.jailed.whole import RelayedExec, WholeTemplate
from ringfence.errors import InvalidRequest, IoError, LifecycleError, SandboxLost, Unsupported
from ringfence.launcher import wire
from ringfence.model.execs.exec import ExecRequest
from ringfence.model.limits import Limits
from ringfence.model.net.network import NetworkPolicy
from ringfence.model.spec import SandboxSpec

pytestmark = pytest.mark.anyone
PATIENCE_MS = 30_000


class Home:
    """A sandbox whose agent answers each request as the test has it, of which it keeps the descriptors."""

    backend = SimpleNamespace(name="gvisor")
    ended_on_request, crowded = False, 0

    def __init__(self, *answers: bytes) -> None:
        self.control, self.agent = wire.socketpair()
        self.answers = [*answers]
        self.asked: list[tuple[Any, ...]] = []
        self.received: list[int] = []
        self.attended: list[str] = []
        self.awake = True

    def request(self, verb: str, args: tuple[Any, ...], fds: tuple[int, ...] = ()) -> wire.Socket:
        ours, theirs = wire.socketpair()
        self.asked.append((verb, *args))
        self.received += [os.dup(fd) for fd in fds]
        for each in self.answers:
            wire.send_raw(theirs, each)
        theirs.close()
        return ours

    def require_awake(self) -> None:
        if not self.awake:
            raise LifecycleError("it has ended")

    def oom_kills(self) -> int | None:
        return None

    def attend(self, run: RelayedExec) -> None:
        self.attended.append(run.id)

    def forget(self, run: RelayedExec) -> None:
        """Its exec has ended, or is closed."""

    def lost_error(self) -> SandboxLost:
        return SandboxLost("it is gone")

    def end_unwatched(self) -> None:
        """Nobody watches over its exec any more."""

    def close(self) -> None:
        for fd in self.received:
            os.close(fd)
        self.received.clear()
        self.control.close()
        self.agent.close()


class Made:
    """A relayed exec with three pipes, whose far ends the agent has."""

    def __init__(self, home: Home, number: int = 7) -> None:
        self.reply, ours = wire.socketpair()
        pipes = [os.pipe() for _ in range(3)]
        near = pipes[0][1], pipes[1][0], pipes[2][0]
        self.far = [pipes[0][0], pipes[1][1], pipes[2][1]]
        sandbox: Any = home
        self.run = RelayedExec(sandbox, number, home.control, ours, near, None, "tool", "/work")

    def let_go(self) -> None:
        """Close the agent's ends, as one that is saved does."""
        for fd in self.far:
            os.close(fd)
        self.far.clear()

    def close(self) -> None:
        self.run.close()
        self.let_go()
        self.reply.close()


@pytest.fixture
def home() -> Iterator[Home]:
    before = len(os.listdir("/proc/self/fd"))
    one = Home(b"O", b"O")
    yield one
    one.close()
    assert before == len(os.listdir("/proc/self/fd"))


@pytest.fixture
def made(home: Home) -> Iterator[Made]:
    one = Made(home)
    yield one
    one.close()


def is_ready(fd: int, events: int = select.POLLIN) -> bool:
    poll = select.poll()
    poll.register(fd, events)
    return bool(poll.poll(0))


class TestApart:
    def test_its_streams_and_its_driver_do_not_see_that_the_agent_lets_go(self, made: Made) -> None:
        run = made.run
        done = run.done
        run.leave()
        made.let_go()
        made.reply.close()
        assert run.stdout is not None
        assert run.stdin is not None
        assert not is_ready(run.stdout)
        assert not is_ready(run.stdin, 0), "its input would be broken"
        assert not is_ready(done)
        run.stay()
        run.stay()
        assert done == run.done
        assert is_ready(done)
        assert is_ready(run.stdout, 0)

    def test_it_is_apart_once_at_a_time(self, made: Made) -> None:
        made.run.leave()
        with pytest.raises(LifecycleError, match="exec-7 is being saved already"):
            made.run.leave()
        made.run.stay()
        made.run.leave()
        made.run.stay()

    def test_one_that_has_ended_or_is_closed_is_none_to_save(self, made: Made) -> None:
        wire.send_raw(made.reply, wire.ExecReport().pack())
        made.run.status()
        with pytest.raises(LifecycleError, match="has just ended"):
            made.run.leave()
        made.run.close()
        assert -1 == made.run.done
        with pytest.raises(LifecycleError, match="has just ended"):
            made.run.leave()

    def test_closing_while_it_is_apart_closes_all(self, made: Made) -> None:
        made.run.leave()
        made.run.close()
        made.run.stay()

    @pytest.mark.parametrize("room", [0, 1, 2])
    def test_too_few_descriptors_leave_it_as_it_was(self, made: Made, room: int) -> None:
        before = len(os.listdir("/proc/self/fd"))
        probe = [os.open("/dev/null", os.O_RDONLY) for _ in range(room + 1)]
        for fd in probe:
            os.close(fd)
        old = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (probe[room], old[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                made.run.leave()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, old)
        assert before == len(os.listdir("/proc/self/fd"))
        made.run.leave()
        made.run.stay()

    def test_it_goes_on_in_the_sandbox_in_its_place(self, made: Made, home: Home) -> None:
        done = made.run.done
        other = Home(b"O")
        made.run.leave()
        made.let_go()
        sandbox: Any = other
        made.run.move(sandbox)
        made.run.move(sandbox)
        assert [("join", 7, (0, 1, 2))] == other.asked
        assert ["exec-7"] == other.attended
        assert [] == home.asked
        reply, stdin, stdout, stderr = other.received
        os.write(stdout, b"out")
        os.write(stderr, b"err")
        assert made.run.stdin is not None
        os.write(made.run.stdin, b"in")
        assert b"in" == os.read(stdin, 9)
        assert [b"out", b"err"] == [
            os.read(fd or 0, 9) for fd in (made.run.stdout, made.run.stderr)
        ]
        assert not is_ready(done)
        agent = wire.adopt(os.dup(reply))
        wire.send_raw(agent, wire.ExecReport(wait_status=3 << 8).pack())
        agent.close()
        assert is_ready(done)
        assert 3 == made.run.status().exit_code
        assert made.run._control is other.control
        other.close()

    @pytest.mark.parametrize("answers", [(b"E3 no such exec",), ()])
    def test_one_that_cannot_be_joined_ends_as_lost(
        self, made: Made, answers: tuple[bytes, ...]
    ) -> None:
        other: Any = Home(*answers)
        made.run.leave()
        made.run.move(other)
        assert [] == other.attended
        assert made.run._far is None
        assert made.run._sandbox is not other
        made.reply.close()
        assert is_ready(made.run.done)
        other.close()


class TestHolds:
    def templates(self, home: Home, count: int = 2) -> tuple[list[Made], list[WholeTemplate]]:
        sandbox: Any = home
        runs = [Made(home, i) for i in range(count)]
        return runs, [WholeTemplate(sandbox, each.run) for each in runs]

    def test_all_let_go_and_the_agent_is_told_of_them(self, home: Home) -> None:
        sandbox: Any = home
        runs, templates = self.templates(home)
        whole.hold(sandbox, templates)
        assert [("settle", 0, 1)] == home.asked
        assert [True, True] == [each.is_held for each in templates]
        for each in templates:
            each.release()
            assert not each.is_held
            each.close()
        assert [("join", 0, (0, 1, 2)), ("join", 1, (0, 1, 2))] == home.asked[1:]
        assert ["exec-0", "exec-1"] == home.attended
        for one in runs:
            one.close()

    @pytest.mark.parametrize("failing", [0, 1, 2])
    def test_where_one_cannot_all_go_on(self, home: Home, failing: int) -> None:
        """Also those of another template: an exec that is being saved stays apart."""
        sandbox: Any = home
        runs, templates = self.templates(home, 3)
        runs[failing].run.leave()
        with pytest.raises(Unsupported, match=f"exec-{failing} is being saved already"):
            whole.hold(sandbox, templates)
        assert [] == home.asked
        assert [False] * 3 == [each.is_held for each in templates]
        apart = [each.run._far is not None for each in runs]
        assert [i == failing for i in range(3)] == apart
        for one in runs:
            one.close()

    def test_where_something_else_holds_what_is_the_hosts_all_go_on(self, home: Home) -> None:
        sandbox: Any = home
        home.answers = [b"E16 python (12)"]
        runs, templates = self.templates(home)
        with pytest.raises(Unsupported, match=r"open in: python \(12\)"):
            whole.hold(sandbox, templates)
        assert [False] * 2 == [each.is_held for each in templates]
        assert [None] * 2 == [each.run._far for each in runs]
        for one in runs:
            one.close()

    @pytest.mark.parametrize("awake", [True, False])
    @pytest.mark.parametrize("answers", [(), (b"O",)])
    def test_an_agent_that_lets_go_closes_its_end(
        self, home: Home, answers: tuple[bytes, ...], awake: bool
    ) -> None:
        sandbox: Any = home
        home.answers, home.awake = [*answers], awake
        if awake:
            saving.settle(sandbox)
        else:
            with pytest.raises(LifecycleError, match="ended"):
                saving.settle(sandbox)


@pytest.mark.parametrize("stdin", [True, False])
def test_a_copy_is_attended_with_streams_of_its_own(home: Home, stdin: bool) -> None:
    sandbox: Any = home
    request = ExecRequest(argv=("tool",), stdin=b"x" if stdin else None)
    run = whole.rejoin(sandbox, 7, request, "tool", "/work")
    ends = (0, 1, 2) if stdin else (1, 2)
    assert [("join", 7, ends)] == home.asked
    assert ["exec-7"] == home.attended
    os.write(home.received[-1], b"err")
    assert b"err" == os.read(run.stderr or 0, 9)
    assert stdin == (run.stdin is not None)
    run.close()


@pytest.mark.parametrize("answers", [(b"E3 no such exec",), ()])
def test_a_copy_that_does_not_go_on_leaves_nothing_open(
    home: Home, answers: tuple[bytes, ...]
) -> None:
    sandbox: Any = home
    home.answers = [*answers]
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Unsupported, match="exec 7 did not go on"):
        whole.rejoin(sandbox, 7, ExecRequest(argv=("tool",)), "tool", "/work")
    assert before + len(home.received) == len(os.listdir("/proc/self/fd"))
    assert [] == home.attended


@pytest.mark.parametrize(
    ("cpus", "before", "is_told"),
    [(1.0, None, True), (1.0, 2.0, False), (None, None, False), (None, 2.0, False)],
)
def test_a_limit_of_the_processor_that_is_new_is_told(
    cpus: float | None, before: float | None, is_told: bool
) -> None:
    asked: list[str] = []
    spec = SandboxSpec(limits=Limits(cpus=cpus))
    sandbox: Any = SimpleNamespace(spec=spec, ask=asked.append)
    saving.tell_limits(sandbox, SandboxSpec(limits=Limits(cpus=before)))
    assert (["throttled"] if is_told else []) == asked


class TestKept:
    SPEC = SandboxSpec(tier="strong", limits=Limits(pids=9))

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({}, ""),
            ({"labels": {"a": "b"}}, ""),
            ({"limits": Limits(pids=9, cpus=1.0)}, ""),
            ({"limits": Limits(pids=9, io_bytes_per_s=1 << 20)}, ""),
            ({"limits": Limits(pids=9, network_bytes=1 << 20)}, ""),
            ({"limits": Limits(pids=9, wall_time_s=5.0)}, ""),
            ({"limits": Limits(pids=9, output_bytes=1 << 20)}, ""),
            ({"limits": Limits(pids=9, idle_timeout_s=50.0)}, ""),
            ({"limits": Limits(pids=8)}, "limits.pids"),
            ({"limits": Limits()}, "limits.pids"),
            ({"limits": Limits(pids=9, memory_bytes=1 << 27)}, "limits.memory_bytes"),
            ({"limits": Limits(pids=9, disk_bytes=1 << 27)}, "limits.disk_bytes"),
            ({"limits": Limits(pids=9, open_files=99)}, "limits.open_files"),
            ({"secrets": {"A": "x"}}, "secrets"),
        ],
    )
    def test_limits_that_the_guest_knows_stay(self, change: dict[str, Any], field: str) -> None:
        wanted = self.SPEC.altered(**change)
        for network in (True, False):
            assert field == saving.kept_inside(wanted, self.SPEC, network=network)
        if field:
            with pytest.raises(InvalidRequest, match=f"{field} differs"):
                saving.check_goes_on(wanted, self.SPEC)
        else:
            saving.check_goes_on(wanted, self.SPEC)

    @pytest.mark.parametrize("network", [True, False])
    def test_another_network_is_for_who_keeps_it_outside(self, network: bool) -> None:
        wanted = self.SPEC.altered(network=NetworkPolicy.parse("a.test"))
        assert ("" if network else "network") == saving.kept_inside(
            wanted, self.SPEC, network=network
        )
        assert "" == saving.kept_inside(wanted, wanted, network=network)

    def test_no_other_field_may_differ(self) -> None:
        saving.check_goes_on(None, self.SPEC)
        saving.check_goes_on(self.SPEC.altered(id="other"), self.SPEC)
        for change in ({"env": {"A": "1"}}, {"user": "root"}, {"workdir": "/x"}):
            wanted: Any = self.SPEC.altered(**change)
            with pytest.raises(InvalidRequest, match="own spec only"):
                saving.check_goes_on(wanted, self.SPEC)


class TestKeeping:
    """One thread packs while the other stores; of what is not whole nothing is stored."""

    def keep(self, pack: Any, save: Any) -> tuple[Any, list[str]]:
        deleted: list[str] = []
        catalogue: Any = SimpleNamespace(save=save, delete=deleted.append)
        sizes = SimpleNamespace(disk_bytes=800)
        sandbox: Any = SimpleNamespace(id="one", spec=SandboxSpec(), sizes=sizes)
        before = len(os.listdir("/proc/self/fd")), threading.active_count()
        try:
            return saving.keep(sandbox, catalogue, {"a": "b"}, pack), deleted
        except IoError as exc:
            return exc, deleted
        finally:
            assert before == (len(os.listdir("/proc/self/fd")), threading.active_count())

    @staticmethod
    def save(read: int, snapshot_id: str, _spec: Any, most: int, **more: Any) -> Any:
        data = b""
        while piece := os.read(read, 1 << 16):
            data += piece
        assert (900 + (64 << 20), "one", {"a": "b"}, "") == (
            most, more["session_id"], more["metadata"], more["memory"],
        )  # fmt: skip
        return SimpleNamespace(id=snapshot_id, data=data)

    def test_what_is_whole_is_stored(self) -> None:
        snapshot, deleted = self.keep(lambda fd: os.write(fd, b"tree"), self.save)
        assert (b"tree", []) == (snapshot.data, deleted)

    @pytest.mark.parametrize(
        "error", [OSError(errno.EIO, "torn"), SandboxLost("torn"), KeyError("torn")]
    )
    def test_what_was_not_packed_whole_is_deleted(self, error: Exception) -> None:
        def pack(fd: int) -> None:
            os.write(fd, b"half")
            raise error

        found, deleted = self.keep(pack, self.save)
        assert isinstance(found, IoError)
        assert "torn" in str(found)
        assert error is found.__cause__
        assert 1 == len(deleted)

    def test_what_cannot_be_stored_ends_the_packing(self) -> None:
        def pack(fd: int) -> None:
            while True:
                os.write(fd, b"x" * 65536)

        def save(_read: int, *_args: Any, **_more: Any) -> Any:
            raise IoError("full")

        found, deleted = self.keep(pack, save)
        assert isinstance(found, IoError)
        assert [] == deleted
