"""A sandbox in the egress process: its sockets, and whom each connection is for."""

from __future__ import annotations

import _socket as socket
import errno

from ..linux.destination import destination, shown
from . import passage, proxy
from .connection import Connection
from .dns import answers
from .dns.names import is_synthetic
from .refused import Refused
from .rules import Ruled

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .commons import Commons

_TURN = 16  # connections accepted, or datagrams answered, before others have their turn
_PATIENCE_S = 0.05  # with no descriptors left


class Sandbox(Ruled):
    """Serves one sandbox from `serve` to `close`.

    Args:
        settings: Of the host's request: policy, secrets, network_bytes, ca.
        listener: TCP, made in the sandbox's network namespace: whoever comes in here is that sandbox.
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
        self._is_closed = False
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
        else:
            self._serve(connection, *destination(sock, peer))

    def _serve(self, connection: Connection, address: bytes, port: int) -> None:
        """Find out whom it is for, and serve it."""
        connection.port = port
        if self.is_resolver(address, port):
            connection.run(passage.resolve(connection))
        elif self.is_proxy(address, port):
            connection.run(proxy.serve(connection))
        else:
            self._serve_transparent(connection, address)

    def _serve_transparent(self, connection: Connection, address: bytes) -> None:
        name = self.names.name_at(address)
        if name is None and is_synthetic(address):
            connection.address = shown(address)
            connection.refuse("an address for which no current name was resolved")
            return
        try:
            connection.aim(name, shown(address))
        except Refused as exc:
            connection.refuse(exc.reason)
            return
        connection.run(passage.serve(connection, connection.stream()))

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
