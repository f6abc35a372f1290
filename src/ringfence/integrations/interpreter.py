"""An interpreter in a sandbox that keeps its variables from one piece of code to the next."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from ..errors import ExecError, TimeoutExceeded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..sandbox import Process, Sandbox

_LOOP = Path(__file__).with_name("interpreter_loop.py")
_INSIDE = "/tmp/.ringfence-interpreter.py"
_KEPT_BYTES = 1 << 20


@dataclass(frozen=True)
class Cell:
    """How one piece of code ended.

    Attributes:
        output: What it wrote, standard error among it.
        result: The last expression's value as text; None where there is none.
        error, value, traceback: Of the exception that ended it; empty where none did.
    """

    output: str
    result: str | None = None
    error: str = ""
    value: str = ""
    traceback: str = ""


class Interpreter:
    """Python in `sandbox`, started by the first code; not safe to use from two threads at once."""

    def __init__(self, sandbox: Sandbox, *, python: str = "python3") -> None:
        self.sandbox = sandbox
        self._python = python
        self._process: Process | None = None

    def run(self, code: str, *, timeout_s: float | None = None) -> Cell:
        """Run one piece of code to its end.

        Raises:
            TimeoutExceeded: The interpreter was killed, with all it started; the next one is fresh.
            ExecError: The interpreter ended under the code.
        """
        process = self._live()
        mark = f"ringfence-{secrets.token_hex(16)}:"
        assert process.stdin is not None
        request = json.dumps({"code": code, "mark": mark}) + "\n"
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            process.stdin.write(request.encode())
            output, answer = self._until(mark.encode(), deadline)
        except TimeoutError:
            self.end()
            raise TimeoutExceeded(f"the code took longer than {timeout_s} s") from None
        except BaseException:
            self.end()
            raise
        text = output.decode("utf-8", "replace").removesuffix("\n")
        return Cell(text, **json.loads(answer))

    def end(self) -> None:
        """Kill the interpreter and everything that it started; the next code gets a fresh one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _live(self) -> Process:
        if self._process is None or not self._process.running:
            self.sandbox.files.write(_INSIDE, _LOOP.read_bytes())
            argv = [self._python, "-u", _INSIDE]
            self._process = self.sandbox.start(
                argv, stream_stdin=True, max_output_bytes=_KEPT_BYTES
            )
        return self._process

    def _until(self, mark: bytes, deadline: float | None) -> tuple[bytes, bytes]:
        """What came before the mark, its middle dropped where it is too long, and the answer after it."""
        assert self._process is not None
        seen = b""
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            chunk = self._process.stdout.read(left)
            if not chunk:
                said = seen.decode("utf-8", "replace")[-2000:]
                raise ExecError(f"the interpreter ended under the code; it said: {said}")
            seen += chunk
            start = seen.find(mark, max(0, len(seen) - len(chunk) - len(mark)))
            if start >= 0 and seen.endswith(b"\n"):
                return seen[:start], seen[start + len(mark) :]
            if start < 0 and len(seen) > 2 * _KEPT_BYTES:
                seen = seen[: _KEPT_BYTES // 2] + b"\n[...]\n" + seen[-_KEPT_BYTES // 2 :]
