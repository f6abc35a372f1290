"""Pass a request on to a node, and its answer back, in pieces."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import websockets
from starlette.requests import ClientDisconnect
from starlette.websockets import WebSocketDisconnect
from websockets.asyncio.client import connect, unix_connect

from ..api.access import gateways
from ..api.access.permissions import NOTHING
from ..errors import ServerUnreachable
from .upstream import HOP_BY_HOP, Answer, Pool, host_of, without

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from starlette.types import Receive, Scope, Send

    from ..api.access.caller import Caller
    from .upstream import Headers

# The gateway has read the key, and looked at host and origin; what comes here is for the node alone.
_NOT_FORWARDED = HOP_BY_HOP | frozenset(
    (
        *(b"authorization", b"x-api-key", b"origin", b"sec-fetch-site", b"x-request-id", b"expect"),
        *(gateways.HEADER.encode(), b"content-length"),
    )
)
# Both write these; the gateway's are what the client sees.
_NOT_RETURNED = HOP_BY_HOP | frozenset(
    (b"x-request-id", b"x-content-type-options", b"date", gateways.MADE.encode())
)
_OF_A_HANDSHAKE = b"sec-websocket-"
_MOST_MESSAGE = 16 << 20
_MOST_DENIAL = 1 << 20


@dataclass
class Inbound:
    """A request that came to the gateway, or a WebSocket.

    Attributes:
        body: If it was read already; else it is passed on as it comes.
        withheld: Header fields that no node gets.
        dropped: Header fields of a node's answer that the client does not get.
    """

    scope: Scope
    receive: Receive
    send: Send
    body: bytes | None = None
    withheld: frozenset[bytes] = _NOT_FORWARDED
    dropped: frozenset[bytes] = _NOT_RETURNED

    @property
    def caller(self) -> Caller:
        found: Caller = self.scope["state"]["caller"]
        return found

    @caller.setter
    def caller(self, caller: Caller) -> None:
        self.scope["state"]["caller"] = caller

    def header(self, name: bytes) -> str:
        """The value of a header field; empty without."""
        found: bytes = next((value for key, value in self.scope["headers"] if key == name), b"")
        return found.decode("latin-1")

    @property
    def is_chunked(self) -> bool:
        """Return whether the length of the body is not announced."""
        return any(name == b"transfer-encoding" for name, _ in self.scope["headers"])


class Proxy:
    """Sends requests to nodes with the caller's name under the cluster's seal."""

    def __init__(self, pool: Pool, secret: bytes) -> None:
        self.pool, self._secret = pool, secret

    def headers(
        self, caller: Caller, method: str, target: bytes, request_id: str, given: Headers
    ) -> Headers:
        """The headers of a request of the gateway's own to a node."""
        kept = without(given, _NOT_FORWARDED)
        return [*self._seal(caller, method, target, request_id), (b"host", b"localhost"), *kept]

    def _seal(self, caller: Caller, method: str, target: bytes, request_id: str) -> Headers:
        """The header fields of the seal. They come first: whatever follows, the connection is a gateway's."""
        sealed = gateways.seal(self._secret, caller, method, target)
        own = [(gateways.HEADER.encode(), sealed)]
        return [*own, (b"x-request-id", request_id.encode())] if request_id else own

    def _headers(self, inbound: Inbound, method: str, caller: Caller) -> Headers:
        kept = without(inbound.scope["headers"], inbound.withheld)
        if not any(name == b"host" for name, _ in kept):
            kept.append((b"host", b"localhost"))
        request_id = inbound.scope["state"].get("request_id", "")
        return self._seal(caller, method, target_of(inbound.scope), request_id) + kept

    async def pass_on(self, address: str, inbound: Inbound) -> None:
        """Pass a request on, and the answer back.

        Raises:
            NotSent: The node has not seen it; nothing of the body was read.
            ServerUnreachable: The node went away before it answered.
            ClientDisconnect: The client did.
        """
        found = inbound.scope["state"].get("found")
        if found is not None and found.rule.body == NOTHING:
            inbound.body = b""  # the middleware has read it: `{}` at most
        answer = await self.begin(address, inbound, inbound.caller)
        feeding = asyncio.ensure_future(_feed(answer, inbound))
        relaying = asyncio.ensure_future(_relay(answer, inbound))
        try:
            await asyncio.wait((feeding, relaying), return_when=asyncio.FIRST_COMPLETED)
            if feeding.done() and not relaying.done():
                feeding.result()  # what is wrong with the body is the caller's answer
                await relaying
            relaying.result()
        finally:
            for task in (feeding, relaying):
                if not task.done():
                    task.cancel()
            answer.abort()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await asyncio.gather(feeding, relaying)

    async def begin(self, address: str, inbound: Inbound, caller: Caller) -> Answer:
        """Send the head of a request, and the body if it is there.

        Args:
            caller: Whom the node serves it for.
        """
        scope, body = inbound.scope, inbound.body
        method = scope["method"]
        headers = self._headers(inbound, method, caller)
        if body is None:
            length = inbound.header(b"content-length")
            if inbound.is_chunked:
                headers.append((b"transfer-encoding", b"chunked"))
            elif length:
                headers.append((b"content-length", length.encode()))
            else:
                body = b""
        target = target_of(scope)
        answer = await self.pool.open(address, method.encode(), target, headers, body)
        if body is None:
            answer.is_sent = False
            answer.connection.hold_open()
        return answer

    async def pass_socket(self, address: str, inbound: Inbound) -> None:
        """Connect a WebSocket through to a node.

        Raises:
            ServerUnreachable: The node does not answer.
        """
        scope = inbound.scope
        every = self._headers(inbound, "WS", inbound.caller)
        headers = [each for each in every if not each[0].startswith(_OF_A_HANDSHAKE)]
        more = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in headers if k != b"host"]
        host = next(value for name, value in headers if name == b"host").decode("latin-1")
        options: dict[str, Any] = {
            "additional_headers": more,
            "subprotocols": scope.get("subprotocols") or None,
            "compression": None,
            "max_size": _MOST_MESSAGE,
            "ping_interval": None,
            "user_agent_header": None,
            "proxy": None,
        }
        is_near = address.startswith("unix:")
        # The host in it is what the node reads as the request's; the connection goes to `address`.
        uri = f"{'ws' if is_near else 'wss'}://{host}" + target_of(scope).decode("latin-1")
        try:
            if is_near:
                channel = await unix_connect(address.removeprefix("unix:"), uri, **options)
            else:
                at, port = host_of(address)
                tls = self.pool.tls
                channel = await connect(uri, host=at, port=port, ssl=tls, **options)
        except websockets.InvalidStatus as exc:
            await _deny(exc.response, inbound)
            return
        except (OSError, TimeoutError, websockets.InvalidHandshake) as exc:
            raise ServerUnreachable(f"the node does not answer: {exc}") from exc
        try:
            await _through(channel, inbound)
        finally:
            await channel.close()


