"""Moves the streams of one command between our descriptors and its pipes, in constant memory.

Our own descriptors never enter the sandbox: a terminal or a socket handed in could be driven from
there. Each direction is a thread of its own, so that a reader who does not read slows down only
the command that writes to it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import stat
from _thread import start_new_thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .signals import Bell

_CHUNK = 1 << 16
_PIPE_BYTES = 1 << 20
_BUSY_BYTES = 1 << 18  # after this much the pipe is made larger
_F_SETPIPE_SZ = 1031  # include/uapi/linux/fcntl.h
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.EIO)
_BACKGROUND_S = 0.2


class Flow:
    """Copy of one stream by a thread, until its source ends.

    Args:
        source: Descriptor to read.
        target: Descriptor to write, or a function to call with each chunk.
        ended: Called in the thread at the end.

    Attributes:
        moved: Bytes passed on so far.
        error: The error that stopped it early; None at the end of the source.
    """

    def __init__(
        self, source: int, target: int | Callable[[bytes], None], ended: Callable[[Flow], None]
    ) -> None:
        self.source, self.target = source, target
        self._is_terminal = os.isatty(source)
        self.moved = 0
        self.error: OSError | None = None
        self.done = False
        self._ended = ended

    def start(self) -> None:
        start_new_thread(self._run, ())

    @property
    def reader_gone(self) -> bool:
        """True if it stopped because the target has no reader any more."""
        return self.error is not None and self.error.errno in _GONE

    def _run(self) -> None:
        try:
            if callable(self.target):
                self._collect(self.target)
            elif self._is_terminal or not _is_pipe(self.target) or not self._splice(self.target):
                self._copy(self.target)
        except OSError as exc:
            self.error = exc
        finally:
            self.done = True
            self._ended(self)

    def _splice(self, target: int) -> bool:
        """Copy inside the kernel; False where these descriptors cannot.

        Only into pipes: into a file, splice(2) reads the offset first and writes it back without
        the lock that write(2) takes, also when nothing came. Standard output and error of the same
        file, or our shell's next line, would be overwritten.
        """
        enlarge_at = _BUSY_BYTES
        while True:
            try:
                count = os.splice(self.source, target, _PIPE_BYTES)
            except BlockingIOError:
                _wait(self.source, target)
                continue
            except OSError as exc:
                # A file opened to append, some devices; EBADF is what a write would say better.
                if exc.errno in (errno.EINVAL, errno.EBADF):
                    return False
                raise
            if count == 0:
                return True
            self.moved += count
            if self.moved >= enlarge_at:
                enlarge_at = 1 << 62
                _enlarge(self.source, target)

    def _copy(self, target: int) -> None:
        while data := self._read():
            view = memoryview(data)
            while view:
                try:
                    count = os.write(target, view)
                except BlockingIOError:
                    _wait(None, target)
                    continue
                self.moved += count
                view = view[count:]

    def _collect(self, target: Callable[[bytes], None]) -> None:
        while data := self._read():
            self.moved += len(data)
            target(data)

    def _read(self) -> bytes:
        while True:
            try:
                return os.read(self.source, _CHUNK)
            except BlockingIOError:
                _wait(self.source, None)
            except OSError as exc:
                if exc.errno != errno.EIO:
                    raise
                if self.source != 0 or not in_background():
                    return b""  # a terminal whose other side is closed
                import time

                time.sleep(_BACKGROUND_S)


def _is_pipe(fd: int) -> bool:
    return stat.S_ISFIFO(os.fstat(fd).st_mode)


def in_background() -> bool:
    """Return whether another job owns the terminal on stdin; reading it then fails with EIO."""
    try:
        return os.tcgetpgrp(0) != os.getpgrp()
    except OSError:
        return False


class Flows:
    """All directions of one command; `bell` rings when one has ended."""

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self.outputs: list[Flow] = []

    def output(self, source: int, target: int | Callable[[bytes], None]) -> None:
        os.set_blocking(source, True)
        flow = Flow(source, target, lambda _flow: self._bell.ring())
        self.outputs.append(flow)
        flow.start()

    def input(self, source: int, target: int, close: Callable[[], None]) -> None:
        """Pass our input on; `close` is called at its end, or when the command no longer reads."""
        os.set_blocking(target, True)
        Flow(source, target, lambda _flow: close()).start()

    @property
    def failed(self) -> Flow | None:
        return next((flow for flow in self.outputs if flow.error is not None), None)

    @property
    def over(self) -> bool:
        """True when every output has ended."""
        return all(flow.done for flow in self.outputs)

    @property
    def moved(self) -> int:
        return sum(flow.moved for flow in self.outputs)


def _wait(source: int | None, target: int | None) -> None:
    """Wait for the end that would block: a descriptor shared with others may be non-blocking."""
    for fd, events in ((source, select.POLLIN), (target, select.POLLOUT)):
        if fd is not None:
            poll = select.poll()
            poll.register(fd, events)
            poll.poll()


def _enlarge(*pipes: int) -> None:
    for fd in pipes:
        try:
            fcntl.fcntl(fd, _F_SETPIPE_SZ, _PIPE_BYTES)
        except OSError:
            pass  # not a pipe, or this user's share of pipe pages is used up
