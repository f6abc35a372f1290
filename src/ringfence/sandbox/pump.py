"""Moves the bytes of one exec, without deciding when: the caller's thread or the reactor drives it."""

from __future__ import annotations

import os
import select
import time
from _thread import allocate_lock

from ..backends.optional import AttendedExec, DrivenExec
from ..errors import SandboxLost
from ..model.execs.exec import ExecResult
from .stream import DEFAULT_OUTPUT_BYTES, Stream

LONGEST_S = 86_400.0
"""The kernel takes a wait in milliseconds, as an int: 24 days. A timeout may be a year."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from ..backends.protocol import BackendExec, BackendSandbox
    from ..model.execs.exec import ExecRequest, ExecStatus
    from ..model.limits import Limits

    class Sink(Protocol):
        """Where the bytes of one stream go."""

        def take(self, fd: int) -> int:
            """Read the bytes of a descriptor now; return their number, 0 at its end.
            BlockingIOError: none yet.
            """
            ...

        def close(self) -> None:
            """Nothing more will come; idempotent."""
            ...


_CHUNK = 1 << 18
_PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031  # include/uapi/linux/fcntl.h
_DRAIN_BYTES = 4 << 20  # what a surviving child may still add after the process ended
_BUSY_S = 0.001  # reads closer than this make a stream a busy one
_FULL = 1 << 18  # a read that need not wait for more


class StreamSink:
    """Into a `Stream`, and to whoever wants to hear of each piece as it comes."""

    def __init__(self, stream: Stream, callback: Callable[[bytes], None] | None) -> None:
        self._stream, self._callback = stream, callback

    def take(self, fd: int) -> int:
        """See `Sink`."""
        data = read_or_end(fd, _CHUNK)
        if data:
            self._stream.feed(data)
            if self._callback:
                self._callback(data)
        return len(data)

    def close(self) -> None:
        """See `Sink`."""
        self._stream.close()


def read_or_end(fd: int, most: int) -> bytes:
    """Read the bytes that a pipe or terminal has now; empty at its end.

    Raises:
        BlockingIOError: Nothing.
    """
    try:
        return os.read(fd, most)
    except BlockingIOError:
        raise
    except OSError:
        return b""  # a terminal whose other side is closed says EIO


class Pump:
    """The streams of one running exec.

    Args:
        sinks: Of standard output and standard error; None keeps both in memory.

    Attributes:
        wants: descriptor to poll(2) events; the driver polls these and calls `ready`.
        may_rest: Whether the driver calls `rested`.
        timeout_s: The request's own; None: that of the sandbox.
        is_asked: Input came since the last read: what is read next is an answer, and not left alone.
        resting: Descriptors that are left alone for a moment, until that time: a program that
            writes a little at a time would have us wake up for each piece, and write slower for it.
    """

    may_rest = False
    is_asked = False

    def __init__(
        self,
        run: BackendExec,
        request: ExecRequest,
        limits: Limits,
        on_stdout: Callable[[bytes], None] | None = None,
        on_stderr: Callable[[bytes], None] | None = None,
        sinks: tuple[Sink, Sink] | None = None,
    ) -> None:
        limit = request.max_output_bytes
        if limit is None:
            limit = DEFAULT_OUTPUT_BYTES if limits.output_bytes is None else limits.output_bytes
        self.run = run
        self.driven = run if isinstance(run, DrivenExec) else DrivenExec()
        # Other threads write to its input and resize its terminal: a closed descriptor's number may
        # be reused under them.
        self.open = allocate_lock()
        self.stdout, self.stderr = Stream(limit), Stream(limit)
        self._sinks: dict[int, Sink] = {}
        self._cut = False
        self._grown: set[int] = set()
        self._last_read: dict[int, float] = {}
        self.resting: dict[int, float] = {}
        self._stdin = memoryview(request.stdin or b"")
        self.wants: dict[int, int] = {run.done: select.POLLIN}
        out, err = sinks or (StreamSink(self.stdout, on_stdout), StreamSink(self.stderr, on_stderr))
        for fd, sink in ((run.stdout, out), (run.stderr, err)):
            if fd is not None:
                self._sinks[fd] = sink
                self.wants[fd] = select.POLLIN
            else:
                sink.close()
        if request.stdin is not None and run.stdin is not None:
            if self._stdin:
                self.wants[run.stdin] = self.wants.get(run.stdin, 0) | select.POLLOUT
            else:
                run.close_stdin()
        self.timeout_s = request.timeout_s
        timeout = self.timeout_s or limits.wall_time_s
        self.deadline = time.monotonic() + timeout if timeout else None
        self._overdue = self._abandoned = False
        self.status: ExecStatus | None = None

    def ready(self, fd: int, events: int) -> bool:
        """Handle one ready descriptor; True when the exec has ended and all is read."""
        if fd == self.run.done:
            self.status = self.run.status()
            self._drain()
            return True
        if events & select.POLLOUT:
            self._write(fd)
        if events & (select.POLLIN | select.POLLHUP | select.POLLERR) and fd in self._sinks:
            self._read(fd)
        return False

    def passed_deadline(self) -> None:
        """The timeout has passed and the sandbox is killing; or it has not managed to.

        Raises:
            SandboxLost: It does not answer at all.
        """
        if self.driven.paused:
            self.deadline = time.monotonic() + 1.0  # its clock stands still with it
            return
        if self._overdue:
            if self._abandoned or not self.driven.abandon():
                raise SandboxLost(
                    "the sandbox does not answer", hint="terminate it and create a new one"
                )
            self._abandoned = True
            self.deadline = time.monotonic() + 1.0
            return
        self._overdue = True
        self.deadline = time.monotonic() + self.driven.grace_s
        self.driven.overdue()

    def _read(self, fd: int) -> int:
        sink = self._sinks[fd]
        try:
            count = sink.take(fd)
        except BlockingIOError:
            return 0
        if not count:
            self.wants.pop(fd, None)
            sink.close()
            return 0
        if count >= 1 << 16 and fd not in self._grown:
            self._grow(fd)
        if self.is_asked:
            self.is_asked = False
        elif self.may_rest and count < _FULL:
            self._rest(fd)
        return count

    def _rest(self, fd: int) -> None:
        """Leave a busy stream alone for a moment; its pipe takes what comes meanwhile."""
        now = time.monotonic()
        last = self._last_read.get(fd, 0.0)
        self._last_read[fd] = now
        if now - last < _BUSY_S and self.wants.get(fd) == select.POLLIN:
            if fd not in self._grown:
                self._grow(fd)
            del self.wants[fd]
            self.resting[fd] = now + _BUSY_S

    def rested(self, now: float) -> bool:
        """Go on with what has rested for long enough; whether there was any."""
        over = [fd for fd, until in self.resting.items() if until <= now]
        for fd in over:
            del self.resting[fd]
            self.wants[fd] = select.POLLIN
            self._last_read[fd] = now
        return bool(over)

    def _grow(self, fd: int) -> None:
        """A busy stream gets a larger pipe: fewer wake-ups."""
        import fcntl

        self._grown.add(fd)
        try:
            fcntl.fcntl(fd, _F_SETPIPE_SZ, _PIPE_BYTES)
        except OSError:
            pass  # a terminal, or this user's share of pipe pages is used up

    def _write(self, fd: int) -> None:
        try:
            self._stdin = self._stdin[os.write(fd, self._stdin[:_CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:
            self._stdin = self._stdin[:0]  # the reader has closed
        if not self._stdin:
            self.wants.pop(fd, None)
            if fd in self._sinks:
                self.wants[fd] = select.POLLIN
            self.run.close_stdin()

    def _drain(self) -> None:
        """Read the bytes still in the pipes after the process ended, without waiting for other writers."""
        self.rested(float("inf"))
        self.may_rest = False
        for fd, sink in self._sinks.items():
            left = _DRAIN_BYTES
            while fd in self.wants and left > 0 and (count := self._read(fd)):
                left -= count
            self._cut = self._cut or left <= 0
            sink.close()

    def result(self) -> ExecResult:
        """The result; the descriptors are closed."""
        assert self.status is not None
        status = self.status
        self._close()
        return ExecResult(
            stdout=self.stdout.getvalue(),
            stderr=self.stderr.getvalue() + self.driven.note,
            exit_code=status.exit_code,
            signal=status.signal,
            timed_out=status.timed_out,
            oom_killed=status.oom_killed,
            killed_by=status.killed_by,
            truncated=self._cut,
            stdout_dropped_bytes=self.stdout.dropped_bytes,
            stderr_dropped_bytes=self.stderr.dropped_bytes,
            duration_s=status.duration_s,
            resource_usage=status.resource_usage,
        )

    def fail(self) -> None:
        """End without a result."""
        for sink in self._sinks.values():
            sink.close()
        self._close()

    def resize(self, rows: int, columns: int) -> None:
        """Tell its terminal the new size; nothing happens when it has ended.

        Raises:
            InvalidRequest: It has none.
        """
        if self.driven.asks_to_resize:
            self.run.resize(rows, columns)  # it may take its time, in which others need `open`
            return
        with self.open:
            if self.run.stdout is not None or self.run.done >= 0:
                self.run.resize(rows, columns)

    def _close(self) -> None:
        with self.open:
            self.run.close()


def begin(inner: BackendSandbox, request: ExecRequest, label: str = "") -> BackendExec:
    """Start what a pump is to drive until its end, and whose streams nobody else waits for.

    Where the backend can, they stay open until then: a program that ends closes both, and who is woken
    for each of them is in the way of whoever learns how it ended.
    """
    if isinstance(inner, AttendedExec):
        return inner.start_attended(request, label)
    return inner.start(request)


def run_to_end(pump: Pump) -> ExecResult:
    """Drive `pump` in this thread. Interrupted (Ctrl-C), it kills the whole tree first.

    Raises:
        SandboxLost: The sandbox went away, or no longer answers.
    """
    result = run_for(pump, None)
    assert result is not None
    return result


def run_for(pump: Pump, seconds: float | None) -> ExecResult | None:
    """`run_to_end`, but for so long at most: None means that somebody is to go on with it."""
    until = None if seconds is None else time.monotonic() + seconds
    poll = select.poll()
    registered: dict[int, int] = {}
    try:
        while True:
            _register(poll, registered, pump.wants)
            now = time.monotonic()
            if until is not None and until <= now:
                return None
            ends = [each for each in (until, pump.deadline) if each is not None]
            wait_s = max(0.0, min(*ends, now + LONGEST_S) - now) if ends else None
            events = poll.poll(None if wait_s is None else wait_s * 1000)
            if pump.deadline is not None and time.monotonic() >= pump.deadline:
                pump.passed_deadline()
            if len(events) > 1:  # the end comes last: output that is ready is read first
                events.sort(key=lambda item: item[0] == pump.run.done)
            for fd, event in events:
                if pump.ready(fd, event):
                    return pump.result()
    except BaseException as exc:
        if not isinstance(exc, SandboxLost):
            pump.run.kill()
        pump.fail()
        raise


def _register(poll: select.poll, registered: dict[int, int], wants: dict[int, int]) -> None:
    if registered == wants:
        return
    for fd in registered.keys() - wants.keys():
        poll.unregister(fd)
    for fd, events in wants.items():
        if registered.get(fd) != events:
            poll.register(fd, events)
    registered.clear()
    registered.update(wants)