def target_of(scope: Scope) -> bytes:
    """Path and query as the client wrote them."""
    query: bytes = scope["query_string"]
    path: bytes = scope["raw_path"]
    return path + (b"?" + query if query else b"")


def note_made(scope: Scope, headers: Headers) -> None:
    """Take the id of what a node has made, for the audit log."""
    made = next((value for name, value in headers if name == gateways.MADE.encode()), None)
    if made is not None:
        scope["state"]["made"] = made.decode("latin-1")


async def send_whole(inbound: Inbound, status: int, headers: Headers, content: bytes) -> None:
    kept = without(headers, inbound.dropped)
    await inbound.send({"type": "http.response.start", "status": status, "headers": kept})
    await inbound.send({"type": "http.response.body", "body": content})


async def _feed(answer: Answer, inbound: Inbound) -> None:
    """Pass the body on; then wait for the client to leave, and let the node know."""
    chunked = inbound.is_chunked
    is_open = inbound.body is None and (chunked or bool(inbound.header(b"content-length")))
    connection = answer.connection
    while True:
        message = await inbound.receive()
        if message["type"] != "http.request":
            answer.abort()
            return
        if not is_open:
            continue
        piece = message.get("body", b"")
        if piece:
            await connection.send(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
        if not message.get("more_body", False):
            is_open = False
            if chunked:
                await connection.send(b"0\r\n\r\n")
            answer.is_sent = True
            connection.sent()


async def _relay(answer: Answer, inbound: Inbound) -> None:
    try:
        await answer.head()
    except ServerUnreachable:
        if answer.is_aborted:
            raise ClientDisconnect from None
        raise
    note_made(inbound.scope, answer.headers)
    send, headers = inbound.send, without(answer.headers, inbound.dropped)
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    try:
        if answer.is_over:
            await send({"type": "http.response.body", "body": answer.taken()})
            return
        async for piece in answer.pieces():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    except ServerUnreachable:
        return  # without its last message the server closes the connection: it is not whole
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _deny(response: Any, inbound: Inbound) -> None:
    headers = [(k.lower().encode(), v.encode("latin-1")) for k, v in response.headers.raw_items()]
    kept = without(headers, inbound.dropped | {b"content-length"})
    await inbound.receive()  # the client's `connect`
    status, send = response.status_code, inbound.send
    await send({"type": "websocket.http.response.start", "status": status, "headers": kept})
    body = bytes(response.body or b"")[:_MOST_DENIAL]
    await send({"type": "websocket.http.response.body", "body": body})


async def _through(channel: Any, inbound: Inbound) -> None:
    """Carry messages both ways until one side closes."""
    receive, send = inbound.receive, inbound.send
    await receive()  # the client's `connect`
    names = [
        (k.lower().encode(), v.encode("latin-1"))
        for k, v in channel.response.headers.raw_items()
        if not k.lower().startswith(("sec-websocket-", "upgrade", "connection"))
    ]
    await send(
        {
            "type": "websocket.accept",
            "subprotocol": channel.subprotocol,
            "headers": without(names, inbound.dropped),
        }
    )
    inward = asyncio.ensure_future(_inward(channel, receive))
    outward = asyncio.ensure_future(_outward(channel, send))
    try:
        await asyncio.wait((inward, outward), return_when=asyncio.FIRST_COMPLETED)
        if inward.done() and not outward.done():
            await channel.close(*inward.result())
        elif outward.done():
            outward.result()
    finally:
        for each in (inward, outward):
            each.cancel()
        await asyncio.gather(inward, outward, return_exceptions=True)


async def _inward(channel: Any, receive: Receive) -> tuple[int, str]:
    """Carry the client's messages; return how it closed."""
    while True:
        message = await receive()
        if message["type"] == "websocket.disconnect":
            code = message.get("code") or 1000
            # 1005 and 1006 say that there was no code; they are never sent.
            return (1000 if code in (1005, 1006) else code), message.get("reason") or ""
        data = message.get("bytes")
        with contextlib.suppress(websockets.ConnectionClosed):
            await channel.send(data if data is not None else message.get("text", ""))


async def _outward(channel: Any, send: Send) -> None:
    """Carry the node's messages, and its close."""
    try:
        while True:
            data = await channel.recv()
            kind = "text" if isinstance(data, str) else "bytes"
            await send({"type": "websocket.send", kind: data})
    except websockets.ConnectionClosed as exc:
        close = exc.rcvd
        code, reason = (close.code, close.reason) if close else (1011, "the node went away")
        code = 1000 if code == 1005 else code
        with contextlib.suppress(RuntimeError, WebSocketDisconnect):
            await send({"type": "websocket.close", "code": code, "reason": reason})


__all__ = ["Inbound", "Proxy", "note_made", "send_whole", "target_of"]
