"""An exec watched by an agent inside a sandbox, seen from the host."""

from __future__ import annotations

import _signal as signal
import _socket as socket
import _struct as struct
import errno
import os
import select
import time
from _thread import allocate_lock

from ....errors import (
    ExecError,
    ExecNotStarted,
    InvalidRequest,
    IsolationError,
    LifecycleError,
    SandboxLost,
)
from ....launcher import wire
from ....model.execs.exec import KILLED_BY_TERMINATE, KILLED_BY_TIMEOUT, ExecStatus, ResourceUsage
from ...optional import DrivenExec
from ..answers import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from typing import Protocol

    class Home(Protocol):
        """Interface that an exec needs of its sandbox."""

        id: str
        control: wire.Socket
        crowded: int

        @property
        def paused(self) -> bool: ...

        @property
        def ended_on_request(self) -> bool:
            """True if `terminate` ended it while it lived."""
            ...

        def ask(
            self,
            verb: str,
            *args: object,
            timeout_s: float = ...,
            control: wire.Socket | None = None,
        ) -> tuple[bytes, list[int]]:
            """Send a request to the agent and return its answer."""
            ...

        def awake(self) -> AbstractContextManager[None]:
            """Within it the agent answers, although the sandbox is suspended."""
            ...

        def unthrottle(self, on: bool) -> None:
            """Something is being killed, which the processor limit must not slow down."""
            ...

        def oom_kills(self) -> int | None:
            """How often something inside was killed for lack of memory."""
            ...

        def no_directory(self, cwd: str, why: str) -> InvalidRequest: ...

        def forget(self, run: LocalExec) -> None: ...

        def lost_error(self) -> SandboxLost | LifecycleError:
            """Why nothing more can be learnt."""
            ...

        def end_unwatched(self) -> None:
            """End the sandbox: the agent that watched the exec is gone."""
            ...


_DYING_MS = 5000
_REASONS = {
    wire.KILLED_BY_TIMEOUT: "timeout",
    wire.KILLED_BY_REQUEST: "caller",
    wire.KILLED_BY_MEMORY_WATCHDOG: "oom",
}


