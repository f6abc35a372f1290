"""One exec as its agent reports it: the reasons of its end, starts that fail, and what is given back."""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from ringfence.backends.local.agents.execs import LocalExec
from ringfence.backends.local.answers import Refused
from ringfence.backends.local.sandbox import LocalSandbox
from ringfence.errors import (
    ExecError,
    ExecNotStarted,
    InvalidRequest,
    IsolationError,
    LifecycleError,
    RingfenceError,
    SandboxLost,
)
from ringfence.launcher import wire
from ringfence.model.execs.exec import ExecRequest
from ringfence.model.limits import Limits
from ringfence.model.spec import SandboxSpec

pytestmark = pytest.mark.anyone
KILL = int(signal.SIGKILL)
BY_CALLER, BY_TIMEOUT = wire.KILLED_BY_REQUEST, wire.KILLED_BY_TIMEOUT
BY_WATCHDOG = wire.KILLED_BY_MEMORY_WATCHDOG


class Home:
    """A sandbox that notes what it is asked for."""

    id, crowded, paused, ended_on_request = "home", 0, False, False

    def __init__(self) -> None:
        self.control, self.agent = wire.socketpair()
        self.kills: int | None = 5
        self.forgotten: list[str] = []
        self.asked: list[tuple[Any, ...]] = []
        self.hurries: list[bool] = []
        self.ends = 0
        self.problem: Exception | None = None

    def ask(self, verb: str, *args: object, **_how: object) -> tuple[bytes, list[int]]:
        self.asked.append((verb, *args))
        if self.problem is not None:
            raise self.problem
        return b"77" if verb == "pid" else b"", []

    def awake(self) -> AbstractContextManager[None]:
        return nullcontext()

    def unthrottle(self, on: bool) -> None:
        self.hurries.append(on)

    def oom_kills(self) -> int | None:
        return self.kills

    def no_directory(self, cwd: str, why: str) -> InvalidRequest:
        return InvalidRequest(f"{cwd}: {why}", field="cwd")

    def forget(self, run: LocalExec) -> None:
        self.forgotten.append(run.id)

    def lost_error(self) -> SandboxLost:
        return SandboxLost("it is gone")

    def end_unwatched(self) -> None:
        self.ends += 1


class Made:
    def __init__(self) -> None:
        self.home = Home()
        self.reply, ours = wire.socketpair()
        self.pipes = [os.open("/dev/null", os.O_RDWR) for _ in range(4)]
        streams = (self.pipes[0], self.pipes[1], self.pipes[2])
        home: Any = self.home
        self.run = LocalExec(home, 4, self.home.control, ours, streams, 5, "tool", "/work")
        self.run.kept_open = [self.pipes[3]]

    def report(self, **values: int) -> None:
        wire.send_raw(self.reply, wire.ExecReport(**values).pack())

    def close(self) -> None:
        self.run.close()
        self.reply.close()
        self.home.control.close()
        self.home.agent.close()


