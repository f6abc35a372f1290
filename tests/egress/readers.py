"""Two readers that know nothing of ours: h11, and the standard library's server and client."""

from __future__ import annotations

import http.client
import http.server
import io
from dataclasses import dataclass
from typing import Any

import h11


@dataclass(frozen=True)
class Reading:
    """What one reader makes of a stream of requests' beginning."""

    method: str
    target: str
    fields: tuple[tuple[str, str], ...]  # names in lower case
    body: bytes
    rest: bytes


def by_h11(data: bytes) -> Reading:
    """Raises h11.RemoteProtocolError for what h11 refuses."""
    server = h11.Connection(h11.SERVER)
    server.receive_data(data)
    request = server.next_event()
    assert isinstance(request, h11.Request), f"not a whole head: {request!r}"
    body = b""
    while isinstance(event := server.next_event(), h11.Data):
        body += event.data
    assert isinstance(event, h11.EndOfMessage), f"not a whole body: {event!r}"
    fields = tuple((n.decode(), v.decode("latin-1")) for n, v in request.headers)
    return Reading(
        request.method.decode(), request.target.decode(), fields, body, server.trailing_data[0]
    )


class _Handler(http.server.BaseHTTPRequestHandler):
    """Parses one request out of bytes, and answers nobody."""

    def __init__(self, data: bytes) -> None:
        self.rfile = io.BytesIO(data)
        self.wfile = io.BytesIO()
        self.client_address = ("", 0)
        self.refusal = ""
        self.close_connection = False
        self.raw_requestline = self.rfile.readline(65537)
        self.understood = self.parse_request()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        self.refusal = f"{code} {message}"

    def log_message(self, format: str, *args: Any) -> None:
        pass


def by_the_standard_library(data: bytes) -> Reading:
    """http.server for the head; http.client for chunks, as the server leaves bodies to others."""
    handler = _Handler(data)
    assert handler.understood, handler.refusal
    fields = tuple((name.lower(), value) for name, value in handler.headers.items())
    left = handler.rfile.read()
    if handler.headers.get("transfer-encoding"):
        body, rest = _chunks(left)
    else:
        length = int(handler.headers.get("content-length", "0"))
        body, rest = left[:length], left[length:]
        assert len(body) == length
    return Reading(handler.command, handler.path, fields, body, rest)


class _Stream:
    def __init__(self, data: bytes) -> None:
        self.file = io.BytesIO(data)
        self.file.close = lambda: None  # type: ignore[method-assign]  # what is left is looked at

    def makefile(self, _mode: str) -> io.BytesIO:
        return self.file


def _chunks(data: bytes) -> tuple[bytes, bytes]:
    stream = _Stream(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + data)
    response = http.client.HTTPResponse(stream)  # type: ignore[arg-type]
    response.begin()
    body = response.read()
    return body, stream.file.read()
