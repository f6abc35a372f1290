"""Connections of a machine's programs, relayed over a line to a network namespace of the host's.

A machine has no network device. Its kernel turns what a policy may allow to a listener and a resolver's
socket, as that of any sandbox does; behind them sits `Inside`, which says over the line who was meant.
`Outside` sits in the jail's network namespace, which has the same tables, and connects to just that: so
whoever serves the jail's two sockets sees what it would see of any sandbox, and whatever a guest says,
it gets no further than its jail. A connection that broke off on one side is reset on the other.
"""

from __future__ import annotations

import _struct as struct
import functools
import marshal
import socket

from ...linux.destination import destination, shown
from .. import network, wire
from ..newroot import BuildError
from .channel import BYTES, Channel
from .channels import LineEnd
from .line import CONTROL, LineError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..plan import NetworkPlan

OPEN, RESET, QUERY, PLAN = b"O", b"X", b"Q", b"P"

_MOST_CONNECTIONS = 512
_MOST_ASKERS, _MOST_QUERIES = 1024, 64  # the older wait in vain
_TURN = 16
_MOST_ASKED = 4096  # bytes of a datagram
_RESOLVER = ("127.0.0.53", 53)
_PORT, _ID = struct.Struct("!H"), struct.Struct("!H")
_RESET_ON_CLOSE, _CLOSE_IN_ORDER = struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)


class ConnectionRelay(LineEnd):
    """Common part of both sides of the relay.

    Args:
        token: Marks the start on a link with older traffic: each side sends it, and ignores all before it.
            The guest's side begins, since data sent before its port is open is lost. Empty: the link is new.
    """

    def __init__(self, line: int, *, is_host: bool, token: bytes = b"") -> None:
        super().__init__(line, is_host=is_host)
        self._awaited = token
        if not is_host:
            self._out += token

    def _take_frames(self) -> None:
        if self._awaited:
            _before, found, after = self._in.partition(self._awaited)
            if not found:
                del self._in[: -len(self._awaited)]
                return
            if self.is_host:
                self._out[:0] = self._awaited
            self._in, self._awaited = after, b""
        super()._take_frames()

    def _flush(self) -> None:
        if not (self._awaited and self.is_host):
            super()._flush()

    def _join(self, number: int, sock: socket.socket) -> None:
        """Let a connection be a channel's end. Whatever ends us, it is reset."""
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        fd = sock.detach()
        self._add(Channel(number, BYTES, source=fd, sink=fd))

    def _take_other(self, channel: Channel, kind: bytes) -> None:
        if kind != RESET:
            raise LineError("an unknown kind of frame")
        self._close(channel)

    def _broke(self, channel: Channel) -> bool:
        self._put(RESET, channel.number, b"")
        self._close(channel)
        return True

    def _end(self, channel: Channel) -> None:
        for fd in {channel.source, channel.sink} - {-1}:
            sock = socket.socket(fileno=fd)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _CLOSE_IN_ORDER)
            sock.detach()
        self._close(channel)


class Inside(ConnectionRelay):
    """The guest's side: accepts what its kernel turns to it."""

    def __init__(self, line: int, token: bytes = b"") -> None:
        super().__init__(line, is_host=False, token=token)
        self._listener: socket.socket | None = None
        self._resolver: socket.socket | None = None
        self._askers: dict[int, Any] = {}  # by the number of what they asked
        self._asked = 0

    def run(self) -> None:
        super().run()
        for sock in (self._listener, self._resolver):
            if sock is not None:
                sock.close()

    def _take_control(self, kind: bytes, data: bytes) -> None:
        if kind == PLAN:
            self._put(PLAN, CONTROL, self._follow(*marshal.loads(data)))
        elif kind == QUERY:
            self._answer(_ID.unpack_from(data)[0], data[_ID.size :])
        else:
            raise LineError("an unknown kind of frame")

    def _follow(self, plan: NetworkPlan, is_open: bool) -> bytes:
        """Do what the host has decided; the answer to it, as `wire` has them."""
        if plan["port"] or not is_open:
            self._shut()
        try:
            sockets = network.set_up(plan)
        except BuildError as exc:
            return b"E%d in the machine: %s" % (exc.cause.errno or 5, str(exc).encode()[:1000])
        if sockets:
            self._listener, self._resolver = (socket.socket(fileno=fd) for fd in sockets)
            self._handle(self._listener.fileno(), self._accept)
            self._handle(self._resolver.fileno(), self._ask)
        return b"O"

    def _shut(self) -> None:
        """Let nobody in any more, and cut who is."""
        for sock in (self._listener, self._resolver):
            if sock is not None:
                self._unhandle(sock.fileno())
                sock.close()
        self._listener = self._resolver = None
        self._askers.clear()
        for channel in list(self._channels.values()):
            self._broke(channel)

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(_TURN):
            if len(self._channels) >= _MOST_CONNECTIONS:
                self._unhandle(self._listener.fileno())  # others wait in the kernel's queue
                return
            try:
                sock, peer = self._listener.accept()
            except OSError:  # there is none, or it is gone already
                return
            address, port = destination(sock, peer[0])
            self._last += 1
            self._put(OPEN, self._last, _PORT.pack(port) + address)
            self._join(self._last, sock)

    def _close(self, channel: Channel) -> None:
        super()._close(channel)
        if self._listener is not None and self._listener.fileno() not in self._handlers:
            self._handle(self._listener.fileno(), self._accept)

    def _ask(self) -> None:
        assert self._resolver is not None
        try:
            data, asker = self._resolver.recvfrom(_MOST_ASKED)
        except OSError:
            return
        self._asked = (self._asked + 1) & 0xFFFF
        self._askers[self._asked] = asker
        while len(self._askers) > _MOST_ASKERS:
            del self._askers[next(iter(self._askers))]
        self._put(QUERY, CONTROL, _ID.pack(self._asked) + data)

    def _answer(self, number: int, data: bytes) -> None:
        asker = self._askers.pop(number, None)
        if asker is not None and self._resolver is not None:
            try:
                self._resolver.sendto(data, asker)
            except OSError:
                pass  # it asks again


