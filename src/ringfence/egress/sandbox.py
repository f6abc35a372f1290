"""A sandbox in the egress process: its sockets, and whom each connection is for."""

from __future__ import annotations

import _socket as socket
import _struct as struct
import errno
from _operator import _compare_digest as compare_digest

from ..linux.destination import destination, plain, shown
from . import passage, proxy
from .connection import Connection
from .dns import answers
from .dns.names import is_synthetic
from .io.loop import Deadline
from .refused import Refused
from .rules import Ruled

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from .commons import Commons

_TURN = 16  # connections accepted, or datagrams answered, before others have their turn
_DESTINATION = struct.Struct("!16sH")  # address, IPv4 mapped into IPv6, and port
_PATIENCE_S = 0.05  # with no descriptors left


class Sandbox(Ruled):
    """Serves one sandbox from `serve` to `close`.

    Args:
        settings: Of the host's request: policy, secrets, network_bytes, ca, token.
        listener: TCP, made in the sandbox's network namespace: whoever comes in here is that sandbox.
            With a token it is in another one's, and that is who says the token first.
        datagrams: UDP, where its resolver is.
    """

    def __init__(
        self,
        commons: Commons,
        sandbox_id: str,
        settings: dict[str, Any],
        listener: socket.socket,
        datagrams: socket.socket,
    ) -> None:
        has_ipv6 = listener.family == socket.AF_INET6
        super().__init__(commons, sandbox_id, settings, has_ipv6=has_ipv6)
        self._listener, self._datagrams = listener, datagrams
        self._token = bytes.fromhex(settings.get("token", ""))
        for sock in (listener, datagrams):
            sock.setblocking(False)
        commons.loop.watch(listener.fileno(), self._on_connection)
        commons.loop.watch(datagrams.fileno(), self._on_datagram)

    # -- what comes ---------------------------------------------------------------------------

    def _on_connection(self, _events: int = 0) -> None:
        for _ in range(_TURN):
            if self._is_closed:
                return
            try:
                fd, peer = self._listener._accept()  # type: ignore[attr-defined]
            except BlockingIOError:
                return
            except OSError as exc:
                if exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    self.commons.loop.later(_PATIENCE_S, self._on_connection)
                    return
                if exc.errno == errno.EINVAL:
                    return
                continue  # ECONNABORTED and its kin: that one is gone
            self._welcome(socket.socket(fileno=fd), peer[0])
        self.commons.loop.soon(self._on_connection)

    def _welcome(self, sock: socket.socket, peer: str) -> None:
        connection = Connection(self, sock)
        self.connections.add(connection)
        if len(self.connections) > self.limits.connections:
            connection.refuse("too many connections at the same time")
        elif not self._arrivals.take():
            connection.refuse("too many new connections a second")
        elif not self.commons.has_room_for(self):
            connection.refuse("this host has no room for more connections")
        elif self._token:
            connection.run(self._hear(connection))
        elif work := self._work(connection, *destination(sock, peer)):
            connection.run(work)

    async def _hear(self, connection: Connection) -> None:
        """Serve a connection that an agent made: the token and the destination come first."""
        connection.is_recorded = False
        stream, said = connection.stream(), b""
        length = len(self._token) + _DESTINATION.size
        with Deadline(self.limits.header_s):
            while len(said) < length and (more := await stream.read(length - len(said))):
                said += more
        if not compare_digest(said[: len(self._token)], self._token) or len(said) < length:
            raise Refused("not from the agent of this sandbox")
        connection.is_recorded = True
        connection.streams.remove(stream)
        stream.release()
        address, port = _DESTINATION.unpack(said[len(self._token) :])
        if work := self._work(connection, plain(address), port):
            await work

    def _work(
        self, connection: Connection, address: bytes, port: int
    ) -> Coroutine[Any, Any, None] | None:
        """Find out whom it is for; None where it is refused already."""
        connection.port = port
        if self.is_resolver(address, port):
            return passage.resolve(connection)
        if self.is_proxy(address, port):
            return proxy.serve(connection)
        name = self.names.name_at(address)
        if name is None and is_synthetic(address):
            connection.address = shown(address)
            connection.refuse("an address for which no current name was resolved")
            return None
        try:
            connection.aim(name, shown(address))
        except Refused as exc:
            connection.refuse(exc.reason)
            return None
        return passage.serve(connection, connection.stream())

    def _on_datagram(self, _events: int = 0) -> None:
        for _ in range(_TURN):
            if self._is_closed:
                return
            try:
                data, peer = self._datagrams.recvfrom(4096)
            except BlockingIOError:
                return
            except OSError:
                continue
            reply = answers.answer(self, data)
            if reply is not None:
                try:
                    self._datagrams.sendto(reply, peer)
                except OSError:
                    pass  # its queue is full: it asks again
        self.commons.loop.soon(self._on_datagram)

    def close(self) -> None:
        """Cut everything and close the sockets: nothing is let in or out any more."""
        self._is_closed = True
        for sock in (self._listener, self._datagrams):
            self.commons.loop.unwatch(sock.fileno())
            sock.close()
        super().close()
