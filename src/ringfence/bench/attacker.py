"""A client that attacks a server: raw connections, and what an attack on one interface is made of."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PIECE = 1 << 16
PATIENCE_S = 60.0
_PREPARE_S = 600.0
_AT_ONCE = 4  # connections of one attack


class Wire:
    """A raw connection to the server: it sends exactly the bytes written here."""

    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(path)

    def ask(self, method: str, target: str, *headers: str, body: bytes = b"") -> None:
        """Send a request whose body is `body`, unless `headers` frame another."""
        lines = [f"{method} {target} HTTP/1.1", "Host: localhost", *headers]
        if body:
            lines.append(f"Content-Length: {len(body)}")
        self.sock.sendall("\r\n".join([*lines, "", ""]).encode() + body)

    def status(self) -> int:
        """Read the head of the answer, and no more."""
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            byte = self.sock.recv(1)
            if not byte:
                raise ConnectionError(f"the server closed after {head!r}")
            head += byte
        return int(head.split()[1])

    def read_on(self) -> None:
        while self.sock.recv(PIECE):
            pass

    def upgrade(self, target: str) -> None:
        key = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="
        version = "Sec-WebSocket-Version: 13"
        self.ask("GET", target, "Upgrade: websocket", "Connection: Upgrade", key, version)
        if (status := self.status()) != 101:
            raise ConnectionError(f"{target}: {status}")


def frame(opcode: int, data: bytes) -> bytes:
    """A WebSocket message of a client, masked with zeros. Source: RFC 6455 5.2."""
    size = len(data)
    short = size if size < 126 else 126 if size < 1 << 16 else 127
    more = b"" if short < 126 else size.to_bytes(2 if short == 126 else 8, "big")
    return bytes([0x80 | opcode, 0x80 | short]) + more + bytes(4) + data


class Attacker:
    """A client that may use one sandbox.

    Args:
        path: Of the server's unix socket, in its state directory.
    """

    def __init__(self, path: str, sandbox: str) -> None:
        self.path, self.at = path, f"/v1/sandboxes/{sandbox}"

    def wire(self) -> Wire:
        return Wire(self.path)

    def call(self, method: str, target: str, form: Any = None) -> tuple[int, bytes]:
        """Send a request and return the whole response."""
        wire, body = self.wire(), b"" if form is None else json.dumps(form).encode()
        headers = ["Connection: close"] + ["Content-Type: application/json"] * bool(body)
        wire.ask(method, target, *headers, body=body)
        status, text = wire.status(), bytearray()
        while data := wire.sock.recv(PIECE):
            text += data
        return status, bytes(text)

    def start(self, *argv: str, **fields: Any) -> str:
        status, text = self.call("POST", f"{self.at}/execs", {"argv": argv, **fields})
        if status != 201:
            raise OSError(f"no exec: {status} {text[:300]!r}")
        return f"{self.at}/execs/{json.loads(text)['id']}"

    def ready(self, *argv: str, **fields: Any) -> str:
        """The same, once it has said `ready`."""
        at = self.start(*argv, **fields)
        until = time.monotonic() + _PREPARE_S
        while not self.call("GET", f"{at}/output?stream=stdout")[1].startswith(b"ready"):
            if time.monotonic() > until:
                raise OSError(f"{argv[0]} is not ready: {self.call('GET', f'{at}/output')!r}")
            time.sleep(0.02)
        return at

    def python(self, source: str, **fields: Any) -> str:
        return self.ready("python3", "-S", "-c", source, **fields)


@dataclass(frozen=True)
class Door:
    """An interface of the server, and an attack on it.

    Attributes:
        attack: One connection's part, repeated until the program is killed.
        prepare: Setup, mostly in the sandbox. Its result is passed to `attack`.
        at_once: Connections.
    """

    attack: Callable[[Attacker, str], None]
    prepare: Callable[[Attacker], str] = lambda _: ""
    at_once: int = _AT_ONCE


def quietly(function: Callable[[], None]) -> None:
    """Call it; a connection that breaks is no news to an attacker."""
    with suppress(OSError):
        function()


def read_beside(wire: Wire) -> None:
    """Read all that comes, in a thread."""
    threading.Thread(target=quietly, args=(wire.read_on,), daemon=True).start()
