"""Host processes of their own that use the library: they may grow, be signalled, and die."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ringfence
from tests.native.outside import PATIENCE_S

SOURCE = str(Path(ringfence.__file__).parent.parent)
TESTS = str(Path(__file__).parents[2])  # where `import tests` finds them
_PRELUDE = """
import json, os, signal, sys, threading
from ringfence import AsyncSandbox, Sandbox

def say(value=None):
    print(json.dumps(value), flush=True)

def listen():
    return sys.stdin.readline()

sys.argv += json.loads(listen())  # not on our command line, where tests look for sandboxes' own
"""


class Caller:
    """A Python process that runs `code` with `say(value)` and `listen()`, and ours to kill.

    Args:
        code: Statements; `sys.argv[1:]` are `args`.
        python: Another interpreter than this one.
        under: A command in front, such as one that takes rights away.
    """

    def __init__(
        self,
        code: str,
        *args: object,
        python: str = sys.executable,
        under: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        path = os.pathsep.join(filter(None, [SOURCE, TESTS, os.environ.get("PYTHONPATH", "")]))
        self.process = subprocess.Popen(
            [*under, python, "-c", _PRELUDE + code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, **(env or {})},
            bufsize=0,
        )
        self.pid = self.process.pid
        self._rest = b""
        self.tell(json.dumps([str(each) for each in args]))

    def hear(self, patience_s: float = PATIENCE_S) -> Any:
        """The next value it says; its standard error is the failure when it says nothing."""
        assert self.process.stdout is not None
        poll = select.poll()
        poll.register(self.process.stdout, select.POLLIN)
        while b"\n" not in self._rest:
            assert poll.poll(patience_s * 1000), "the caller said nothing"
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            assert data, f"the caller ended: {self.finish()[1]}"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def tell(self, text: str = "") -> None:
        """Let its `listen` return."""
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode() + b"\n")

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Signal it, and wait until it is gone."""
        self.process.send_signal(signum)
        self.process.wait(PATIENCE_S)

    def finish(self) -> tuple[int, str]:
        """Its exit code and standard error, once it has ended."""
        _out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, err.decode(errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
