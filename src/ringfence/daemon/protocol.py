"""uvicorn's protocols, with the peer of a unix socket known, and with bounds that it has not."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame

from ..api.access.peer import PEER, Peer
from ..api.bounds import Bounds
from ..api.loop_share import InSlices, LoopShare

_SMALL = 1 << 16  # bytes: to copy more than that takes longer than to send twice
_LAST_S = 0.3  # for a last request on a connection that is kept alive
_CREDENTIALS = struct.Struct("3i")  # struct ucred: socket(7), SO_PEERCRED
MOST_MESSAGE = 256 << 10
"""Bytes of a WebSocket message from a client."""
_MOST_FRAMES = 1024  # of one message


def is_readable(sock: socket.socket) -> bool:
    """Return whether bytes, or in a listening socket a connection, are waiting."""
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    return any(event & select.POLLIN for _, event in poll.poll(0))


def http_protocol(bounds: Bounds, share: LoopShare) -> type[RingfenceProtocol]:
    """The class of connections with these bounds, as uvicorn wants it."""
    return type("BoundedProtocol", (RingfenceProtocol,), {"bounds": bounds, "share": share})


def websocket_protocol(share: LoopShare) -> type[RingfenceWebSocket]:
    return type("BoundedWebSocket", (RingfenceWebSocket,), {"share": share})


class RingfenceProtocol(InSlices, HttpToolsProtocol):
    """HTTP connection with the peer check and the bounds that uvicorn lacks."""

    most_bytes = 8192  # httptools is quicker than the WebSocket parser
    bounds = Bounds()
    is_leaving = False
    """Set on the class at shutdown: each connection then ends after its current response."""
    _head_bytes, _in_head = 0, True
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A unix socket's peer must be this user or root, whatever the file's mode says."""
        super().connection_made(transport)
        if len(self.connections) > self.bounds.connections:
            self._refuse(b"503 Service Unavailable")
            return
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family == socket.AF_UNIX:
            uid = peer_uid(sock)
            if uid not in (0, os.geteuid()):
                self._refuse(b"403 Forbidden")
                return
            self.app_state = {**self.app_state, PEER: Peer(uid)}
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def parse(self, data: bytes) -> None:
        """Count what comes before the end of the headers: httptools itself has no bound."""
        if self._in_head or self.scope is None:
            self._head_bytes += len(data)
            if self._head_bytes > self.bounds.head_bytes + len(data):
                self._refuse(b"431 Request Header Fields Too Large")
                return
        super().parse(data)
        # Most often they come in one piece, and need no clock.
        if self._in_head and self._head_timer is None:
            self._expect_head()

    def on_message_begin(self) -> None:
        """The clock for the headers starts with their first byte, or with the connection."""
        super().on_message_begin()
        if not self._in_head:
            self._in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        self.complete()
        super().on_headers_complete()
        if self.cycle is not None:
            if self.is_leaving:
                self.cycle.keep_alive = False
            self.cycle.transport = InOnePiece(self.transport, self.loop)  # type: ignore[assignment]

    def shutdown(self) -> None:
        """End with the answer under way; without one soon, for a request may be on its way."""
        if self._is_idle():
            self.loop.call_later(_LAST_S, self._close_idle)
        else:
            super().shutdown()

    def _close_idle(self) -> None:
        sock = self.transport.get_extra_info("socket")
        if self._is_idle() and not self.transport.is_closing() and not is_readable(sock):
            self.transport.close()

    def _is_idle(self) -> bool:
        answered = self.cycle is None or self.cycle.response_complete
        return answered and not self.is_behind

    def on_response_complete(self) -> None:
        """Read no further requests while there are some that wait for their turn."""
        super().on_response_complete()
        if self.pipeline:
            self.flow.pause_reading()

    def handle_websocket_upgrade(self) -> None:
        """Another protocol takes over, with nothing left to parse here."""
        self.drop_pending()
        super().handle_websocket_upgrade()

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self.bounds.head_s, self._too_slow)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        self._refuse(b"408 Request Timeout")

    def _refuse(self, status: bytes) -> None:
        self._stop_timer()
        self.logger.warning("refused a connection: %s", status.decode())
        self.transport.write(
            b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        )
        self.transport.close()


class RingfenceWebSocket(InSlices, WebSocketsSansIOProtocol):
    """WebSocket connection with the same peer check and bounds."""

    def parse(self, data: bytes) -> None:
        """Refuse a head that HTTP allows and WebSockets do not, such as a long line: uvicorn says nothing."""
        super().parse(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            self.logger.warning("refused a WebSocket: %s", self.conn.handshake_exc.__cause__)
            self.transport.write(
                b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            )
            self.transport.close()

    def handle_cont(self, event: Frame) -> None:
        """Frames without content do not make a message longer, and each takes memory."""
        if len(self.frames) >= _MOST_FRAMES:
            self.conn.fail(CloseCode.MESSAGE_TOO_BIG, f"over {_MOST_FRAMES} frames")
            self.handle_parser_exception()
            return
        super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        """Pass a whole message on."""
        self.complete()
        super().send_receive_event_to_app()


class InOnePiece:
    """The transport of one answer: its head waits for what follows it at once, and leaves with it.

    Sent for itself the head would wake the client, who then has to wait once more.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._head: bytes | None = None
        self._flushing: asyncio.Handle | None = None

    def write(self, data: bytes) -> None:
        """Send it, with the head if that still waits. Nothing waits longer than for the loop's next turn."""
        if self._head is None:
            self._head = data
            self._flushing = self._loop.call_soon(self._flush)
        elif self._flushing is not None and len(data) < _SMALL:
            self._flushing.cancel()
            self._flushing = None
            self._transport.write(self._head + data)
        else:
            self._flush()
            self._transport.write(data)

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
            self._transport.write(self._head or b"")

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        """Return whether the transport accepts no more writes."""
        return self._transport.is_closing()


def peer_uid(sock: socket.socket) -> int:
    """The uid at the other end of a unix socket. Source: unix(7), SO_PEERCRED."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])
