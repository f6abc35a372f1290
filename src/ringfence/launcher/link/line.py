"""Framing over one byte stream, with non-blocking reads and writes.

A frame is a kind, a channel and a length, then so many bytes. Both sides run the same code; what a
guest's side says is checked here as anything that comes from a guest: at worst its own sandbox loses
what the line was for.
"""

from __future__ import annotations

import _struct as struct
import os
import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_HEADER = struct.Struct("<cII")
PIECE = 1 << 15
_MOST_BYTES = 1 << 16  # of a frame from a guest
_MOST_UNREAD = 1 << 22  # said to a guest that does not listen; then we do not listen either

MESSAGE, DATA, END, STOP, ROOM = b"M", b"D", b"E", b"S", b"R"
LAST = b"L"  # an answer waits for so many bytes, for which there is no room
CONTROL = 0  # the channel of what belongs to no other


def frame(kind: bytes, number: int, data: bytes) -> bytes:
    return _HEADER.pack(kind, number, len(data)) + data


def split(data: bytes) -> tuple[bytes, bytes] | None:
    """Split off the first frame's payload, a request without descriptors; None: more bytes must come."""
    if len(data) < _HEADER.size:
        return None
    kind, _number, size = _HEADER.unpack_from(data)
    end = _HEADER.size + size
    if len(data) < end:
        return None
    return data[_HEADER.size + (2 if kind == MESSAGE else 0) : end], data[end:]


class LineError(Exception):
    """The other side broke the rules: nothing that it says is believed any more."""


class Line:
    """Side of a serial link. `run` returns at its end, or when neither side needs it any more.

    Args:
        line: A stream, read and written.
        is_host: The other side is a guest: its data is untrusted.
    """

    def __init__(self, line: int, *, is_host: bool) -> None:
        self.line, self.out, self.is_host = line, line, is_host
        self._epoll = select.epoll()
        self._events: dict[int, int] = {}
        self._handlers: dict[int, Callable[[], None]] = {}  # of descriptors that are no channel's
        self._out, self._in = bytearray(), bytearray()
        self._over = False
        self.pause_s: float | None = None
        os.set_blocking(line, False)
        self._want(line, select.EPOLLIN)

    def write_to(self, out: int) -> None:
        """Write to another descriptor than is read, where a line is two pipes."""
        self.out = out
        os.set_blocking(out, False)

    def run(self) -> None:
        """Carry until the line has ended; then close everything but what was given to us."""
        try:
            while not self._over:
                self._flush()
                for fd, events in self._epoll.poll(self.pause_s):
                    self._ready(fd, events)
                self._between()
        except (LineError, OSError, ValueError):
            pass  # nobody is left who could be told: both ends find their sockets closed
        finally:
            self._close_all()
            self._epoll.close()

    def _between(self) -> None:
        """After each round, and each `pause_s` where there is one."""

    def _close_all(self) -> None:
        """Close what was given to us, once the line has ended."""

    def feed(self, data: bytes) -> None:
        """Add data that was read from the stream before `run`."""
        self._in += data

    # -- waiting ------------------------------------------------------------------------------

    def _want(self, fd: int, events: int) -> None:
        """Wait for these; -1: not even for its end, which the kernel tells whether asked or not."""
        before = self._events.get(fd, -1)
        if before == events:
            return
        if events < 0:
            del self._events[fd]
            self._epoll.unregister(fd)
            return
        (self._epoll.register if before < 0 else self._epoll.modify)(fd, events)
        self._events[fd] = events

    def _handle(self, fd: int, handler: Callable[[], None]) -> None:
        """Call it whenever there is something to read."""
        self._handlers[fd] = handler
        self._want(fd, select.EPOLLIN)

    def _unhandle(self, fd: int) -> None:
        """No longer; before it is closed."""
        if self._handlers.pop(fd, None) is not None:
            self._want(fd, -1)

    def _ready(self, fd: int, events: int) -> None:
        if fd == self.line:
            self._read_line(events)
        elif fd in self._handlers:
            self._handlers[fd]()
        elif fd != self.out:  # that one is written to before anything else
            self._ready_other(fd, events)

    def _ready_other(self, fd: int, events: int) -> None:
        """Something is neither the line nor has a handler."""

    # -- the line -----------------------------------------------------------------------------

    def _put(self, kind: bytes, number: int, data: bytes) -> None:
        self._out += frame(kind, number, data)

    def _flush(self) -> None:
        while self._out:
            try:
                count = os.write(self.out, memoryview(self._out)[:PIECE])
            except BlockingIOError:
                # A guest always reads. One that does not fills our memory: with answers to what it
                # says, and with requests to it.
                reads = len(self._out) < _MOST_UNREAD or not self.is_host
                read = select.EPOLLIN if reads else 0
                for fd in self._handlers:
                    self._want(fd, read)
                self._want(self.out, select.EPOLLOUT | (read if self.out == self.line else 0))
                if self.out != self.line:
                    self._want(self.line, read)
                return
            del self._out[:count]
        if self.out != self.line:
            self._want(self.out, -1)
        for fd in (self.line, *self._handlers):
            self._want(fd, select.EPOLLIN)

    def _read_line(self, events: int) -> None:
        if events & select.EPOLLIN:
            try:
                data = os.read(self.line, PIECE)
            except BlockingIOError:
                return
            if not data:
                self._over = True
                return
            self._in += data
            self._take_frames()
        elif events & (select.EPOLLHUP | select.EPOLLERR):
            self._over = True

    def _take_frames(self) -> None:
        at = 0
        while len(self._in) - at >= _HEADER.size:
            kind, number, size = _HEADER.unpack_from(self._in, at)
            if self.is_host and size > _MOST_BYTES:
                raise LineError("a frame is too long")
            if len(self._in) - at - _HEADER.size < size:
                break
            at += _HEADER.size
            data = bytes(memoryview(self._in)[at : at + size])
            at += size
            self._take(kind, number, data)
        del self._in[:at]

    def _take(self, kind: bytes, number: int, data: bytes) -> None:
        raise NotImplementedError
