"""Pipes to helpers, without a thread waiting at any of them."""

from __future__ import annotations

import asyncio
import fcntl
import os

from ..errors import TimeoutExceeded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

    from ..backends.protocol import Errand
    from ..sessions.live import Live
    from .lanes import Lanes

_CHUNK = 1 << 18
_F_SETPIPE_SZ = 1031  # include/uapi/linux/fcntl.h
_PIPE_BYTES = 1 << 20
_STUCK_S = 120.0  # for a helper that does not move: its sandbox may have been suspended


class Running:
    """An errand in a sandbox, from start to finish; as a context manager it is never left behind.

    While it runs, its sandbox is in use.
    """

    def __init__(self, lanes: Lanes, live: Live, what: str, path: str, options: str = "") -> None:
        self._lanes, self._live, self._path = lanes, live, path
        self._what, self._options = what, options
        self._errand: Errand | None = None
        self._use = live.use.call()

    async def __aenter__(self) -> Running:
        key = self._live.sandbox_id
        self._lanes.begin_errand(key)
        try:
            send = self._live.inner.files.errand
            errand = await self._lanes.call(send, self._what, self._path, self._options, key=key)
        except BaseException:
            self._lanes.end_errand(key)
            raise
        self._errand, self._fd = errand, errand.stream
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
        self._lanes.end_errand(self._live.sandbox_id)
        errand, self._errand = self._errand, None
        if errand is not None:
            self._lanes.later(errand.abandon)  # perhaps cancelled: nothing may be awaited here

    async def read(self, timeout_s: float | None = _STUCK_S, most: int = _CHUNK) -> bytes:
        """What came, `most` bytes of it; empty at the end.

        Raises:
            TimeoutExceeded: Nothing came for so long.
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
        errand, self._errand = self._errand, None
        assert errand is not None
        await self._lanes.alone(errand.finish, self._path)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
