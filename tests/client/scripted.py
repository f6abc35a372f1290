"""A server whose answers a test writes, over a real socket: lost ones, broken ones, and pages."""

from __future__ import annotations

import http.server
import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from ringfence.client import Client, copies
from ringfence.client._sync import contexts, files, happening, process, stream, templates, transport


@dataclass
class Request:
    """One that has come, whole."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def form(self) -> Any:
        """Its body, read as JSON."""
        return json.loads(self.body)


@dataclass
class Answer:
    """What is sent back.

    Attributes:
        length: That the headers promise; None is that of the body. Where it is more, the connection breaks off.
    """

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None


def as_json(form: Any, status: int = 200) -> Answer:
    """An answer in JSON."""
    return Answer(json.dumps(form).encode(), status, {"content-type": "application/json"})


def problem(status: int, code: str, **headers: str) -> Answer:
    """An error of the server."""
    body = json.dumps({"code": code, "detail": "so it is"}).encode()
    return Answer(body, status, {"content-type": "application/problem+json", **headers})


Script = Callable[[Request], Answer | None]


class ScriptedServer(socketserver.ThreadingUnixStreamServer):
    """Answers as `script` says; None cuts the connection without an answer.

    Attributes:
        requests: Those that came, oldest first.
    """

    daemon_threads = False  # closing it waits for them
    request_queue_size = 64

    def __init__(self, path: Path, script: Script) -> None:
        self.script, self.requests = script, list[Request]()
        super().__init__(str(path), _Handler)

    @property
    def asked(self) -> list[str]:
        """Method and last part of the path of each request."""
        return [f"{each.method} {each.path.rpartition('/')[2]}" for each in self.requests]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ScriptedServer

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        request = Request(self.command, parts.path, query, headers, self._body(headers))
        self.server.requests.append(request)
        answer = self.server.script(request)
        self.close_connection = True
        if answer is None:
            return
        with suppress(OSError):
            self.send_response(answer.status)
            length = len(answer.body) if answer.length is None else answer.length
            for name, value in {**answer.headers, "content-length": str(length)}.items():
                self.send_header(name, value)
            self.send_header("connection", "close")
            self.end_headers()
            self.wfile.write(answer.body)

    do_GET = do_PUT = do_POST = do_DELETE = do_PATCH = _answer  # noqa: N815  names of http.server

    def _body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(headers.get("content-length", "0")))
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def address_string(self) -> str:
        return "unix"

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(path: Path, script: Script, retries: int = 1) -> Iterator[tuple[Client, ScriptedServer]]:
    """A client of such a server."""
    with ScriptedServer(path, script) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            with Client(f"unix:{path}", retries=retries) as client:
                yield client, server
        finally:
            server.shutdown()
            thread.join()


def without_pauses(monkeypatch: Any) -> list[float]:
    """Let no caller wait between two attempts; how long each would have."""
    waits: list[float] = []
    for module in (contexts, copies, files, happening, process, stream, templates, transport):
        monkeypatch.setattr(module, "pause", waits.append)
    return waits
