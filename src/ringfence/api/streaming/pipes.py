"""Asynchronous pipes to helpers inside, without a thread for each."""

from __future__ import annotations

import asyncio
import fcntl
import os

from ...errors import TimeoutExceeded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

    from ...backends.protocol import HelperTask
    from ...sessions.live import Live
    from ..thread_pools import ThreadPools

_CHUNK = 1 << 18
_F_SETPIPE_SZ = 1031  # include/uapi/linux/fcntl.h
_PIPE_BYTES = 1 << 20
_STUCK_S = 120.0  # for a helper that does not move: its sandbox may have been suspended


class Running:
    """A helper task in a sandbox, from start to finish; as a context manager it is never left behind.

    While it runs, its sandbox is in use.
    """

    def __init__(
        self, thread_pools: ThreadPools, live: Live, what: str, path: str, options: str = ""
    ) -> None:
        self._thread_pools, self._live, self._path = thread_pools, live, path
        self._what, self._options = what, options
        self._task: HelperTask | None = None
        self._use = live.use.call()

    async def __aenter__(self) -> Running:
        key = self._live.sandbox_id
        self._thread_pools.begin_task(key)
        try:
            send = self._live.inner.files.start_helper
            task = await self._thread_pools.call(
                send, self._what, self._path, self._options, key=key
            )
        except BaseException:
            self._thread_pools.end_task(key)
            raise
        self._task, self._fd = task, task.stream
        os.set_blocking(self._fd, False)
        try:
            fcntl.fcntl(self._fd, _F_SETPIPE_SZ, _PIPE_BYTES)
        except OSError:
            pass  # this user's share of pipe pages is used up
        self._use.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._use.__exit__(kind, exc, tb)
        self._thread_pools.end_task(self._live.sandbox_id)
        task, self._task = self._task, None
        if task is not None:
            self._thread_pools.later(task.abandon)  # perhaps cancelled: nothing may be awaited here

    async def read(self, timeout_s: float | None = _STUCK_S, most: int = _CHUNK) -> bytes:
        """Read at most `most` bytes; empty at the end.

        Raises:
            TimeoutExceeded: No byte arrived within `timeout_s`.
        """
        while True:
            try:
                return os.read(self._fd, most)
            except BlockingIOError:
                await self._ready("reader", timeout_s)

    async def write(self, data: bytes) -> bool:
        """Everything; False when the helper does not read any more."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:
                await self._ready("writer", _STUCK_S)
            except BrokenPipeError:
                return False
        return True

    async def _ready(self, side: str, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        add, remove = getattr(loop, f"add_{side}"), getattr(loop, f"remove_{side}")
        add(self._fd, _set, ready)
        try:
            async with asyncio.timeout(timeout_s):
                await ready
        except TimeoutError:
            raise TimeoutExceeded(f"{self._path}: the sandbox does not answer") from None
        finally:
            remove(self._fd)

    async def chunks(self) -> AsyncIterator[bytes]:
        """All that comes; raises what went wrong at the end."""
        while data := await self.read():
            yield data
        await self.finish()

    async def finish(self) -> None:
        """Wait for the helper's word that all went well.

        Raises:
            FileError: As the kernel told the helper.
        """
        task, self._task = self._task, None
        assert task is not None
        await self._thread_pools.alone(task.finish, self._path)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
