"""Bytes that the agent moves between the guest's files or terminals and the host's pipes.

A descriptor can be sent into a guest with a kernel of its own, but none comes out. So whoever wants
a file sends a pipe, and it is copied, a piece at a time, whenever the other side is ready.
"""

from __future__ import annotations

import _socket as socket
import errno
import os
import select

from ..launcher import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    class Flow(Protocol):
        """Something that the agent's loop drives."""

        def wants(self) -> dict[int, int]:
            """Descriptors to wait for, with poll(2) events; none: it is over."""
            ...

        def ready(self, fd: int) -> None: ...

        def close(self) -> None: ...


_PIECE = 1 << 20
_TURNS = 8  # then somebody else may have one
_PAIR_PIECE = 1 << 16
_MOST_LEFT = 1 << 18  # more than a terminal holds, of whose processes one may write on and on


class Copy:
    """A file copied to or from a pipe, whole. The last message on `reply` is its result.

    Args:
        source, sink: The file, which is always ready, and the pipe, non-blocking; in either order.
    """

    def __init__(self, source: int, sink: int, reply: wire.Socket, *, out: bool) -> None:
        self._source, self._sink, self._reply = source, sink, reply
        self._pipe = sink if out else source
        self._event = select.POLLOUT if out else select.POLLIN
        self._rest = memoryview(b"")
        self._over = False

    def wants(self) -> dict[int, int]:
        return {} if self._over else {self._pipe: self._event}

    def ready(self, fd: int) -> None:
        del fd
        try:
            for _ in range(_TURNS):
                if not self._rest:
                    self._rest = memoryview(os.read(self._source, _PIECE))
                    if not self._rest:
                        self._end(None)
                        return
                self._rest = self._rest[os.write(self._sink, self._rest) :]
        except BlockingIOError:
            return
        except OSError as exc:
            self._end(exc)

    def _end(self, problem: OSError | None) -> None:
        self._over = True
        os.close(self._source)
        os.close(self._sink)
        if problem is None:
            wire.answer(self._reply, b"O")
        else:
            wire.refuse(self._reply, problem)
        self._reply.close()

    def close(self) -> None:
        if not self._over:
            self._end(OSError(errno.EIO, "the agent ends"))


class Pair:
    """Two non-blocking descriptors, each of whose bytes go to the other.

    Args:
        host: A stream socket of the host's.
        guest: A terminal's master, or a connected stream socket of the guest's.
        ends_at_once: The end of one direction ends both, as that of a terminal does; else the other
            side is told of it, and may still answer.
    """

    def __init__(self, guest: int, host: int, *, ends_at_once: bool) -> None:
        self.guest, self.host = guest, host
        self._ends_at_once = ends_at_once
        self._rest = {guest: b"", host: b""}  # read there, not yet written to the other
        self._ended: set[int] = set()  # where nothing more comes from
        self._left = _MOST_LEFT  # that `settle` passes on
        for fd in (guest, host):
            os.set_blocking(fd, False)

    @property
    def is_open(self) -> bool:
        """True while bytes may still flow."""
        return self.guest >= 0

    def _other(self, fd: int) -> int:
        return self.host if fd == self.guest else self.guest

    def wants(self) -> dict[int, int]:
        if not self.is_open:
            return {}
        events = {self.guest: 0, self.host: 0}
        for fd, rest in self._rest.items():
            if rest:
                events[self._other(fd)] |= select.POLLOUT
            elif fd not in self._ended:
                events[fd] |= select.POLLIN
        return {fd: event for fd, event in events.items() if event}

    def ready(self, fd: int) -> None:
        del fd
        for source in (self.guest, self.host):
            if self.is_open:
                self._move(source)

    def settle(self) -> bool:
        """Pass on what the guest's side has said by now; whether that is done, or nobody wants it."""
        while self.is_open and self._left > 0 and (count := self._move(self.guest)):
            self._left -= count
        return not self.is_open or self._left <= 0 or not self._rest[self.guest]

    def _move(self, source: int) -> int:
        """A piece at most; how many bytes the other has got."""
        sink, count = self._other(source), 0
        try:
            if not self._rest[source] and source not in self._ended:
                self._rest[source] = self._read(source)
            if self._rest[source]:
                count = os.write(sink, self._rest[source])
                self._rest[source] = self._rest[source][count:]
        except BlockingIOError:
            return 0
        except OSError:  # EPIPE: nobody reads there any more
            self._rest[source] = b""
            self._ended.add(source)
        if source in self._ended and not self._rest[source]:
            self._end_of(source)
        return count

    def _read(self, source: int) -> bytes:
        try:
            data = os.read(source, _PAIR_PIECE)
        except BlockingIOError:
            raise
        except OSError:  # EIO: no process has the terminal open
            data = b""
        if not data:
            self._ended.add(source)
        return data

    def _end_of(self, source: int) -> None:
        if self._ends_at_once or (len(self._ended) == 2 and not any(self._rest.values())):
            self.close()
            return
        try:
            _shut_down(self._other(source))
        except OSError:
            self.close()

    def close(self) -> None:
        if self.is_open:
            os.close(self.guest)
            os.close(self.host)
            self.guest = -1


class Dial:
    """A connection to a server of the guest's, on its way.

    Args:
        host: The host's socket, which is closed where there is no connection.
        begin: Called with the connection once it is there; the host's socket is then its own.
    """

    def __init__(
        self, sock: wire.Socket, reply: wire.Socket, host: int, begin: Callable[[int], None]
    ) -> None:
        self._sock, self._reply, self._host, self._begin = sock, reply, host, begin
        self._over = False

    def wants(self) -> dict[int, int]:
        return {} if self._over else {self._sock.fileno(): select.POLLOUT}

    def ready(self, fd: int) -> None:
        del fd
        self._over = True
        failed = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failed:
            wire.refuse(self._reply, OSError(failed, os.strerror(failed)))
            self.close()
        else:
            self._begin(self._sock.detach())
            wire.answer(self._reply, b"O")
            self._reply.close()

    def close(self) -> None:
        self._over = True
        os.close(self._host)
        self._sock.close()
        self._reply.close()


def _shut_down(fd: int) -> None:
    sock = socket.socket(fileno=fd)
    try:
        sock.shutdown(socket.SHUT_WR)
    finally:
        sock.detach()
