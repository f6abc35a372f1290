"""One HTTP request on its way to a server inside a sandbox, and the answer on its way back.

Neither side is believed. What the client has to identify itself with stays here; what the sandbox
answers is shown as a page of nobody's, since it comes from the address that the API has.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import h11

from ..errors import ConnectError, RingfenceError, TimeoutExceeded
from .breaking import BrokenOff

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

Fields = list[tuple[bytes, bytes]]

_PIECE = 1 << 16
_HEAD_BYTES = 64 << 10
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
    """What the server inside says; `body` ends its connection."""

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
) -> Answer:
    """Pass a request on; `inside` is ours from then on, and for the client all is below `prefix`.

    Raises:
        ConnectError: What is there does not speak HTTP.
        TimeoutExceeded: It does not answer.
    """
    inside.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=inside)
    exchange = _Exchange(reader, writer)
    try:
        exchange.begin(method, target, request_fields(fields, port), body)
        async with asyncio.timeout(_ANSWER_S):
            head = await exchange.head()
    except BaseException as exc:
        exchange.close()
        if isinstance(exc, TimeoutError):
            raise TimeoutExceeded(f"port {port} did not answer", field="port") from exc
        if isinstance(exc, (h11.ProtocolError, OSError)):
            raise ConnectError(f"port {port} does not speak HTTP: {exc}", field="port") from exc
        raise
    fields = answer_fields(list(head.headers), port, prefix)
    return Answer(head.status_code, fields, exchange.body())


def request_fields(fields: Fields, port: int) -> Fields:
    """What of a client's header the sandbox may know."""
    kept = [(name, value) for name, value in fields if name.lower() not in _OURS]
    framed = any(name.lower() == b"transfer-encoding" for name, _ in fields)
    if framed:
        kept = [(name, value) for name, value in kept if name.lower() != b"content-length"]
        kept.append((b"transfer-encoding", b"chunked"))
    return [(b"host", b"localhost:%d" % port), *kept, (b"connection", b"close")]


def answer_fields(fields: Fields, port: int, prefix: bytes) -> Fields:
    """What of a sandbox's header a client may be told; places on that port are below `prefix` for it."""
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
    """One connection, one request, one answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)
        self._sending: asyncio.Future[None] | None = None

    def begin(self, method: str, target: bytes, fields: Fields, body: AsyncIterator[bytes]) -> None:
        """Send a request. A server may answer before it has read all, and wait for us to read."""
        request = h11.Request(method=method, target=target, headers=fields)
        self._writer.write(self._http.send(request) or b"")
        self._sending = asyncio.ensure_future(self._send(body))

    async def _send(self, body: AsyncIterator[bytes]) -> None:
        try:
            async for piece in body:
                if piece:
                    self._writer.write(self._http.send(h11.Data(data=piece)) or b"")
                    await self._writer.drain()
            self._writer.write(self._http.send(h11.EndOfMessage()) or b"")
            await self._writer.drain()
        except (OSError, RingfenceError, h11.LocalProtocolError):
            self._writer.close()  # half a request is none: the server inside is to notice

    async def head(self) -> h11.Response:
        while True:
            event = await self._next()
            if isinstance(event, h11.Response):
                if not 200 <= event.status_code <= 599:
                    raise h11.RemoteProtocolError(f"status {event.status_code}")
                return event
            if not isinstance(event, h11.InformationalResponse):
                raise h11.RemoteProtocolError("no answer")

    async def body(self) -> AsyncIterator[bytes]:
        """The answer's body. One that breaks off breaks off for the client as well."""
        try:
            while isinstance(event := await self._next(), h11.Data):
                yield bytes(event.data)
        except (h11.RemoteProtocolError, OSError) as exc:
            raise BrokenOff(str(exc)) from exc
        finally:
            self.close()

    def close(self) -> None:
        """Whatever is still under way."""
        if self._sending is not None:
            self._sending.cancel()
        self._writer.close()

    async def _next(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(_PIECE))
        return event
