"""An exec of the fake: its pipes, its supervisor, its ending."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

from ...errors import InvalidRequest, LifecycleError
from ...model.base.ids import new_id
from ...model.execs import exec as execs
from . import lookup
from .process import Process
from .streams import FileStream, PipeStream

if TYPE_CHECKING:
    from ...model.execs.exec import ExecRequest, ExecStatus
    from .process import Machine
    from .streams import Stream


class FakeExec:
    """A running process; see `BackendExec`."""

    def __init__(
        self,
        machine: Machine,
        request: ExecRequest,
        env: dict[str, str],
        cwd: str,
        timeout_s: float | None,
    ) -> None:
        self.id = new_id("exec")
        self._machine = machine
        self._timeout_s = timeout_s
        self._killed_by: str | None = None
        self._status: ExecStatus | None = None
        self._started_s = time.monotonic()
        self._closing = threading.Lock()
        guest = self._make_streams(request)
        self._tag = machine.next_pid()
        self._process = Process(machine, self._tag, request.argv, env, cwd, guest)
        try:
            self._process.start(lookup.run)
        except OSError:
            self.close()
            os.close(self._done_write)
            raise
        threading.Thread(target=self._supervise, name=self.id, daemon=True).start()

    def _make_streams(self, request: ExecRequest) -> list[Stream]:
        """Open the pipes; the host's ends become attributes, the guest's are returned."""
        self.done, self._done_write = os.pipe()
        self.stdin: int | None = None
        stdin: Stream
        if request.has_stdin:
            reader, self.stdin = os.pipe()
            os.set_blocking(self.stdin, False)
            stdin = PipeStream(reader)
        else:
            stdin = FileStream(self._machine.files.open_read("/dev/null"))
        self.stdout, out = self._output_pipe()
        self.stderr, err = self._output_pipe()
        return [stdin, out, err]

    @staticmethod
    def _output_pipe() -> tuple[int | None, Stream]:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        return reader, PipeStream(writer)

    def status(self) -> ExecStatus:
        if self._status is None:
            raise LifecycleError(f"exec {self.id} has not ended yet")
        return self._status

    def signal(self, signum: int, *, group: bool = False) -> None:  # noqa: ARG002  it is one process
        if signum not in signal.valid_signals():
            raise InvalidRequest(f"{signum} is not a signal", field="signum")
        self._process.deliver(signum)

    def kill(self) -> None:
        self.end(execs.KILLED_BY_CALLER)

    def end(self, killed_by: str) -> None:
        """Kill the tree; `killed_by` is reported when that is what ended the process."""
        with self._machine.changed:
            if not self._process.has_ended:
                self._killed_by = self._killed_by or killed_by
        self._machine.kill_tree(self._tag)

    def wait(self) -> None:
        """Wait until `done` is readable."""
        with self._machine.changed:
            self._machine.changed.wait_for(lambda: self._status is not None)

    def resize(self, rows: int, cols: int) -> None:  # noqa: ARG002
        raise InvalidRequest(f"exec {self.id} has no terminal", field="pty")

    def close_stdin(self) -> None:
        with self._closing:
            fd, self.stdin = self.stdin, None
            if fd is not None:
                os.close(fd)

    def close(self) -> None:
        self.close_stdin()
        with self._closing:
            fds = (self.stdout, self.stderr, self.done)
            self.stdout = self.stderr = None
            self.done = -1
            for fd in fds:
                if fd is not None and fd >= 0:
                    os.close(fd)

    def _supervise(self) -> None:
        machine, process = self._machine, self._process
        with machine.changed:
            in_time = machine.changed.wait_for(lambda: process.has_ended, self._timeout_s)
        if not in_time:
            self.end(execs.KILLED_BY_TIMEOUT)
        with machine.changed:
            machine.changed.wait_for(lambda: process.has_ended)
            self._status = self._judge()
            self._tell_done()
            machine.changed.notify_all()

    def _tell_done(self) -> None:
        try:
            os.write(self._done_write, b"!")
        except BrokenPipeError:
            pass  # the owner has closed its fds: nobody wants to know
        os.close(self._done_write)

    def _judge(self) -> ExecStatus:
        """How it ended. Who meant to kill it counts only when the kill is what ended it."""
        process = self._process
        was_killed = process.signum == signal.SIGKILL and self._killed_by is not None
        return execs.ExecStatus(
            exit_code=process.exit_code,
            signal=process.signum,
            timed_out=was_killed and self._killed_by == execs.KILLED_BY_TIMEOUT,
            killed_by=self._killed_by if was_killed else None,
            duration_s=time.monotonic() - self._started_s,
        )
