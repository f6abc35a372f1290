"""Ends of execs as the agent reports them: reasons, what comes before, and what is given back."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.linux.child import result_of

from ringfence.guest import agent as agent_module
from ringfence.guest import execs as module
from ringfence.guest import flows, relays
from ringfence.guest.agent import Agent
from ringfence.guest.execs import LOOK_S, Exec, Execs, OomScore
from ringfence.guest.tags import Tags
from ringfence.launcher import wire

pytestmark = pytest.mark.anyone


class _Groups(Tags):
    """Members as a test says; notes which execs were forgotten."""

    def __init__(self) -> None:
        super().__init__(0)
        self.inside: dict[int, list[int]] = {}
        self.removed: list[int] = []
        self.lacking: set[int] = set()
        self.left = 0

    def leave(self) -> None:
        self.left += 1

    def enter(self, number: int) -> None:
        self.inside.setdefault(number, [])

    def members(self, number: int) -> list[int]:
        return self.inside.get(number, [])

    def cpu_ns(self, number: int) -> tuple[int, int]:
        return 100 + number, 200 + number

    def lacked_memory(self, number: int) -> bool:
        return number in self.lacking

    def remove(self, number: int) -> bool:
        self.removed.append(number)
        return super().remove(number)


class _Execs(Execs):
    """Takes the ends that a test gives it: children of the test runner are not its own."""

    def __init__(self, *, counts_cpu: bool = False) -> None:
        self.known = _Groups()
        super().__init__(self.known, counts_cpu=counts_cpu)
        self.ends: dict[int, wire.ExecReport] = {}
        self.replies: list[wire.Socket] = []

    def add(self, number: int, *, deadline: float = 0.0, has_ended: bool = False) -> Exec:
        ours, theirs = wire.socketpair()
        ours.setblocking(False)
        self.replies.append(ours)
        run = self.running[number] = Exec(number, "program", os.getuid(), theirs, 0.0)
        run.deadline = deadline
        self.known.inside[number] = []
        if has_ended:
            run.report = wire.ExecReport(duration_ns=5)
        return run

    def take(self) -> None:
        for number, report in self.ends.items():
            self.running[number].report = report
        self.ends = {}

    def told(self, index: int = 0) -> wire.ExecReport | None:
        """Read what was reported of one of them; None: nothing yet."""
        try:
            data, _fds = wire.receive_raw(self.replies[index])
        except BlockingIOError:
            return None
        return wire.ExecReport.unpack(data)


@pytest.fixture
def execs() -> Iterator[_Execs]:
    made = _Execs()
    yield made
    for run in made.running.values():
        run.reply.close()
    for reply in made.replies:
        reply.close()
    fd = made.oom_score._fd
    if fd >= 0:
        os.close(fd)


@pytest.fixture
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def test_the_first_reason_of_a_kill_is_the_one_reported(execs: _Execs) -> None:
    execs.add(1, has_ended=True)
    for reason in (wire.KILLED_BY_TIMEOUT, wire.KILLED_BY_REQUEST):
        execs.kill(1, reason)
    execs.known.lacking.add(1)

    execs.settle()

    report = execs.told()
    assert report is not None
    assert (wire.KILLED_BY_TIMEOUT, 1) == (report.killed_by, report.timed_out)


@pytest.mark.parametrize("reason", [wire.KILLED_BY_REQUEST, wire.KILLED_BY_MEMORY_WATCHDOG])
def test_only_a_deadline_is_reported_as_one(execs: _Execs, reason: int) -> None:
    execs.add(1, has_ended=True)
    execs.kill(1, reason)
    execs.settle()

    report = execs.told()
    assert report is not None
    assert (reason, 0) == (report.killed_by, report.timed_out)


def test_what_the_kernel_killed_for_memory_is_reported_so(execs: _Execs) -> None:
    execs.add(1, has_ended=True)
    execs.known.lacking.add(1)
    execs.settle()

    report = execs.told()
    assert report is not None
    assert wire.KILLED_BY_MEMORY_WATCHDOG == report.killed_by


@pytest.mark.parametrize("mark", [wire.CROWDED, wire.FULL])
def test_too_many_processes_are_reported_beside_the_reason(execs: _Execs, mark: int) -> None:
    execs.add(1, has_ended=True).crowded = mark
    execs.kill(1, wire.KILLED_BY_REQUEST)
    execs.settle()

    report = execs.told()
    assert report is not None
    assert wire.KILLED_BY_REQUEST | mark == report.killed_by


@pytest.mark.parametrize("counts", [True, False])
def test_processor_time_is_reported_where_it_is_counted(execs: _Execs, counts: bool) -> None:
    execs.counts_cpu = counts
    execs.add(1, has_ended=True)
    execs.settle()

    report = execs.told()
    assert report is not None
    unknown = wire.UNKNOWN
    assert ((101, 201) if counts else (unknown, unknown)) == (report.user_ns, report.system_ns)
    assert 5e-9 == execs.unseen_s


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_killed_one_is_reported_once_its_tree_is_gone(
    execs: _Execs, sleeping: subprocess.Popen[bytes], is_killed: bool
) -> None:
    """One that ended by itself is reported at once; what it leaves is forgotten later."""
    execs.add(1, has_ended=True)
    execs.known.inside[1] = [sleeping.pid]
    if is_killed:
        execs.kill(1, wire.KILLED_BY_REQUEST)
    execs.settle()

    assert is_killed == (execs.told() is None)
    assert [1] == execs.numbers()
    assert (LOOK_S if is_killed else None) == execs.wait_s()
    if is_killed:
        assert -signal.SIGKILL == sleeping.wait(60)
    else:
        assert sleeping.poll() is None
    execs.known.inside[1] = []
    execs.settle()
    assert not is_killed or execs.told() is not None
    assert [] == execs.numbers()


def test_one_that_is_apart_is_not_reported_until_it_is_joined(execs: _Execs) -> None:
    run = execs.add(1, has_ended=True)
    run.is_apart = True
    execs.settle()
    assert execs.told() is None

    run.is_apart = False
    execs.settle()

    assert execs.told() is not None


@pytest.mark.parametrize("is_killed", [True, False])
@pytest.mark.parametrize("kind", ["terminal", "relay"])
def test_what_was_printed_comes_before_the_end_unless_it_was_killed(
    execs: _Execs, kind: str, is_killed: bool
) -> None:
    run = execs.add(1, has_ended=True)
    ours, theirs = socket.socketpair()
    with ours:
        theirs.setblocking(False)
        fill(theirs.fileno())
        if kind == "terminal":
            program, guest = socket.socketpair()
            run.terminal = flows.Pair(guest.detach(), theirs.detach(), ends_at_once=True)
            program.sendall(b"shown")
        else:
            run.relay = relays.Relay([theirs.detach()])
            program = None
            os.write(run.relay.inner[0], b"shown")
        if is_killed:
            execs.kill(1, wire.KILLED_BY_REQUEST)
        execs.settle()

        assert is_killed == (execs.told() is not None)
        if not is_killed:
            found = b""
            while execs.told() is None:
                found += ours.recv(1 << 20)
                execs.settle()
            ours.setblocking(False)
            while not found.endswith(b"shown"):
                found += ours.recv(1 << 20)
    if run.terminal is not None:
        run.terminal.close()
    if program is not None:
        program.close()
    if run.relay is not None:
        run.relay.close()
        os.close(run.relay.inner[0])


def fill(fd: int) -> None:
    try:
        while True:
            os.write(fd, bytes(1 << 16))
    except BlockingIOError:
        return


def test_one_that_has_ended_before_the_look_was_in_time(
    execs: _Execs, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []

    def send(pid: int, _signum: int) -> bool:
        sent.append(pid)
        return True

    monkeypatch.setattr(module, "send", send)
    past = time.monotonic()
    execs.add(1, deadline=past)
    execs.add(2, deadline=past)
    execs.add(3, deadline=past + 3600)
    execs.known.inside = {number: [2**22 + number] for number in (1, 2, 3)}
    execs.ends[1] = wire.ExecReport(duration_ns=1)

    execs.enforce_deadlines()

    assert [2**22 + 2] == sent, "what the first has left in the background goes on"
    report = execs.told(0)
    assert report is not None
    assert (0, 0) == (report.killed_by, report.timed_out)
    assert wire.KILLED_BY_TIMEOUT == execs.running[2].killed_by
    assert wire.KILLED_BY_NOBODY == execs.running[3].killed_by
    assert 0.0 == execs.running[2].deadline, "it is enforced once"
    assert LOOK_S == execs.wait_s()


def test_without_a_deadline_or_a_kill_it_waits_for_events_alone(execs: _Execs) -> None:
    execs.add(1)
    assert execs.wait_s() is None

    execs.add(2, deadline=time.monotonic() + 100)
    wait_s = execs.wait_s()
    assert wait_s is not None
    assert 50 < wait_s <= 100


def test_one_that_cannot_start_is_told_and_leaves_nothing(
    execs: _Execs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # starting ends in the root
    ours, theirs = wire.socketpair()
    read, write = os.pipe()
    before = set(os.listdir("/proc/self/fd"))
    with closing(ours):
        streams = [os.dup(write) for _ in range(3)]
        uid = os.getuid()

        started = execs.start(
            theirs, streams, 7, ["/bin/true"], {}, "/no/such", 0.0, None, True, uid, True
        )

        report = wire.ExecReport.unpack(wire.receive_raw(ours)[0])
        os.close(write)
        assert os.read(read, 1) == b"", "its streams are closed"
        os.close(read)
        assert started is None
    assert (errno.ENOENT, wire.STAGE_CWD) == (report.spawn_errno, report.failed_stage)
    assert ([7], 1) == (execs.known.removed, execs.known.left)
    assert 7 == execs.last_number
    assert set(os.listdir("/proc/self/fd")) < before
    assert {} == execs.running


class TestKilling:
    @pytest.mark.parametrize(
        ("count", "is_alone", "stops"), [(64, True, False), (65, True, True), (65, False, False)]
    )
    def test_a_crowd_is_stopped_before_it_is_killed_and_others_go_on(
        self,
        execs: _Execs,
        monkeypatch: pytest.MonkeyPatch,
        count: int,
        is_alone: bool,
        stops: bool,
    ) -> None:
        """No signal is sent here: -1 are all processes of this host."""
        sent: list[tuple[int, int]] = []

        def send(pid: int, signum: int) -> bool:
            sent.append((pid, signum))
            return True

        monkeypatch.setattr(module, "send", send)
        monkeypatch.setattr(execs.known, "is_alone", is_alone)
        execs.add(1)
        execs.known.inside[1] = list(range(1000, 1000 + count))

        assert execs.kill_tree(1)

        killed = [(pid, int(signal.SIGKILL)) for pid in range(1000, 1000 + count)]
        stop, go_on = (-1, int(signal.SIGSTOP)), (-1, int(signal.SIGCONT))
        assert ([stop, *killed, go_on] if stops else killed) == sent

    def test_what_is_born_meanwhile_is_killed_too_and_nothing_is_left_for_none(
        self, execs: _Execs, sleeping: subprocess.Popen[bytes]
    ) -> None:
        members = iter([[2**22 + 1], [2**22 + 1, sleeping.pid], [sleeping.pid]])
        known: Any = execs.known
        known.members = lambda _number: next(members)

        assert execs.kill_tree(1)

        assert -signal.SIGKILL == sleeping.wait(60)
        known.members = lambda _number: []
        assert not execs.kill_tree(1)

    @pytest.mark.parametrize("is_running", [True, False])
    def test_the_owner_of_a_process_is_its_exec_or_the_process_itself(
        self, execs: _Execs, sleeping: subprocess.Popen[bytes], is_running: bool
    ) -> None:
        other = execs.add(1)
        if is_running:
            execs.add(2)
            execs.known.inside[2] = [sleeping.pid]

        execs.kill_owner(sleeping.pid, wire.KILLED_BY_MEMORY_WATCHDOG)

        assert -signal.SIGKILL == sleeping.wait(60)
        assert wire.KILLED_BY_NOBODY == other.killed_by
        if is_running:
            assert wire.KILLED_BY_MEMORY_WATCHDOG == execs.running[2].killed_by

    def test_the_agent_never_kills_itself(
        self, execs: _Execs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sent: list[int] = []
        monkeypatch.setattr(module, "send", lambda pid, _signum: sent.append(pid))

        execs.kill_owner(os.getpid(), wire.KILLED_BY_MEMORY_WATCHDOG)
        execs.kill_owner(2**22 + 1, wire.KILLED_BY_MEMORY_WATCHDOG)

        assert [2**22 + 1] == sent

    def test_a_signal_to_a_process_that_is_gone_says_so(
        self, sleeping: subprocess.Popen[bytes]
    ) -> None:
        assert module.send(sleeping.pid, signal.SIGKILL)
        sleeping.wait()
        assert not module.send(sleeping.pid, signal.SIGKILL)


class _Asked:
    """A listener of the agent's loop, which is asked once."""

    def __init__(self, serve: Callable[[], None]) -> None:
        self.fd, self._serve = os.eventfd(1), serve

    def serve_one(self) -> None:
        os.eventfd_read(self.fd)
        self._serve()


