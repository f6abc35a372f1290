"""`sandbox.files` of an `AsyncSandbox`."""

from __future__ import annotations

from contextlib import aclosing, asynccontextmanager

from .waiting import copying, ready

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator
    from typing import Any

    from ..model.found import FileChange
    from .looking import Watch
    from .sync import Sandbox


class AsyncFiles:
    """`sandbox.files`; see `Files`."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._files = sandbox.files

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._files, name)

        async def call(*args: Any, **options: Any) -> Any:
            return await copying(method, *args, **options)

        return call

    @asynccontextmanager
    async def watch(
        self, path: str = ".", *, recursive: bool = False
    ) -> AsyncIterator[AsyncIterator[FileChange]]:
        """What changes at and below `path`, as it happens, from the beginning of the block to its end."""
        watch = await copying(self._files.begin_watch, path, recursive=recursive)
        try:
            async with aclosing(_changes(watch)) as changes:
                yield changes
        finally:
            await copying(watch.close)


async def _changes(watch: Watch) -> AsyncGenerator[FileChange, None]:
    found = watch.early
    while True:
        for each in found:
            yield each
        if watch.stream < 0:
            return
        await ready(watch.stream, "reader")
        found = await copying(watch.read)
