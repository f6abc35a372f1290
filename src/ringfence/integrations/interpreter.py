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
_ANSWER_BYTES = 16 << 20  # a final answer may hold an image; it comes whole or not at all
# A stream keeps its beginning, and its end while nobody reads: an answer must fit into the latter.
_STREAM_BYTES = 2 * (_ANSWER_BYTES + _KEPT_BYTES)


@dataclass(frozen=True)
class Cell:
    """How one piece of code ended.

    Attributes:
        output: What it wrote, standard error among it.
        result: The last expression's value as text, its middle dropped where it is too long; None
            where there is none.
        error, value, traceback: Of the exception that ended it; empty where none did.
    """

    output: str
    result: str | None = None
    error: str = ""
    value: str = ""
    traceback: str = ""


class Interpreter:
    """Python in `sandbox`, started by the first code; not safe to use from two threads at once.

    Attributes:
        prelude: Code that every fresh interpreter runs first, by a name of the caller's.
    """

    def __init__(self, sandbox: Sandbox, *, python: str = "python3") -> None:
        self.sandbox = sandbox
        self.prelude: dict[str, str] = {}
        self._python = python
        self._process: Process | None = None

    def run(self, code: str, *, timeout_s: float | None = None) -> Cell:
        """Run one piece of code to its end.

        Raises:
            TimeoutExceeded: The interpreter was killed, with all it started; the next one is fresh.
            ExecError: The interpreter ended under the code, or its answer is none.
        """
        if self._process is None or not self._process.running:
            self._process = self._begin()
            for each in self.prelude.values():
                cell = self._ask(each, timeout_s)
                if cell.error:
                    self.end()
                    raise ExecError(f"a fresh interpreter failed at its start: {cell.traceback}")
        return self._ask(code, timeout_s)

    def _ask(self, code: str, timeout_s: float | None) -> Cell:
        process = self._process
        assert process is not None
        mark = f"ringfence-{secrets.token_hex(16)}:"
        assert process.stdin is not None
        request = json.dumps({"code": code, "mark": mark}) + "\n"
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            process.stdin.write(request.encode())
            cell = _cell(*self._until(mark.encode(), deadline))
        except TimeoutError:
            self.end()
            raise TimeoutExceeded(f"the code took longer than {timeout_s} s") from None
        except BaseException:
            self.end()
            raise
        return cell

    def end(self) -> None:
        """Kill the interpreter and everything that it started; the next code gets a fresh one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _begin(self) -> Process:
        self.sandbox.files.write(_INSIDE, _LOOP.read_bytes())
        # Without -u: unbuffered, Python loses what a pipe does not take at once.
        argv = [self._python, _INSIDE]
        return self.sandbox.start(argv, stream_stdin=True, max_output_bytes=_STREAM_BYTES)

    def _until(self, mark: bytes, deadline: float | None) -> tuple[bytes, bytes]:
        """Read up to the mark, dropping the middle of long output, and the answer behind the mark."""
        seen, start, dropped = bytearray(), -1, 0
        while start < 0 or not seen.endswith(b"\n"):
            chunk = self._chunk(deadline, seen)
            searched = max(0, len(seen) - len(mark))
            seen += chunk
            if start < 0:
                start = seen.find(mark, searched)
            if start < 0 and len(seen) > 2 * _KEPT_BYTES:
                dropped += _drop_middle(seen)
            if start >= 0 and len(seen) - start > _ANSWER_BYTES:
                raise ExecError(f"the answer is longer than {_ANSWER_BYTES} bytes")
        output = seen[:start]  # the last chunk may have brought more than is kept
        dropped += _drop_middle(output)
        if dropped:
            note = f"\n[{dropped} bytes of output are left out here]\n"
            output[_KEPT_BYTES // 2 : _KEPT_BYTES // 2] = note.encode()
        return bytes(output), bytes(seen[start + len(mark) :])

    def _chunk(self, deadline: float | None, seen: bytearray) -> bytes:
        assert self._process is not None
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError
        chunk = self._process.stdout.read(left)
        if not chunk:
            said = seen.decode("utf-8", "replace")[-2000:]
            raise ExecError(f"the interpreter ended under the code; its output: {said}")
        return chunk


def _drop_middle(output: bytearray) -> int:
    """Keep both ends; returns how many bytes went."""
    excess = max(0, len(output) - _KEPT_BYTES)
    del output[_KEPT_BYTES // 2 : _KEPT_BYTES // 2 + excess]
    return excess


def _cell(output: bytes, answer: bytes) -> Cell:
    """From what the interpreter wrote, or what code wrote in its place.

    Raises:
        ExecError: It is no answer.
    """
    try:
        said = json.loads(answer)
        texts = {name: said.get(name) or "" for name in ("error", "value", "traceback")}
        result = said.get("result")
        if not all(isinstance(each, str) for each in (*texts.values(), result or "")):
            raise ValueError("not text")
    except (ValueError, AttributeError, RecursionError) as exc:
        raise ExecError(f"the interpreter's answer makes no sense: {exc}") from exc
    return Cell(output.decode("utf-8", "replace").removesuffix("\n"), result, **texts)
