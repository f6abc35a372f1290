"""Proxy for one HTTP request to a server inside a sandbox.

Neither side is trusted. The client's credentials stay here; the response is shown with an opaque
origin, since it comes from the API's own address.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import h11
from starlette.requests import ClientDisconnect

from ...errors import ConnectError, RingfenceError, TimeoutExceeded
from .breaking import BrokenOff

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    import ssl

    from ..loop_share import LoopShare

Fields = list[tuple[bytes, bytes]]

_PIECE = 1 << 16
_HEAD_BYTES = 32 << 10  # of one head, one chunk's extensions or the trailers
_MOST_INTERIM = 8  # heads before the one that counts, as `103 Early Hints` is
_JOINED = 1 << 14  # bytes of small chunks
_TURN_S = 0.001  # of parsing, before others have their turn
_ANSWER_S = 300.0
_HOP = frozenset(
    b"connection keep-alive proxy-connection te trailer transfer-encoding upgrade".split()
)
"""Of one connection only: RFC 9110 7.6.1."""
_OURS = _HOP | frozenset(
    b"host authorization proxy-authorization x-api-key cookie origin referer expect".split()
)
_OF_THE_ORIGIN = _HOP | frozenset(
    b"set-cookie clear-site-data strict-transport-security alt-svc nel report-to reporting-endpoints"
    b" service-worker-allowed content-security-policy content-security-policy-report-only"
    b" referrer-policy x-content-type-options date server".split()
)
_PLACES = (b"location", b"content-location")
_PAGE: Fields = [
    # Without allow-same-origin a page has an origin of its own: it can read and call nothing of ours.
    (b"content-security-policy", b"sandbox allow-scripts allow-forms allow-popups allow-modals"),
    (b"referrer-policy", b"no-referrer"),
]


@dataclass(frozen=True)
class Answer:
    """Response of the server inside; `body` closes its connection at the end."""

    status: int
    fields: Fields
    body: AsyncIterator[bytes]


async def ask(
    inside: socket.socket,
    port: int,
    method: str,
    target: bytes,
    fields: Fields,
    body: AsyncIterator[bytes],
    prefix: bytes,
    share: LoopShare,
    gone: Callable[[], Awaitable[object]],
    *,
    withheld: frozenset[bytes] | None = None,
    tls: ssl.SSLContext | None = None,
) -> Answer:
    """Pass a request on; `inside` is ours from then on, and for the client all is below `prefix`.

    Args:
        withheld: Where the sandbox has an origin of its own: header fields that it is not shown. All
            others pass both ways, cookies too, and `prefix` is not used.
        tls: Where the server inside speaks HTTPS: the context for it.
        share: What reading the answer may take of the event loop's time.
        gone: Awaited after the body: returns when the client has gone away.

    Raises:
        ConnectError: What is there does not speak HTTP.
        TimeoutExceeded: It does not answer.
    """
    inside.setblocking(False)
    try:
        reader, writer = await asyncio.open_connection(
            sock=inside, ssl=tls, server_hostname="localhost" if tls else None
        )
    except OSError as exc:
        raise ConnectError(f"port {port} does not speak HTTPS: {exc}", field="port") from exc
    exchange = _Exchange(reader, writer, share)
    try:
        asked = request_fields(fields, port, withheld)
        exchange.begin(method, target, asked, body, gone)
        async with asyncio.timeout(_ANSWER_S):
            head = await exchange.head()
    except BaseException as exc:
        exchange.close()
        if isinstance(exc, TimeoutError):
            raise TimeoutExceeded(f"port {port} did not answer", field="port") from exc
        if isinstance(exc, (h11.ProtocolError, OSError)):
            raise ConnectError(f"port {port} does not speak HTTP: {exc}", field="port") from exc
        raise
    fields = list(head.headers)
    if withheld is None:
        fields = answer_fields(fields, port, prefix)
    else:
        fields = [(name, value) for name, value in fields if name not in _HOP]
    return Answer(head.status_code, fields, exchange.body())


def request_fields(fields: Fields, port: int, withheld: frozenset[bytes] | None = None) -> Fields:
    """Return the client's header fields without those that the sandbox must not see."""
    hidden = _OURS if withheld is None else _HOP | withheld
    kept = [(name, value) for name, value in fields if name.lower() not in hidden]
    framed = any(name.lower() == b"transfer-encoding" for name, _ in fields)
    if framed:
        kept = [(name, value) for name, value in kept if name.lower() != b"content-length"]
        kept.append((b"transfer-encoding", b"chunked"))
    host = [(b"host", b"localhost:%d" % port)] if withheld is None else []
    return [*host, *kept, (b"connection", b"close")]