@pytest.fixture
def made() -> Iterator[Made]:
    before = len(os.listdir("/proc/self/fd"))
    one = Made()
    yield one
    one.close()
    one.run.close()
    assert before == len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("status", "by", "kills", "ended_for", "expected"),
    [
        (0, 0, 5, "", None),
        (3 << 8, 0, 5, "", None),
        (KILL, 0, 5, "", None),  # by itself
        (KILL, 0, 6, "", "oom"),
        (KILL, 0, None, "", None),
        (KILL, 0, 4, "", None),
        (int(signal.SIGTERM), 0, 6, "", None),
        (0, 0, 6, "", None),
        (KILL, BY_WATCHDOG, 5, "", "oom"),
        (KILL, BY_TIMEOUT, 5, "", "timeout"),
        (KILL, BY_TIMEOUT, 6, "", "timeout"),
        (KILL, BY_CALLER, 5, "", "caller"),
        (KILL, BY_CALLER, 5, "output", "output"),
        (KILL, BY_TIMEOUT, 5, "output", "timeout"),
        (KILL, 0, 5, "output", None),
        (KILL, wire.CROWDED, 5, "", "pids"),
        (KILL, wire.CROWDED, 6, "", "oom"),
        (0, wire.CROWDED, 5, "", None),
        (KILL, wire.FULL, 5, "", None),
        (KILL, wire.FULL | wire.CROWDED, 5, "", "pids"),
        (KILL, wire.CROWDED | BY_TIMEOUT, 5, "", "timeout"),
        (KILL, wire.FULL | BY_WATCHDOG, 5, "", "oom"),
    ],
)
def test_each_end_has_its_reason(
    made: Made, status: int, by: int, kills: int | None, ended_for: str, expected: str | None
) -> None:
    made.home.kills, made.run.ended_for = kills, ended_for
    made.report(wait_status=status, killed_by=by, duration_ns=1_500_000_000)
    found = made.run.status()

    assert expected == found.killed_by
    assert (kills == 6 or expected == "oom") == found.oom_killed
    signum = status if status < 128 and status else None
    assert (None if signum else status >> 8, signum) == (found.exit_code, found.signal)
    assert bool(by & (wire.CROWDED | wire.FULL)) == made.home.crowded
    assert 1.5 == found.duration_s
    assert ["exec-4"] == made.home.forgotten
    assert found is made.run.status()
    assert ["exec-4"] == made.home.forgotten, "it is settled once"


def test_counts_that_this_kernel_does_not_keep_are_unknown(made: Made) -> None:
    made.report(
        user_ns=3, system_ns=4, peak_memory_bytes=9, io_read_bytes=wire.UNKNOWN, io_write_bytes=7
    )
    usage = made.run.status().resource_usage
    assert (7, 3, 4, 9, None, 7) == (
        usage.cpu_ns, usage.user_ns, usage.system_ns, usage.peak_memory_bytes,
        usage.io_read_bytes, usage.io_write_bytes,
    )  # fmt: skip


@pytest.mark.parametrize("unknown", ["user_ns", "system_ns"])
def test_a_sum_with_an_unknown_part_is_unknown(made: Made, unknown: str) -> None:
    made.report(**{"user_ns": 3, "system_ns": 4, unknown: wire.UNKNOWN})
    assert made.run.status().resource_usage.cpu_ns is None


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOENT, 127), (errno.ENOTDIR, 127), (errno.EACCES, 126), (errno.ENOEXEC, 126),
        (errno.EISDIR, 126), (errno.ENAMETOOLONG, 126), (errno.ELOOP, 126), (errno.ELIBACC, 126),
    ],
)  # fmt: skip
def test_a_command_that_cannot_be_run_ends_as_in_a_shell(
    made: Made, number: int, code: int
) -> None:
    made.report(spawn_errno=number, failed_stage=wire.STAGE_COMMAND)
    assert code == made.run.status().exit_code
    assert made.run.note.startswith(b"ringfence: tool: ")


@pytest.mark.parametrize(
    ("number", "stage", "error", "text", "retryable"),
    [
        (errno.EAGAIN, wire.STAGE_COMMAND, ExecError, "processes limit", True),
        (errno.ENOMEM, wire.STAGE_COMMAND, ExecError, "memory limit", True),
        (errno.E2BIG, wire.STAGE_COMMAND, InvalidRequest, "too long", False),
        (errno.EIO, wire.STAGE_COMMAND, ExecError, "tool: ", False),
        (errno.ENOENT, wire.STAGE_CWD, InvalidRequest, "/work: No such file", False),
        (errno.EAGAIN, wire.STAGE_TERMINAL, ExecError, "no terminal", False),
        (errno.ENOENT, wire.STAGE_TERMINAL, ExecError, "no terminal", False),
    ],
)
def test_a_start_that_fails_says_why(
    made: Made, number: int, stage: int, error: type[RingfenceError], text: str, retryable: bool
) -> None:
    made.run.overdue()
    made.report(spawn_errno=number, failed_stage=stage)
    for _ in range(2):
        with pytest.raises(error, match=text) as refusal:
            made.run.status()
    assert retryable == refusal.value.retryable
    assert ["exec-4"] == made.home.forgotten
    assert [True, False] == made.home.hurries


