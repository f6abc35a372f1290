"""Background processes of an `AsyncSandbox`, and their streams."""

from __future__ import annotations

import os

from ..model.base import checks
from ..model.base.helpful import helpful
from .waiting import in_thread, ready, resolve, shield

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ..model.execs.exec import ExecResult
    from .process import Process
    from .stream import Stream


@helpful
class AsyncProcess:
    """A background process; see `Process`."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.id = process.id
        self.stdin = AsyncStdin(process) if process.stdin else None
        self.stdout = AsyncStream(process.stdout)
        self.stderr = AsyncStream(process.stderr)

    def __repr__(self) -> str:
        return f"<Async{repr(self._process)[1:]}"

    @property
    def running(self) -> bool:
        """True until the process has ended."""
        return self._process.running

    async def wait(self, timeout_s: float | None = None) -> ExecResult:
        """Its result, once it has ended. The process keeps running when the wait times out.

        Raises:
            TimeoutError: It did not end within `timeout_s` seconds.
        """
        checks.waiting_time(timeout_s)
        return await resolve(shield(self._process.future), timeout_s)

    async def send_signal(self, signum: int) -> None:
        """Send a signal to the process itself."""
        await in_thread(self._process.send_signal, signum)

    async def signal_group(self, signum: int) -> None:
        """Send a signal to its whole process group, as a terminal does."""
        await in_thread(self._process.signal_group, signum)

    async def terminate(self) -> None:
        """SIGTERM: ask it to end."""
        await in_thread(self._process.terminate)

    async def kill(self) -> None:
        """Kill it and everything that it started."""
        await in_thread(self._process.kill)

    async def resize(self, rows: int, cols: int) -> None:
        """Tell its terminal the new size."""
        await in_thread(self._process.resize, rows, cols)


@helpful
class AsyncStdin:
    """The writing end of a process's standard input."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        self._stdin = process.stdin

    async def write(self, data: bytes) -> None:
        """Write everything, waiting while the process does not read.

        Raises:
            ExecError: It no longer reads.
        """
        view = memoryview(checks.binary(data, "data"))
        while view := view[self._stdin.write_some(view) :]:
            fd = self._stdin.duplicate()
            try:
                await ready(fd, "writer")
            finally:
                os.close(fd)

    async def close(self) -> None:
        """End of input. On a terminal, send b"\\x04" instead."""
        self._stdin.close()


@helpful
class AsyncStream:
    """An output stream of a process."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    async def read(self, timeout_s: float | None = None) -> bytes:
        """Read the bytes that arrived since the last read; empty at the end of the stream.

        Raises:
            TimeoutError: Nothing came within `timeout_s` seconds.
        """
        while True:
            await resolve(shield(self._stream.readable()), timeout_s)
            try:
                return self._stream.read(0)
            except TimeoutError:
                continue  # another reader was faster

    @property
    def dropped_bytes(self) -> int:
        """How many bytes between head and tail were not kept."""
        return self._stream.dropped_bytes

    @property
    def missed_bytes(self) -> int:
        """Bytes missing between those that were read; see `Stream`."""
        return self._stream.missed_bytes

    async def getvalue(self) -> bytes:
        """All that was kept so far, what was read already included; see `Stream.getvalue`."""
        return self._stream.getvalue()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while chunk := await self.read():
            yield chunk

    async def lines(self) -> AsyncIterator[str]:
        """Text lines, without their newline, bad bytes replaced."""
        rest = b""
        async for chunk in self:
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                yield line.decode("utf-8", "replace")
        if rest:
            yield rest.decode("utf-8", "replace")
