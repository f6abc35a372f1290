"""A process that runs in the background of a sandbox."""

from __future__ import annotations

import os
import select
import signal
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

from ..errors import ExecError
from ..model.base import checks
from ..model.base.helpful import helpful
from .pump import Pump
from .reactor import reactor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..model.execs.exec import ExecResult
    from .stream import Stream


@helpful
class Process:
    """A started process. Its output is collected from the start, whether or not anybody reads.

    Attributes:
        stdout, stderr: `Stream`s: iterate them, or `.read()` what is new. With a terminal all
            output is on `stdout`.
        future: Resolves to the `ExecResult`.
    """

    def __init__(self, pump: Pump, *, stdin_open: bool) -> None:
        self._pump = pump
        self.id = pump.run.id
        self.stdout: Stream = pump.stdout
        self.stderr: Stream = pump.stderr
        self.stdin = StdinWriter(pump) if stdin_open else None
        self.future: Future[ExecResult] = reactor().drive(pump)

    def __repr__(self) -> str:
        return f"<Process {self.id} {'running' if self.running else 'ended'}>"

    @property
    def running(self) -> bool:
        """True until the process has ended."""
        return not self.future.done()

    def wait(self, timeout_s: float | None = None) -> ExecResult:
        """Its result, once it has ended. The process keeps running when the wait times out.

        Raises:
            TimeoutError: It did not end within `timeout_s` seconds.
            SandboxLost: Its sandbox went away.
        """
        checks.waiting_time(timeout_s)
        try:
            return self.future.result(timeout_s)
        except FutureTimeout:
            if self.future.done():
                raise
            raise TimeoutError(f"the process still runs after {timeout_s} s") from None

    def send_signal(self, signum: int) -> None:
        """Send a signal to the process itself; nothing happens when it has ended."""
        number = checks.signal_number(signum)
        if self.running:
            self._pump.run.signal(number)

    def signal_group(self, signum: int) -> None:
        """Send a signal to its whole process group, as a terminal does."""
        number = checks.signal_number(signum)
        if self.running:
            self._pump.run.signal(number, group=True)

    def terminate(self) -> None:
        """SIGTERM: ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it and all its descendants, also those still running in the background after its end."""
        self._pump.run.kill()

    def resize(self, rows: int, cols: int) -> None:
        """Tell its terminal the new size."""
        if self.running:
            self._pump.resize(rows, cols)


@helpful
class StdinWriter:
    """The writing end of a process's standard input."""

    def __init__(self, pump: Pump) -> None:
        self._pump = pump

    def write(self, data: bytes) -> None:
        """Write everything, waiting while the process does not read.

        Raises:
            ExecError: It no longer reads.
        """
        view = memoryview(checks.binary(data, "data"))
        while view := view[self.write_some(view) :]:
            fd = self.duplicate()
            try:
                poll = select.poll()
                poll.register(fd, select.POLLOUT)
                poll.poll()
            finally:
                os.close(fd)

    def write_some(self, data: memoryview) -> int:
        """Write what the pipe takes now; returns how many bytes that were.

        Raises:
            ExecError: The process no longer reads.
        """
        with self._pump.open:
            self._pump.is_asked = True
            try:
                return os.write(self._fd(), data[: 1 << 16])
            except BlockingIOError:
                return 0
            except OSError as exc:
                raise ExecError("the process no longer reads its input") from exc

    def duplicate(self) -> int:
        """A descriptor of the caller's own to wait on, which stays open when the process ends."""
        with self._pump.open:
            return os.dup(self._fd())

    def _fd(self) -> int:
        fd = self._pump.run.stdin
        if fd is None:
            raise ExecError("standard input is closed")
        return fd

    def close(self) -> None:
        """End of input. On a terminal, send b"\\x04" instead."""
        with self._pump.open:
            self._pump.run.close_stdin()
