"""Reading an exec to its end with nothing but the backend protocol.

Every wait is bounded by a patience that is generous on purpose: it decides when a test
has failed, never whether a backend is fast.
"""

from __future__ import annotations

import os
import select
import time
from typing import TYPE_CHECKING

from ..model.execs.exec import ExecResult

if TYPE_CHECKING:
    from ..backends.protocol import BackendExec

_PIECE = 65_536


class OutOfPatience(AssertionError):  # noqa: N818 (it is pytest's business, not an API error)
    """Something that had to happen did not, within the suite's patience."""


class _Collected:
    """Bounded copy of an output stream: the first `most` bytes, and a count of the rest."""

    def __init__(self, fd: int | None, most: int | None) -> None:
        self.fd = fd
        self.data = bytearray()
        self.dropped = 0
        self._most = most

    def read(self) -> bool:
        """Read once; false when nothing is there or nothing will come any more."""
        if self.fd is None:
            return False
        try:
            piece = os.read(self.fd, _PIECE)
        except BlockingIOError:
            return False
        except OSError:  # a terminal whose last user is gone says EIO
            piece = b""
        if not piece:
            self.fd = None
            return False
        room = len(piece) if self._most is None else max(0, self._most - len(self.data))
        self.data += piece[:room]
        self.dropped += len(piece) - len(piece[:room])
        return True


class _Fed:
    """Stdin: what is still to be written."""

    def __init__(self, process: BackendExec, data: bytes | None) -> None:
        self._process = process
        self._rest = memoryview(data or b"")
        if data is not None:
            self._close_when_done()

    @property
    def fd(self) -> int | None:
        return self._process.stdin if self._rest else None

    def write(self) -> None:
        fd = self.fd
        if fd is None:
            return
        try:
            self._rest = self._rest[os.write(fd, self._rest[:_PIECE]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # the command does not want it: no reason to fail
            self._rest = self._rest[:0]
        self._close_when_done()

    def _close_when_done(self) -> None:
        if not self._rest:
            self._process.close_stdin()


def collect(
    process: BackendExec,
    *,
    stdin: bytes | None = None,
    max_output_bytes: int | None = None,
    patience_s: float = 60.0,
) -> ExecResult:
    """Feed, read and wait until `done`; then what is left in the pipes.

    A surviving child that holds the pipes is not waited for.
    """
    fed = _Fed(process, stdin)
    out = _Collected(process.stdout, max_output_bytes)
    err = _Collected(process.stderr, max_output_bytes)
    deadline_s = time.monotonic() + patience_s
    while not _is_done_after_waiting(process.done, fed, [out, err], deadline_s):
        pass
    for stream in (out, err):
        while stream.read():
            pass
    status = process.status()
    return ExecResult(
        stdout=bytes(out.data),
        stderr=bytes(err.data),
        exit_code=status.exit_code,
        signal=status.signal,
        timed_out=status.timed_out,
        oom_killed=status.oom_killed,
        killed_by=status.killed_by,
        stdout_dropped_bytes=out.dropped,
        stderr_dropped_bytes=err.dropped,
        duration_s=status.duration_s,
        resource_usage=status.resource_usage,
    )


def wait_done(process: BackendExec, patience_s: float = 60.0) -> None:
    """Wait for the exec to end, without reading what it writes."""
    if not is_readable(process.done, patience_s):
        raise OutOfPatience(f"exec {process.id} has not ended after {patience_s:g} s")


def is_readable(fd: int, patience_s: float = 0.0) -> bool:
    """Return whether `fd` becomes readable, or ends, within `patience_s`."""
    return bool(_poll([(fd, select.POLLIN)], time.monotonic() + patience_s))


def read_until(fd: int | None, marker: bytes, patience_s: float = 60.0) -> bytes:
    """Read from `fd` up to and including `marker`, possibly some bytes more."""
    assert fd is not None
    seen = bytearray()
    deadline_s = time.monotonic() + patience_s
    while marker not in seen:
        if not _poll([(fd, select.POLLIN)], deadline_s):
            raise OutOfPatience(f"{marker!r} did not come; seen so far: {bytes(seen)!r}")
        piece = os.read(fd, _PIECE)
        if not piece:
            raise OutOfPatience(f"the stream ended before {marker!r}: {bytes(seen)!r}")
        seen += piece
    return bytes(seen)


def read_to_end(fd: int | None, patience_s: float = 60.0) -> bytes:
    """Everything up to the end of the stream.

    The end comes only when no process holds the other side any more: it is how the suite
    sees, from outside and on any backend, that a whole process tree is gone.
    """
    assert fd is not None
    seen = bytearray()
    deadline_s = time.monotonic() + patience_s
    while True:
        if not _poll([(fd, select.POLLIN)], deadline_s):
            raise OutOfPatience("some process still holds the stream")
        piece = os.read(fd, _PIECE)
        if not piece:
            return bytes(seen)
        seen += piece


def drain(fd: int | None) -> bytes:
    """Read the bytes available now."""
    collected = _Collected(fd, None)
    while collected.read():
        pass
    return bytes(collected.data)


def _is_done_after_waiting(
    done: int, fed: _Fed, outputs: list[_Collected], deadline_s: float
) -> bool:
    wanted = [(done, select.POLLIN)]
    wanted += [(stream.fd, select.POLLIN) for stream in outputs if stream.fd is not None]
    if fed.fd is not None:
        wanted.append((fed.fd, select.POLLOUT))
    ready = _poll(wanted, deadline_s)
    if not ready:
        raise OutOfPatience("the exec neither ended nor wrote anything")
    if fed.fd in ready:
        fed.write()
    for stream in outputs:
        if stream.fd in ready:
            stream.read()
    return done in ready


def _poll(wanted: list[tuple[int, int]], deadline_s: float) -> set[int]:
    """The fds that are ready; empty when the deadline passed."""
    poll = select.poll()
    for fd, event in wanted:
        poll.register(fd, event)
    left_ms = max(0.0, deadline_s - time.monotonic()) * 1000
    return {fd for fd, _ in poll.poll(left_ms)}