class Outside(ConnectionRelay):
    """The host's side, in the jail: connects to what the guest's side says, and to nothing else.

    Args:
        control: Plans come from there, for the guest's kernel; its answers go there.
    """

    def __init__(self, line: int, control: wire.Socket, token: bytes = b"") -> None:
        super().__init__(line, is_host=True, token=token)
        self._control = control
        self._queries: dict[int, tuple[socket.socket, int]] = {}  # by descriptor
        control.setblocking(False)
        self._handle(control.fileno(), self._pass_plan_on)

    def run(self) -> None:
        super().run()
        for sock, _number in self._queries.values():
            sock.close()

    def _pass_plan_on(self) -> None:
        message, _fds = wire.receive(self._control)
        if message is None:
            self._over = True
        else:
            self._put(PLAN, CONTROL, marshal.dumps(message))

    def _take_control(self, kind: bytes, data: bytes) -> None:
        if kind == PLAN:
            wire.send_raw(self._control, data or b"?")
        elif kind == QUERY and len(data) >= _ID.size:
            self._ask(_ID.unpack_from(data)[0], data[_ID.size :])
        else:
            raise LineError("an unknown kind of frame")

    def _take_unknown(self, kind: bytes, number: int, data: bytes) -> None:
        if kind != OPEN or number <= self._last:
            super()._take_unknown(kind, number, data)
            return
        self._last = number
        try:
            if len(self._channels) >= _MOST_CONNECTIONS:
                raise OSError
            self._join(number, _dialled(data))
        except OSError:
            self._put(RESET, number, b"")

    def _ask(self, number: int, data: bytes) -> None:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            sock.connect(_RESOLVER)
            sock.send(data)
        except OSError:  # nobody is there: it hears nothing, as from a resolver that is down
            sock.close()
            return
        self._queries[sock.fileno()] = sock, number
        self._handle(sock.fileno(), functools.partial(self._answered, sock.fileno()))
        while len(self._queries) > _MOST_QUERIES:
            self._forget(next(iter(self._queries)))

    def _answered(self, fd: int) -> None:
        if fd not in self._queries:
            return
        sock, number = self._queries[fd]
        try:
            self._put(QUERY, CONTROL, _ID.pack(number) + sock.recv(_MOST_ASKED))
        except OSError:
            pass
        self._forget(fd)

    def _forget(self, fd: int) -> None:
        self._unhandle(fd)
        self._queries.pop(fd)[0].close()


def _dialled(data: bytes) -> socket.socket:
    """A connection on its way to an address that a guest named.

    Raises:
        OSError: The kernel refuses it at once.
        LineError: That is no address.
    """
    if len(data) not in (_PORT.size + 4, _PORT.size + 16):
        raise LineError("no address")
    port, address = _PORT.unpack_from(data)[0], data[_PORT.size :]
    family = socket.AF_INET if len(address) == 4 else socket.AF_INET6
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.connect((shown(address), port))
    except BlockingIOError:
        pass  # EINPROGRESS
    except OSError:
        sock.close()
        raise
    return sock
