"""Byte streams: what protocols are spoken over, whatever lies below."""

from __future__ import annotations

import _socket as socket
import _struct as struct

from .loop import current, pause, running

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from .loop import Task

    class Stream(Protocol):
        """Two directions of bytes.

        At most one task reads and at most one writes at a time. The far end's reset, and everything
        else that breaks a connection, is an OSError; a `loop.Deadline` around a call limits it.
        """

        async def read(self, most: int) -> bytes:
            """At least one byte, at most `most`; b"" at the end."""

        async def write(self, data: bytes) -> None:
            """Hand over all of `data`; returns once the layer below took it."""

        async def end(self) -> None:
            """Nothing more will be written; reading goes on."""

        def close(self) -> None:
            """End both directions in order. What was written still arrives. Idempotent."""

        def abort(self) -> None:
            """Break off: the far end sees a reset, not an end. Idempotent."""


_RESET, _IN_ORDER = struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)  # struct linger: on, seconds


class SocketStream:
    """A connected stream socket of ours as a `Stream`.

    Args:
        first: What was read from it already; it is read again first.
    """

    def __init__(self, sock: socket.socket, first: bytes = b"") -> None:
        self.socket = sock
        self.first = first
        self._loop = running()
        self._reader: Task | None = None
        self._writer: Task | None = None
        self._closed = False
        prepare(sock)
        self._loop.watch(sock.fileno(), self._wake)

    async def read(self, most: int) -> bytes:
        if self.first:
            data, self.first = self.first[:most], self.first[most:]
            return data
        while True:
            try:
                return self.socket.recv(most)
            except BlockingIOError:
                await self._readable()

    async def write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[self.socket.send(left) :]
            except BlockingIOError:
                await self._writable()

    async def end(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    def unread(self, data: bytes) -> None:
        """Let the next read begin with `data`."""
        self.first = data + self.first

    def release(self) -> socket.socket:
        """Give the socket up to somebody who watches it himself; `first` is theirs to look at.

        Precondition: nobody reads or writes.
        """
        self._closed = True
        self._loop.unwatch(self.socket.fileno())
        return self.socket

    def close(self) -> None:
        if not self._closed:
            close_in_order(self.release())
            self._wake(0)

    def abort(self) -> None:
        if not self._closed:
            self.release().close()
            self._wake(0)

    async def _readable(self) -> None:
        self._reader = current()
        try:
            await pause()
        finally:
            self._reader = None

    async def _writable(self) -> None:
        self._writer = current()
        try:
            await pause()
        finally:
            self._writer = None

    def _wake(self, _events: int) -> None:
        for task in (self._reader, self._writer):
            if task is not None:
                task.wake()


def prepare(sock: socket.socket) -> None:
    """Make a connected socket ready to be used here.

    It never blocks. Small pieces do not wait for the answer to earlier ones: a TLS handshake is made of
    such, and the far end's delayed acknowledgement would be 40 ms, twice. And closing it is a reset,
    unless it is done by `close_in_order`: were this process killed, the kernel would otherwise end its
    connections in order, and the far ends take what they got for all there is.

    Source: socket(7), SO_LINGER; tcp(7). A unix socket has neither, and just closes.
    """
    sock.setblocking(False)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    except OSError:
        pass


def close_in_order(sock: socket.socket) -> None:
    """Close it so that what was written still arrives, and then the end."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _IN_ORDER)
    except OSError:
        pass
    sock.close()
