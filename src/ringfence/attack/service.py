"""A web server of the host's loopback, as lenient as real ones are: what can be smuggled arrives."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO, Self

_MOST_KEPT = 1000
_PATIENCE_S = 10.0


class Service:
    """Answers every request with 200, and `/seen` with what it was asked for; a context manager.

    It takes bare line feeds, folded headers, pipelined requests, and chunks where both lengths are
    given: of two headers of one name the last counts.

    Attributes:
        port: Where it listens on 127.0.0.1.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        self._seen: list[str] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        # Closing alone would not wake the thread that waits in accept.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        sock.settimeout(_PATIENCE_S)
        with sock, sock.makefile("rb") as stream, suppress(OSError, ValueError, IndexError):
            while line := stream.readline().strip():
                target = line.split()[1].decode("latin-1")
                headers = _read_headers(stream)
                _skip_body(stream, headers)
                del self._seen[:-_MOST_KEPT]
                self._seen.append(target)
                body = "\n".join(self._seen if target == "/seen" else ["here"]).encode("latin-1")
                head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
                sock.sendall(head + body)
                if headers.get("connection") == "close":
                    return


def _read_headers(stream: BinaryIO) -> dict[str, str]:
    headers: dict[str, str] = {}
    name = ""
    while line := stream.readline(65_536).decode("latin-1").rstrip("\r\n"):
        if line[0] in " \t":
            headers[name] = f"{headers.get(name, '')} {line.strip()}".strip()
            continue
        name, _, value = line.partition(":")
        name = name.strip().lower()
        headers[name] = value.strip().lower()
    return headers


def _skip_body(stream: BinaryIO, headers: dict[str, str]) -> None:
    if "chunked" in headers.get("transfer-encoding", ""):
        while size := int(stream.readline().partition(b";")[0].strip() or b"0", 16):
            stream.read(size)
            stream.readline()
        while stream.readline().strip():
            pass
        return
    stream.read(int(headers.get("content-length") or 0))
