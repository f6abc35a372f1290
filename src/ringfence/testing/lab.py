"""A sandbox under test, with the few verbs that tests use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..model.execs.exec import ExecRequest
from . import running

if TYPE_CHECKING:
    from typing import Any

    from ..backends.protocol import BackendExec, BackendFiles, BackendSandbox
    from ..model.execs.exec import ExecResult
    from ..model.state import State


class Lab:
    """Wraps one sandbox, and closes what tests leave open.

    Args:
        patience_s: How long anything may take before the test has failed.
    """

    def __init__(self, sandbox: BackendSandbox, patience_s: float) -> None:
        self.sandbox = sandbox
        self.patience_s = patience_s
        self._started: list[BackendExec] = []

    @property
    def files(self) -> BackendFiles:
        """The sandbox's files."""
        return self.sandbox.files

    @property
    def state(self) -> State:
        """The sandbox's state now."""
        return self.sandbox.session.state

    def start(self, *argv: str, **request: Any) -> BackendExec:
        """Start a command and leave it running."""
        process = self.sandbox.start(ExecRequest(argv, **request))
        self._started.append(process)
        return process

    def run(self, *argv: str, **request: Any) -> ExecResult:
        """Run a command to its end."""
        return self.finish(
            self.start(*argv, **request),
            stdin=request.get("stdin"),
            max_output_bytes=request.get("max_output_bytes"),
        )

    def sh(self, script: str, **request: Any) -> ExecResult:
        """Run a shell script to its end."""
        return self.run("sh", "-c", script, **request)

    def finish(
        self,
        process: BackendExec,
        *,
        stdin: bytes | None = None,
        max_output_bytes: int | None = None,
    ) -> ExecResult:
        """Collect a started command."""
        return running.collect(
            process, stdin=stdin, max_output_bytes=max_output_bytes, patience_s=self.patience_s
        )

    def put(self, path: str, data: bytes, **options: Any) -> None:
        """Write a file."""
        with self.files.open_write(path, **options) as file:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) or 0 :]

    def get(self, path: str) -> bytes:
        """Read a file."""
        pieces = []
        with self.files.open_read(path) as file:
            while piece := file.read(1 << 20):
                pieces.append(piece)
        return b"".join(pieces)

    def end_started(self) -> None:
        """Kill what `start` left running, and give back the fds."""
        while self._started:
            process = self._started.pop()
            process.kill()
            process.close()

    def close(self) -> None:
        """Terminate, and give back the fds."""
        try:
            self.sandbox.terminate()
        finally:
            for process in self._started:
                process.close()