class LocalExec(DrivenExec):
    """A running process tree; see `BackendExec`."""

    _is_closed = True  # there is nothing of it yet

    def __init__(
        self,
        sandbox: Home,
        number: int,
        control: wire.Socket,
        reply: wire.Socket,
        streams: tuple[int | None, int | None, int | None],
        oom_kills: int | None,
        command: str,
        cwd: str,
    ) -> None:
        self.id = f"exec-{number}"
        self.number = number
        self.stdin, self.stdout, self.stderr = streams
        # The ends of the streams for inside, where nobody is to hear of their closing: see `pump.begin`.
        self.kept_open: list[int] = []
        self._sandbox, self._control, self._reply = sandbox, control, reply
        self._oom_kills_before = oom_kills
        self._command, self._cwd = command, cwd
        self._status: ExecStatus | None = None
        self._problem: Exception | None = None
        self._hurried = False
        self._lock = allocate_lock()
        self.started = time.monotonic()
        self.ended_for = ""  # the limit for which `kill` was called
        self.uid: int | None = None  # of another user than the sandbox's own
        self.label = ""
        self.is_terminal = False
        # A pipe that a terminal's output may pass through: what is in it is kept as the terminal is.
        self.splice_pipe = None
        self.keep: Callable[[LocalExec], None] = _keep_nothing
        self.let_go: Callable[[LocalExec], None] = _keep_nothing
        self._is_closed = False

    @property
    def done(self) -> int:
        return self._reply.fileno()

    def pid(self) -> int | None:
        try:
            return int(self._sandbox.ask("pid", self.number, control=self._control)[0]) or None
        except (Refused, SandboxLost):
            return None

    def take_terminal(self) -> None:
        """Receive the terminal's master, sent before the process starts.

        Raises:
            ExecError: There is none to be had.
        """
        # Left in the socket until it is kept elsewhere too: the last copy gone is a terminal hung up.
        data, fds = wire.receive_raw(self._reply, socket.MSG_PEEK)
        if data == b"T" and fds:
            self.stdin = self.stdout = fds[0]
            os.set_blocking(fds[0], False)
            if self.keep is not _keep_nothing:
                self.splice_pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            self.keep(self)
            os.close(wire.receive_raw(self._reply)[1][0])
            return
        self._settle(data)
        self.status()
        raise ExecError("the sandbox could not open a terminal", hint="run `ringfence doctor`")

    def status(self) -> ExecStatus:
        """How it ended.

        Raises:
            LifecycleError: It has not.
        """
        with self._lock:
            self._receive()
        if self._problem is not None:
            raise self._problem
        assert self._status is not None
        return self._status

    @property
    def home_id(self) -> str:
        return self._sandbox.id

    @property
    def facts(self) -> tuple[str, str, int | None, float]:
        """Facts for its exit status: command, directory, OOM kills before it, start time."""
        return self._command, self._cwd, self._oom_kills_before, self.started

    def never_began(self) -> bool:
        """Return whether the agent never received the request: it closed its reply without an
        answer.

        A dead agent closes it too, and may have begun the exec: then this is False.
        """
        poll = select.poll()
        poll.register(self._control.fileno(), select.POLLRDHUP)
        if poll.poll(0):
            return False
        try:
            return not self._reply.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:
            return False

    def discard(self) -> None:
        self._problem = ExecNotStarted("the server was killed before the start")
        self.close()

    def _receive(self) -> None:
        if self._status is not None or self._problem is not None:
            return
        if self._reply.fileno() < 0:
            # Garbage in a cycle is finalized in any order: the socket may be closed before `__del__` runs.
            raise LifecycleError("the exec was closed")
        try:
            # Left in the socket, so that `done` stays readable.
            data = self._reply.recv(4096, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            raise LifecycleError("the exec has not ended", hint="wait for `done`") from None
        except ConnectionResetError:
            data = b""
        self._settle(data)

    def _settle(self, data: bytes) -> None:
        self._close_kept()
        try:
            report = wire.ExecReport.unpack(data)
        except ValueError:
            if self._sandbox.ended_on_request:
                self._status = self._killed(KILLED_BY_TERMINATE)
                self._sandbox.forget(self)
                return
            self._problem = self._sandbox.lost_error()
            self._sandbox.end_unwatched()
            return
        self._sandbox.forget(self)
        self._calm_down()
        if report.spawn_errno:
            self._settle_unstarted(report)
            return
        usage = ResourceUsage(
            cpu_ns=_known(report.user_ns, report.system_ns),
            user_ns=_known(report.user_ns),
            system_ns=_known(report.system_ns),
            peak_memory_bytes=report.peak_memory_bytes,
            io_read_bytes=_known(report.io_read_bytes),
            io_write_bytes=_known(report.io_write_bytes),
        )
        crowded = bool(report.killed_by & wire.CROWDED)
        self._sandbox.crowded += bool(report.killed_by & (wire.CROWDED | wire.FULL))
        killed_by = _REASONS.get(report.killed_by & ~(wire.CROWDED | wire.FULL))
        signum = os.WTERMSIG(report.wait_status) if os.WIFSIGNALED(report.wait_status) else None
        oom = killed_by == "oom" or self._kernel_oom()
        if oom and killed_by is None and signum == signal.SIGKILL:
            killed_by = "oom"
        if killed_by == "caller" and self.ended_for:
            killed_by = self.ended_for
        if crowded and killed_by is None and signum == signal.SIGKILL:
            killed_by = "pids"
        self._status = ExecStatus(
            exit_code=os.WEXITSTATUS(report.wait_status) if signum is None else None,
            signal=signum,
            timed_out=bool(report.timed_out),
            oom_killed=oom,
            killed_by=killed_by,
            duration_s=report.duration_ns / 1e9,
            resource_usage=usage,
        )

    def _killed(self, by: str) -> ExecStatus:
        """The status of one that was killed with its sandbox, without a report."""
        return ExecStatus(
            signal=signal.SIGKILL,
            timed_out=by == KILLED_BY_TIMEOUT,
            killed_by=by,
            duration_s=time.monotonic() - self.started,
        )

    def _close_kept(self) -> None:
        kept, self.kept_open = self.kept_open, []
        for fd in kept:
            os.close(fd)

    def _settle_unstarted(self, report: wire.ExecReport) -> None:
        text = os.strerror(report.spawn_errno)
        if report.failed_stage == wire.STAGE_CWD:
            self._problem = self._sandbox.no_directory(self._cwd, text)
        elif report.failed_stage == wire.STAGE_TERMINAL:
            self._problem = ExecError(f"no terminal: {text}")
        elif report.spawn_errno in (2, 13, 8, 20, 21, 36, 40, errno.ELIBACC):
            # As a shell: 127 not found, 126 found and not executable.
            if report.spawn_errno == errno.ELIBACC:
                text = "the interpreter in its first line, or the loader of the binary, is missing"
            self.note = f"ringfence: {self._command}: {text}\n".encode("utf-8", "surrogateescape")
            self._status = ExecStatus(exit_code=127 if report.spawn_errno in (2, 20) else 126)
        elif report.spawn_errno == 11:
            self._problem = ExecError(
                "the sandbox is at its processes limit",
                hint="end processes, raise limits.pids, or raise `ulimit -u` of this process",
                retryable=True,
            )
        elif report.spawn_errno == errno.ENOMEM:
            self._problem = ExecError(
                "the sandbox is at its memory limit",
                hint="end programs, remove files in the sandbox, or raise limits.memory_bytes",
                retryable=True,
            )
        elif report.spawn_errno == 7:
            self._problem = InvalidRequest(
                "argv and env are too long for this kernel",
                field="argv",
                hint="one item may have 131,071 bytes; pass longer data by stdin or a file",
            )
        else:
            self._problem = ExecError(f"{self._command}: {text}")

    def _kernel_oom(self) -> bool:
        """Return whether the kernel's OOM killer acted in this sandbox during the exec."""
        now = self._sandbox.oom_kills()
        return (
            now is not None and self._oom_kills_before is not None and now > self._oom_kills_before
        )

    def signal(self, signum: int, *, group: bool = False) -> None:
        """Send a signal to the first process, or its group; nothing happens when it has ended."""
        if not 1 <= signum < signal.NSIG:
            raise InvalidRequest(f"{signum} is not a signal", field="signum")
        try:
            self._sandbox.ask("signal", self.number, int(signum), group, control=self._control)
        except OSError as exc:
            if exc.errno != errno.ESRCH:
                raise

    def kill(self) -> None:
        self.overdue()
        try:
            with self._sandbox.awake():
                self._sandbox.ask(
                    "kill", self.number, control=self._control, timeout_s=self.grace_s
                )
                if self.paused:
                    self._wait_done()  # before everything stands still again
        except SandboxLost:
            pass  # its processes are gone with it
        except IsolationError:  # no answer in time
            self._sandbox.end_unwatched()

    def _wait_done(self) -> None:
        with self._lock:  # who waits for the result may close it at any moment
            if self.done < 0:
                return
            done = os.dup(self.done)
        try:
            poll = select.poll()
            poll.register(done, select.POLLIN)
            poll.poll(_DYING_MS)
        finally:
            os.close(done)

    @property
    def paused(self) -> bool:
        """True while it is suspended with its sandbox, timeouts included."""
        return self._sandbox.paused

    def overdue(self) -> None:
        """The driver's word that the timeout has passed: nothing may slow the killing down."""
        with self._lock:
            # Of an exec that has ended nobody would take the hurry back.
            if not self._hurried and self._status is None and self._problem is None:
                self._hurried = True
                self._sandbox.unthrottle(True)

    def abandon(self) -> bool:
        """End the sandbox: the agent neither killed the exec in time nor answers."""
        self._sandbox.end_unwatched()
        with self._lock:
            if self._status is None and self._problem is None:
                self._status = self._killed(KILLED_BY_TIMEOUT)
        return True

    def _calm_down(self) -> None:
        if self._hurried:
            self._hurried = False
            self._sandbox.unthrottle(False)

    def resize(self, rows: int, cols: int) -> None:
        """Tell the terminal its new size; the foreground processes get SIGWINCH."""
        if self.stdout is None or self.stderr is not None:
            raise InvalidRequest("this exec has no terminal", field="pty")
        import fcntl
        import termios

        fcntl.ioctl(self.stdout, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def close(self) -> None:
        """Close the streams. The process is not touched."""
        streams = {self.stdin, self.stdout, self.stderr, *(self.splice_pipe or ())} - {None}
        self.stdin = self.stdout = self.stderr = self.splice_pipe = None
        for fd in streams:
            os.close(fd)
        with self._lock:
            try:
                self._receive()
            except LifecycleError:
                self._problem = SandboxLost("the exec was closed before it ended")
                self._calm_down()
            self._close_kept()
            self._reply.close()
        self._sandbox.forget(self)
        self.let_go(self)
        self._is_closed = True

    def __del__(self) -> None:
        if not self._is_closed:
            self.close()

    def close_stdin(self) -> None:
        fd, self.stdin = self.stdin, None
        if fd is not None and fd != self.stdout:
            os.close(fd)
            self.keep(self)  # without it: the last copy closed is what the process reads as the end


def _keep_nothing(_run: LocalExec) -> None:
    """Of an exec that ends with this process."""


def _known(*counts: int) -> int | None:
    return None if wire.UNKNOWN in counts else sum(counts)