class TestRequests:
    """Of an agent whose children are given by the test."""

    @pytest.fixture
    def host(self) -> Iterator[wire.Socket]:
        host, self.control = wire.socketpair()
        yield host
        host.close()
        self.control.close()

    def agent(self, execs: _Execs, *listeners: _Asked) -> Any:
        made: Any = Agent.__new__(Agent)
        made.control, made.signal_fd = self.control, os.eventfd(0)
        made.execs, made.groups = execs, SimpleNamespace(prepare=lambda: None)
        made.listeners = {each.fd: each for each in listeners}
        made.flows, made.settings = [], {"place": ""}
        made.watchdog = SimpleNamespace(wait_s=lambda: None, look=lambda: None)
        made.file_locks = None
        return made

    def run(self, agent: Any) -> None:
        agent.run()
        for fd in (agent.signal_fd, *agent.listeners):
            os.close(fd)

    def test_memory_of_killed_programs_is_waited_for_before_anything_else(
        self, execs: _Execs, host: wire.Socket, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done: list[str] = []
        agent = self.agent(execs, _Asked(lambda: done.append("served")))
        monkeypatch.setattr(agent_module, "await_memory", lambda: done.append("waited"))
        agent.execs.enforce_deadlines = lambda: done.append("deadlines")
        agent.watchdog.look = host.close  # the end of the first turn
        self.run(agent)
        assert ["waited", "deadlines", "served"] == done[:3]

    @pytest.mark.parametrize("is_gone", [True, False])
    def test_what_ends_after_the_host_is_not_reported(
        self, execs: _Execs, host: wire.Socket, is_gone: bool
    ) -> None:
        """It was ended by whatever ended the host: nothing is true of it."""
        run = execs.add(1)

        def serve() -> None:
            run.report = wire.ExecReport(duration_ns=5)
            if is_gone:
                host.close()

        agent = self.agent(execs, _Asked(serve))
        agent.watchdog.look = host.close  # the end of the first turn
        self.run(agent)
        assert is_gone == (execs.told() is None)

    def test_each_turn_looks_at_memory_and_at_locks(
        self, execs: _Execs, host: wire.Socket, sleeping: subprocess.Popen[bytes]
    ) -> None:
        run, busy = execs.add(1), list[bool]()
        execs.known.inside[1] = [sleeping.pid]
        looked: list[str] = []

        def look() -> list[int]:
            looked.append("locks")
            host.close()
            return [sleeping.pid]

        def wait_s(*, is_busy: bool) -> float:
            busy.append(is_busy)
            return 0.001

        agent = self.agent(execs)
        agent.watchdog.look = lambda: looked.append("memory")
        agent.file_locks = SimpleNamespace(look=look, wait_s=wait_s)
        self.run(agent)

        assert ["memory", "locks"] == looked
        assert -signal.SIGKILL == sleeping.wait(60)
        assert wire.KILLED_BY_MEMORY_WATCHDOG == run.killed_by
        assert busy[0]

    @pytest.mark.parametrize(
        ("wait_s", "timeout_ms"),
        [(None, None), (0.5, 501), (0.0, 1), (-5.0, 1), (1e9, 86_400_001)],
    )
    def test_the_loop_waits_until_something_is_due_and_at_most_a_day(
        self,
        execs: _Execs,
        host: wire.Socket,
        wait_s: float | None,
        timeout_ms: float | None,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """For poll(2) a time below 0 is for ever, and one of a month none."""
        agent = self.agent(execs)
        os.close(agent.signal_fd)
        monkeypatch.setattr(execs, "wait_s", lambda: wait_s)
        assert timeout_ms == agent._timeout_ms()
        agent.watchdog.wait_s = lambda: 7.0
        assert min(7001, timeout_ms or 7001) == agent._timeout_ms()
        agent.file_locks = SimpleNamespace(wait_s=lambda *, is_busy: 6.0 if is_busy else None)
        execs.add(1)
        assert min(6001, timeout_ms or 6001) == agent._timeout_ms()

    @pytest.mark.parametrize("asks", [("signal", 1, int(signal.SIGKILL), False), ("pid", 2)])
    def test_the_number_of_an_ended_process_may_be_anothers(
        self,
        execs: _Execs,
        host: wire.Socket,
        sleeping: subprocess.Popen[bytes],
        asks: tuple[Any, ...],
    ) -> None:
        """Its exec may still be there, because its tree has not ended."""
        execs.add(1, has_ended=True).pid = sleeping.pid
        agent = self.agent(execs)
        os.close(agent.signal_fd)
        verb, *rest = asks
        with pytest.raises(ProcessLookupError):
            getattr(agent, f"_do_{verb}")(None, [], *rest)
        assert sleeping.poll() is None

    @pytest.mark.parametrize("is_over", [True, False])
    def test_a_kill_of_an_ended_exec_waits_for_what_it_has_left(
        self, execs: _Execs, host: wire.Socket, is_over: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of one that runs the end is reported later; the agent goes on meanwhile."""
        monkeypatch.setattr(module, "send", lambda _pid, _signum: True)
        if not is_over:
            execs.add(1)
        members = iter([[9], [], [9], [], [9], [], []])
        known: Any = execs.known
        known.members = lambda _number: next(members)
        taken: list[int] = []
        monkeypatch.setattr(execs, "take", lambda: taken.append(1))
        agent = self.agent(execs)
        os.close(agent.signal_fd)

        assert b"" == agent._do_kill(None, [], 1)

        assert is_over == (list(members) == [])
        assert [1] * is_over == taken, "what ended counts against the limit of processes"

    def test_an_end_of_all_reports_what_has_ended_by_it(
        self, execs: _Execs, host: wire.Socket, sleeping: subprocess.Popen[bytes]
    ) -> None:
        execs.add(1)
        execs.known.inside = {1: [], 2: [sleeping.pid]}
        execs._left.add(2)
        execs.ends[1] = wire.ExecReport(duration_ns=1)
        agent = self.agent(execs)
        os.close(agent.signal_fd)
        agent.groups = execs.known

        assert b"1" == agent._do_end_all(None, [])

        assert execs.told() is not None
        assert -signal.SIGKILL == sleeping.wait(60)
        execs.known.inside = {}
        assert b"0" == agent._do_end_all(None, [])

    def test_a_terminal_that_is_closed_has_no_size(self, execs: _Execs, host: wire.Socket) -> None:
        run, (ours, theirs) = execs.add(1), socket.socketpair()
        run.terminal = flows.Pair(theirs.detach(), ours.detach(), ends_at_once=True)
        run.terminal.close()
        agent = self.agent(execs)
        os.close(agent.signal_fd)
        assert b"" == agent._do_resize(None, [], 1, 20, 30)

    def test_an_exec_that_holds_streams_of_the_host_is_not_saved_although_it_is_named(
        self, execs: _Execs, host: wire.Socket
    ) -> None:
        execs.add(1)
        agent = self.agent(execs)
        os.close(agent.signal_fd)
        with pytest.raises(OSError, match="exec 1") as busy:
            agent._do_settle(None, [], 1)
        assert errno.EBUSY == busy.value.errno


class TestUncharged:
    """Memory of ended processes that the kernel still charges."""

    def test_room_is_waited_for_once_in_a_while(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usage, limit, kills = (tmp_path / name for name in ("usage", "limit", "kills"))
        most = 100 << 20
        kills.write_text("oom_kill 0\n")
        usage.write_text(str(most))
        limit.write_text("max")
        nothing = module.Uncharged(((str(usage), str(limit), str(kills)),))
        assert nothing.wait(), "without a limit there is always room"
        limit.write_text(str(most))
        there = str(usage), str(limit), str(kills)
        charged = module.Uncharged((("/no/such", "/no/such", "/no/such"), there))
        now, slept = [100.0], list[float]()

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            now[0] += seconds

        clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
        monkeypatch.setattr(module, "time", clock)
        assert not charged.wait()
        assert 0.45 < sum(slept) < 0.55
        slept.clear()
        assert not charged.wait()
        assert [] == slept, "a second wait so soon would keep the agent from all else"
        now[0] += module._PAUSE_S
        usage.write_text(str(most - module._ROOM_BYTES))
        assert charged.wait()
        assert [] == slept
        usage.write_text(str(most - module._ROOM_BYTES + 1))
        assert not charged.wait()
        charged.close()

    def files(self, place: Path, usage: int, limit: str, kills: str | None) -> tuple[str, str, str]:
        place.mkdir()
        texts = {"usage": str(usage), "limit": limit, "kills": kills}
        for name, text in texts.items():
            if text is not None:
                (place / name).write_text(text)
        usage_path, limit_path, kills_path = (str(place / name) for name in texts)
        return usage_path, limit_path, kills_path

    @pytest.mark.parametrize(
        ("limit", "kills"),
        [("9223372036854771712", "oom_kill 0\n"), (str(100 << 20), None), ("max", "oom_kill 0\n")],
    )
    def test_files_that_say_nothing_of_a_limit_are_closed_and_the_next_count(
        self, tmp_path: Path, limit: str, kills: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
        before = len(os.listdir("/proc/self/fd"))
        without = self.files(tmp_path / "without", 100 << 20, limit, kills)
        full = self.files(tmp_path / "full", 50 << 20, str(50 << 20), "oom_kill 0\n")

        nothing = module.Uncharged((without,))
        assert before == len(os.listdir("/proc/self/fd"))
        assert nothing.wait()
        charged = module.Uncharged((without, full))
        assert before + 2 == len(os.listdir("/proc/self/fd"))
        assert not charged.wait()
        Path(full[0]).write_text("0")
        assert charged.wait()
        charged.close()
        assert before == len(os.listdir("/proc/self/fd"))

    def test_room_is_waited_for_once_after_each_kill_from_now_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = "low 0\noom 4\noom_kill {}\noom_group_kill 9\n"
        files = self.files(tmp_path / "files", 0, str(100 << 20), text.format(3))
        charged = module.Uncharged((files,))
        waited: list[int] = []
        monkeypatch.setattr(charged, "wait", lambda: waited.append(1))

        charged.wait_after_kill()
        assert [] == waited, "those before are over"
        for number, waits in ((4, 1), (4, 1), (6, 2)):
            Path(files[2]).write_text(text.format(number))
            charged.wait_after_kill()
            assert waits == len(waited)
        for number, waits in ((7, 3), (8, 4)):  # as version 1 tells it
            Path(files[2]).write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {number}\n")
            charged.wait_after_kill()
            assert waits == len(waited)
        charged.close()
        charged.wait_after_kill()
        assert 4 == len(waited)


@pytest.mark.parametrize("own", [100, 700])
def test_programs_are_killed_first_whatever_score_the_agent_has(own: int) -> None:
    def scores() -> list[str]:
        place = Path("/proc/self/oom_score_adj")
        place.write_text(str(own))
        score = OomScore()
        found = [str(os.get_inheritable(score._fd))]
        with score:
            found.append(place.read_text().strip())
        return [*found, place.read_text().strip()]

    assert ["False", str(min(1000, own + 500)), str(own)] == result_of(scores)
