"""The world's HTTP server: as lenient as servers are, so that what is smuggled past a proxy works here.

It takes bare line feeds, folded headers, both lengths at once (chunked wins) and pipelined requests,
and records every request that it understood.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from .record import Record

_MOST_BODY = 1 << 20  # what is kept of a body; its length and hash are of all of it
PIECE = bytes(1 << 18)


@dataclass
class Request:
    method: str
    target: str
    version: str
    headers: list[tuple[str, str]]
    body: bytes = b""
    body_bytes: int = 0
    facts: dict[str, Any] = field(default_factory=dict)

    def header(self, name: str) -> str:
        """The last value, as a lenient server has it."""
        return next((v for n, v in reversed(self.headers) if n.lower() == name), "")

    @property
    def host(self) -> str:
        return self.header("host").rpartition("]")[2].partition(":")[0] or self.header("host")

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]


@dataclass
class Answer:
    status: int = 200
    body: bytes = b""
    kind: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    stream_bytes: int | None = None
    """Zeros of this length instead of `body`."""


Site = Callable[[Request], Awaitable[Answer]]


class Server:
    """Sites by the host that a request names, and one for every other host.

    Args:
        name: Told in records and answers: which server it was that was reached.
    """

    def __init__(self, name: str, record: Record, sites: dict[str, Site] | None = None) -> None:
        self.name, self.record, self._sites = name, record, sites or {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        facts = connection_facts(writer)
        opened = self.record.add("connection", server=self.name, **facts)
        # Its requests tell which connection they came by.
        facts["connection"] = opened["connection"] = opened["number"]
        try:
            while request := await _read_request(reader, writer):
                request.facts = facts
                self._note(request)
                if "upgrade" in request.header("connection").lower():
                    await _upgrade(request, reader, writer)
                    break
                site = self._sites.get(request.host.lower(), self._default)
                await _send(writer, await site(request), request)
                if "close" in request.header("connection").lower() or "HTTP/1.0" == request.version:
                    break
        except (asyncio.IncompleteReadError, ConnectionError, ValueError, ssl.SSLError):
            pass  # a client that went away, or nonsense
        finally:
            with contextlib.suppress(Exception):
                writer.close()

    def _note(self, request: Request) -> None:
        self.record.add(
            "request",
            server=self.name,
            method=request.method,
            target=request.target,
            host=request.header("host"),
            headers=request.headers,
            body=request.body.decode("latin-1"),
            body_bytes=request.body_bytes,
            **request.facts,
        )

    async def _default(self, request: Request) -> Answer:
        """The request itself, but for what the path asks: see README.md."""
        _, verb, *rest = request.path.split("/")
        if "bytes" == verb:
            return Answer(kind="application/octet-stream", stream_bytes=int(rest[0]))
        if "status" == verb:
            return Answer(int(rest[0]))
        if "redirect" == verb:
            return Answer(302, headers={"Location": request.target.partition("?to=")[2]})
        if "slow" == verb:
            await asyncio.sleep(float(rest[0]))
        seen = {
            "server": self.name,
            "method": request.method,
            "target": request.target,
            "host": request.header("host"),
            "headers": request.headers,
            "body_bytes": request.body_bytes,
            "body_sha256": request.facts.get("body_sha256", ""),
            **request.facts,
        }
        return Answer(body=json.dumps(seen).encode() + b"\n")


def connection_facts(writer: asyncio.StreamWriter) -> dict[str, Any]:
    """Who reached what: both addresses, and the name in the TLS handshake."""
    secured = writer.get_extra_info("ssl_object")
    local, peer = writer.get_extra_info("sockname"), writer.get_extra_info("peername")
    return {
        "address": local[0].removeprefix("::ffff:"),
        "port": local[1],
        "peer": peer[0].removeprefix("::ffff:") if peer else "",
        "tls": secured is not None,
        "sni": getattr(secured, "name_asked_for", None),
    }


def tls_context(certificates: dict[str, str]) -> ssl.SSLContext:
    """A server's context that picks the certificate by name; "" is everybody else's."""
    contexts = {name: _context(path) for name, path in certificates.items()}

    def choose(secured: ssl.SSLObject, name: str | None, _own: ssl.SSLContext) -> None:
        secured.name_asked_for = name  # type: ignore[attr-defined]
        if name in contexts:
            secured.context = contexts[name]

    contexts[""].sni_callback = choose
    return contexts[""]


def _context(path: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    context.set_alpn_protocols(["http/1.1"])
    return context


async def _read_request(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> Request | None:
    first = await reader.readline()
    while first in (b"\r\n", b"\n"):
        first = await reader.readline()
    if not first.endswith(b"\n"):
        return None
    method, target, version = first.decode("latin-1").split(None, 2)
    request = Request(method, target, version.strip(), [])
    while (line := await reader.readline()).strip():
        text = line.decode("latin-1").rstrip("\r\n")
        if text[0] in " \t" and request.headers:
            name, value = request.headers.pop()
            request.headers.append((name, f"{value} {text.strip()}"))
            continue
        name, _, value = text.partition(":")
        request.headers.append((name.strip(), value.strip()))
    if "100-continue" == request.header("expect").lower():
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    digest = hashlib.sha256()
    async for piece in _body(request, reader):
        digest.update(piece)
        request.body_bytes += len(piece)
        request.body += piece[: max(0, _MOST_BODY - len(request.body))]
    return request


async def _body(request: Request, reader: asyncio.StreamReader) -> Any:
    if "chunked" in request.header("transfer-encoding").lower():
        while size := int((await reader.readline()).partition(b";")[0].strip() or b"0", 16):
            yield await reader.readexactly(size)
            await reader.readline()
        while (await reader.readline()).strip():
            pass  # trailers
        return
    left = int(request.header("content-length") or 0)
    while left:
        piece = await reader.read(min(left, 1 << 18))
        if not piece:
            raise ConnectionError
        left -= len(piece)
        yield piece


async def _send(writer: asyncio.StreamWriter, answer: Answer, request: Request) -> None:
    length = len(answer.body) if answer.stream_bytes is None else answer.stream_bytes
    lines = [
        f"HTTP/1.1 {answer.status} Said",
        f"Content-Type: {answer.kind}",
        f"Content-Length: {length}",
        *(f"{name}: {value}" for name, value in answer.headers.items()),
    ]
    writer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n")
    if "HEAD" != request.method:
        writer.write(answer.body)
        left = answer.stream_bytes or 0
        while left:
            writer.write(PIECE[:left])
            left -= min(left, len(PIECE))
            await writer.drain()
    await writer.drain()


async def _upgrade(
    request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Switch protocols; from then on every byte comes back as it is."""
    guid = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3
    key = hashlib.sha1((request.header("sec-websocket-key") + guid).encode()).digest()
    writer.write(
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Accept: " + base64.b64encode(key) + b"\r\n\r\n"
    )
    while piece := await reader.read(1 << 16):
        writer.write(piece)
        await writer.drain()