@pytest.mark.parametrize("on_request", [True, False])
@pytest.mark.parametrize("end", [b"", b"R", b"nonsense"])
def test_an_end_without_a_report(made: Made, on_request: bool, end: bytes) -> None:
    """With its sandbox it was killed; otherwise nobody watches over what it left, which is ended."""
    made.home.ended_on_request = on_request
    if end:
        wire.send_raw(made.reply, end)
    else:
        made.reply.close()
    for _ in range(2):
        if on_request:
            found = made.run.status()
            assert (KILL, "terminate", False) == (found.signal, found.killed_by, found.timed_out)
        else:
            with pytest.raises(SandboxLost, match="it is gone"):
                made.run.status()
    assert (0 if on_request else 1) == made.home.ends
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(made.pipes[3])


def test_until_its_end_nothing_is_settled(made: Made) -> None:
    with pytest.raises(LifecycleError, match="has not ended"):
        made.run.status()
    os.fstat(made.pipes[3])
    made.report()
    made.run.status()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(made.pipes[3])
    assert [] == made.home.hurries


class TestHurry:
    """While it is killed no processor limit holds; it holds again when it has ended, or is closed."""

    def test_it_is_asked_for_once_and_taken_back_once(self, made: Made) -> None:
        made.run.overdue()
        made.run.kill()
        assert [True] == made.home.hurries
        made.report(wait_status=KILL)
        made.run.status()
        made.run.kill()
        made.run.overdue()
        assert [True, False] == made.home.hurries
        made.run.close()
        assert [True, False] == made.home.hurries

    def test_closing_takes_it_back(self, made: Made) -> None:
        made.run.overdue()
        made.run.close()
        made.run.overdue()
        assert [True, False] == made.home.hurries
        with pytest.raises(SandboxLost, match="closed before"):
            made.run.status()


class TestKill:
    def test_the_agent_is_asked_for_this_one(self, made: Made) -> None:
        made.run.kill()
        assert [("kill", 4)] == made.home.asked

    @pytest.mark.parametrize(
        ("problem", "ends"), [(SandboxLost("gone"), 0), (IsolationError("no answer in time"), 1)]
    )
    def test_an_agent_that_does_not_answer_ends_with_all(
        self, made: Made, problem: Exception, ends: int
    ) -> None:
        made.home.problem = problem
        made.run.kill()
        assert ends == made.home.ends

    def test_one_given_up_has_a_status_unless_it_has_one(self, made: Made) -> None:
        assert made.run.abandon()
        found = made.run.status()
        assert (KILL, True, "timeout") == (found.signal, found.timed_out, found.killed_by)
        assert 1 == made.home.ends

    def test_one_that_has_ended_keeps_its_status(self, made: Made) -> None:
        made.report(wait_status=3 << 8)
        found = made.run.status()
        made.run.abandon()
        assert found is made.run.status()

    @pytest.mark.parametrize(
        ("signum", "is_one"), [(0, False), (1, True), (signal.NSIG - 1, True), (signal.NSIG, False)]
    )
    @pytest.mark.parametrize("group", [True, False])
    def test_only_signals_are_sent(
        self, made: Made, signum: int, is_one: bool, group: bool
    ) -> None:
        if is_one:
            made.run.signal(signum, group=group)
            assert [("signal", 4, signum, group)] == made.home.asked
        else:
            with pytest.raises(InvalidRequest):
                made.run.signal(signum, group=group)
            assert [] == made.home.asked

    def test_a_signal_to_one_that_has_ended_is_nothing(self, made: Made) -> None:
        made.home.problem = Refused(errno.ESRCH, "gone")
        made.run.signal(9)
        made.home.problem = Refused(errno.EPERM, "no")
        with pytest.raises(Refused):
            made.run.signal(9)

    @pytest.mark.parametrize("problem", [None, Refused(3, "gone"), SandboxLost("gone")])
    def test_its_pid_is_asked_for(self, made: Made, problem: Exception | None) -> None:
        made.home.problem = problem
        assert (77 if problem is None else None) == made.run.pid()