def answer_fields(fields: Fields, port: int, prefix: bytes) -> Fields:
    """Return the response header fields safe for a client, locations on that port rewritten below `prefix`."""
    kept = [
        (name, located(value, port, prefix) if name in _PLACES else value)
        for name, value in fields
        if name not in _OF_THE_ORIGIN and not name.startswith(b"access-control-")
    ]
    return kept + _PAGE


def located(place: bytes, port: int, prefix: bytes) -> bytes:
    """A `Location` as the client can reach it; one that is elsewhere stays as it is."""
    for host in (b"localhost", b"127.0.0.1", b"[::1]"):
        origin = b"http://%s:%d" % (host, port)
        rest = place[len(origin) :]
        if place.startswith(origin) and rest[:1] in (b"", b"/", b"?"):
            return prefix + rest
    return prefix + place if place[:1] == b"/" != place[1:2] else place


class _Exchange:
    """A connection with one request and one response."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, share: LoopShare
    ) -> None:
        self._reader, self._writer, self._share = reader, writer, share
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)
        self._sending: asyncio.Future[None] | None = None

    def begin(
        self,
        method: str,
        target: bytes,
        fields: Fields,
        body: AsyncIterator[bytes],
        gone: Callable[[], Awaitable[object]],
    ) -> None:
        """Send a request. A server may answer before it has read all, and wait for us to read."""
        request = h11.Request(method=method, target=target, headers=fields)
        self._writer.write(self._http.send(request) or b"")
        self._sending = asyncio.ensure_future(self._send(body, gone))

    async def _send(
        self, body: AsyncIterator[bytes], gone: Callable[[], Awaitable[object]]
    ) -> None:
        """Send the body; then wait for the client to go, with whom all of this ends."""
        try:
            async for piece in body:
                if piece:
                    self._writer.write(self._http.send(h11.Data(data=piece)) or b"")
                    await self._writer.drain()
            self._writer.write(self._http.send(h11.EndOfMessage()) or b"")
            await self._writer.drain()
            await gone()
        except (OSError, RingfenceError, ClientDisconnect, h11.LocalProtocolError):
            pass
        self._writer.transport.abort()  # half a request is none: the server inside is to notice

    async def head(self) -> h11.Response:
        for _ in range(_MOST_INTERIM + 1):
            await self._share.take(_TURN_S)
            while (event := self._http.next_event()) is h11.NEED_DATA:
                await self._receive()
            if isinstance(event, h11.Response):
                if not 200 <= event.status_code <= 599:
                    raise h11.RemoteProtocolError(f"status {event.status_code}")
                return event
            if not isinstance(event, h11.InformationalResponse):
                raise h11.RemoteProtocolError("no answer")
        raise h11.RemoteProtocolError(f"over {_MOST_INTERIM} interim answers")

    async def body(self) -> AsyncIterator[bytes]:
        """The answer's body. One that breaks off breaks off for the client as well."""
        try:
            pieces = bytearray()
            while True:
                await self._share.take(_TURN_S)
                stopped_at = self._parse(pieces)
                if pieces and (stopped_at is not None or len(pieces) >= _JOINED):
                    yield bytes(pieces)
                    pieces.clear()
                if stopped_at is h11.NEED_DATA:
                    await self._receive()
                elif stopped_at is not None:
                    return
        except (h11.RemoteProtocolError, OSError) as exc:
            raise BrokenOff(str(exc)) from exc
        finally:
            self.close()

    def _parse(self, pieces: bytearray) -> object:
        """Join chunks that are there; which event came after them, None where there are more of them."""
        began, stopped_at = time.monotonic(), None
        while stopped_at is None and time.monotonic() < began + _TURN_S:
            event = self._http.next_event()
            if isinstance(event, h11.Data):
                pieces += event.data
            else:
                stopped_at = event
        self._share.charge(time.monotonic() - began - _TURN_S)
        return stopped_at

    async def _receive(self) -> None:
        self._http.receive_data(await self._reader.read(_PIECE))

    def close(self) -> None:
        """Whatever is still under way."""
        if self._sending is not None:
            self._sending.cancel()
        self._writer.close()
