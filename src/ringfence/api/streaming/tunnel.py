"""WebSockets whose other end is a server inside a sandbox: its bytes, or its own WebSocket."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as connect_websocket
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.frames import DATA_OPCODES, CloseCode, Frame
from websockets.protocol import Event
from websockets.typing import Subprotocol

from ...errors import ConnectError
from ..loop_share import InSlices, LoopShare

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Coroutine, Iterable

_PIECE = 256 << 10
_MOST_MESSAGE = 1 << 20
_MOST_WAITING = 4  # frames from inside, each of up to a message
_MOST_FRAMES = 1024  # of one message
_OPEN_S, _CLOSE_S = 30.0, 1.0
_NORMAL, _BROKEN = 1000, 1011  # RFC 6455 7.4.1
_EOF = "eof"


async def first_of(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all until one is over, and end the others."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    ignored = (WebSocketDisconnect, ConnectionClosed, OSError)
    for end in ends:
        if isinstance(end, Exception) and not isinstance(end, ignored):
            raise end


# -- bytes -----------------------------------------------------------------------------------------


async def carry_bytes(outside: WebSocket, inside: socket.socket, share: LoopShare) -> None:
    """Join an accepted WebSocket with a connection: binary messages are its bytes.

    The text `eof` says that the client sends no more; the server's end closes the WebSocket.
    """
    inside.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=inside)

    async def inward() -> None:
        while (message := await outside.receive())["type"] != "websocket.disconnect":
            await share.take()
            if writer.is_closing():  # the server inside is gone; uvloop raises RuntimeError then
                return
            if data := message.get("bytes"):
                writer.write(data)
                await writer.drain()
            elif message.get("text") == _EOF:
                writer.write_eof()

    async def outward() -> None:
        while data := await reader.read(_PIECE):
            await share.take()
            await outside.send_bytes(data)
        await outside.close(_NORMAL)

    try:
        await first_of(inward(), outward())
    finally:
        writer.close()


# -- WebSockets ------------------------------------------------------------------------------------


async def open_websocket(
    inside: socket.socket,
    port: int,
    target: str,
    subprotocols: list[str],
    share: LoopShare,
    *,
    host: str = "",
    fields: Iterable[tuple[str, str]] = (),
    tls: ssl.SSLContext | None = None,
) -> ClientConnection:
    """A WebSocket to the server inside.

    Args:
        host: What the field `Host` says; empty for `localhost:PORT`.
        fields: Further header fields of the request that opens it.
        tls: Where the server inside speaks HTTPS: the context for it.

    Raises:
        ConnectError: It refuses, or does not speak WebSocket.
    """
    inside.setblocking(False)
    try:
        return await connect_websocket(
            f"{'wss' if tls else 'ws'}://{host or f'localhost:{port}'}{target}",
            sock=inside,
            ssl=tls,
            additional_headers=[*fields],
            subprotocols=[Subprotocol(each) for each in subprotocols] or None,
            compression=None,
            user_agent_header=None,
            proxy=None,
            ping_interval=None,  # it is on this machine: a silent one is slow, or frozen
            open_timeout=_OPEN_S,
            close_timeout=_CLOSE_S,
            max_size=_MOST_MESSAGE,
            max_queue=_MOST_WAITING,
            create_connection=_connection(share),
        )
    except (OSError, TimeoutError, ValueError, WebSocketException) as exc:
        inside.close()
        raise ConnectError(f"port {port} opened no WebSocket: {exc}", field="port") from exc


def _connection(share: LoopShare) -> type[_Connection]:
    return type("SharedConnection", (_Connection,), {"share": share})


class _Connection(InSlices, ClientConnection):
    """A WebSocket whose other end is a guest's."""

    _frames = 0

    def process_event(self, event: Event) -> None:
        """Frames without content do not make a message longer, and each takes memory."""
        if isinstance(event, Frame) and event.opcode in DATA_OPCODES:
            self._frames = 0 if event.fin else self._frames + 1
            if self._frames > _MOST_FRAMES:
                self.protocol.fail(CloseCode.MESSAGE_TOO_BIG, f"over {_MOST_FRAMES} frames")
                self.transport.abort()
                return
            if event.fin:
                self.complete()
        super().process_event(event)


async def carry_messages(outside: WebSocket, inside: ClientConnection, share: LoopShare) -> None:
    """Join two open WebSockets: messages both ways, and the close of either."""

    async def inward() -> None:
        while (message := await outside.receive())["type"] != "websocket.disconnect":
            await share.take()
            data = message.get("bytes")
            await inside.send(message.get("text", "") if data is None else data)
        await inside.close(_sendable(message.get("code", _NORMAL)))

    async def outward() -> None:
        with suppress(ConnectionClosed):  # raised where the code says more than that it is over
            async for data in inside:
                await share.take()
                if isinstance(data, str):
                    await outside.send_text(data)
                else:
                    await outside.send_bytes(data)
        await outside.close(_sendable(inside.close_code), inside.close_reason or "")

    try:
        await first_of(inward(), outward())
    finally:
        await inside.close()


def _sendable(code: int | None) -> int:
    """A close code that may be sent: some only say what happened. Source: RFC 6455 7.4.1."""
    return code if code and (1000 <= code <= 1003 or 1007 <= code <= 4999) else _BROKEN
