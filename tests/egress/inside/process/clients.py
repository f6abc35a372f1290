"""Clients inside a sandbox that live longer than one request, told by the test what to do."""

from __future__ import annotations

import json
import queue
from types import TracebackType
from typing import Any, Self

from ringfence import Sandbox

# Reads one JSON list a line: a function and its arguments; answers with one JSON value a line.
_SCRIPT = r"""
import errno, json, socket, sys
open_sockets = {}
def name_of(exc):
    return errno.errorcode.get(exc.errno, str(exc)) if isinstance(exc, OSError) and exc.errno else str(exc)
def connect(key, host, port, patience_s=20.0):
    open_sockets[key] = socket.create_connection((host, port), patience_s)
    return True
def send(key, text):
    open_sockets[key].sendall(text.encode("latin-1"))
    return len(text)
def receive(key, most=65536, patience_s=20.0):
    open_sockets[key].settimeout(patience_s)
    return open_sockets[key].recv(most).decode("latin-1")
def drain(key, least, patience_s=20.0):
    open_sockets[key].settimeout(patience_s)
    got = 0
    while got < least:
        piece = open_sockets[key].recv(1 << 20)
        if not piece:
            break
        got += len(piece)
    return got
def close(key):
    open_sockets.pop(key).close()
    return True
for line in sys.stdin:
    function, arguments = json.loads(line)
    try:
        answer = globals()[function](**arguments)
    except OSError as exc:
        answer = {"error": name_of(exc)}
    except KeyError:
        answer = {"error": "never connected"}
    print(json.dumps(answer), flush=True)
"""


class Client:
    """One process inside, which keeps connections by name. A context manager."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._rest = b""
        self._process = sandbox.start(
            ["python3", "-c", _SCRIPT], stream_stdin=True, on_stdout=self._hear
        )

    def _hear(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._lines.put(line)

    def do(self, function: str, **arguments: Any) -> Any:
        self.begin(function, **arguments)
        return self.answer()

    def begin(self, function: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([function, arguments]).encode() + b"\n")

    def answer(self) -> Any:
        return json.loads(self._lines.get(timeout=60))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _value: BaseException | None,
        _where: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
