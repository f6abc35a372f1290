"""A process inside that does what it is asked, line by line, as the test goes on."""

from __future__ import annotations

import json
import queue
from types import TracebackType
from typing import Any, Self

from ringfence import Sandbox

_PATIENCE_S = 60.0


class Asked:
    """It reads one JSON list a line, a function and its arguments, and answers with one JSON value a line."""

    def __init__(self, sandbox: Sandbox, *argv: str) -> None:
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._rest = b""
        self._process = sandbox.start(argv, stream_stdin=True, on_stdout=self._hear)

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
        """Raises `queue.Empty` when it says nothing, or has ended."""
        return json.loads(self._lines.get(timeout=_PATIENCE_S))

    def end(self) -> str:
        """End it; what it has said on standard error."""
        self._process.kill()
        self._process.wait()
        return self._process.stderr.getvalue().decode()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _value: BaseException | None,
        _where: TracebackType | None,
    ) -> None:
        self.end()