class TestStreams:
    def test_a_terminal_is_received_once_and_kept_before_that(self, made: Made) -> None:
        for fd in made.pipes[:3]:
            os.close(fd)
        made.run.stdin = made.run.stdout = made.run.stderr = None
        terminal = os.open("/dev/null", os.O_RDWR)
        wire.send_raw(made.reply, b"T", [terminal])
        os.close(terminal)
        seen: list[bytes] = []

        def keep(run: LocalExec) -> None:
            seen.append(os.readlink(f"/proc/self/fd/{run.stdout}").encode())
            data, fds = wire.receive_raw(run._reply, socket.MSG_PEEK)
            seen.append(data)
            os.close(fds[0])

        made.run.keep = keep
        made.run.take_terminal()
        assert [b"/dev/null", b"T"] == seen
        assert made.run.stdin == made.run.stdout is not None
        assert made.run.splice_pipe is not None
        made.run.close_stdin()
        os.fstat(made.run.stdout)
        made.report()
        assert 0 == made.run.status().exit_code

    def test_a_start_without_a_terminal_fails(self, made: Made) -> None:
        made.report(spawn_errno=errno.EAGAIN, failed_stage=wire.STAGE_TERMINAL)
        with pytest.raises(ExecError, match="no terminal"):
            made.run.take_terminal()
        other = Made()
        other.report()
        with pytest.raises(ExecError, match="could not open a terminal"):
            other.run.take_terminal()
        other.close()

    def test_input_is_closed_once_and_that_is_kept(self, made: Made) -> None:
        kept: list[int | None] = []
        keep: Callable[[LocalExec], None] = lambda run: kept.append(run.stdin)  # noqa: E731
        made.run.keep = keep
        for _ in range(2):
            made.run.close_stdin()
        assert [None] == kept
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(made.pipes[0])
        for fd in made.pipes[1:]:
            os.fstat(fd)

    def test_one_without_a_terminal_has_no_size(self, made: Made) -> None:
        with pytest.raises(InvalidRequest, match="no terminal"):
            made.run.resize(1, 1)


class TestNotBegun:
    def test_one_whose_request_was_never_read_has_not_begun(self, made: Made) -> None:
        assert not made.run.never_began()
        made.reply.close()
        assert made.run.never_began()
        made.run.discard()
        with pytest.raises(ExecNotStarted):
            made.run.status()

    def test_one_whose_agent_died_may_have_begun(self, made: Made) -> None:
        made.reply.close()
        made.home.agent.close()
        assert not made.run.never_began()

    def test_one_that_was_answered_has(self, made: Made) -> None:
        made.report()
        made.reply.close()
        assert not made.run.never_began()


def test_variables_of_the_request_win_over_the_accounts_and_those_over_the_sandboxs() -> None:
    sandbox: Any = object.__new__(LocalSandbox)
    sandbox._environment = {"PATH": "/bin", "HOME": "/of-sandbox", "USER": "sandbox"}
    sandbox.spec, sandbox.mounts = SandboxSpec(limits=Limits(wall_time_s=7)), ()
    sandbox.working_directory = lambda cwd: f"at {cwd}"
    own = {"HOME": "/of-account", "USER": "account"}
    request = ExecRequest(("id",), env={"HOME": "/asked"}, cwd="place")

    argv, environment, cwd, timeout_s, *_rest = LocalSandbox.as_asked(sandbox, request, own)

    assert {"PATH": "/bin", "HOME": "/asked", "USER": "account"} == environment
    assert (["id"], "at place", 7) == (argv, cwd, timeout_s)
