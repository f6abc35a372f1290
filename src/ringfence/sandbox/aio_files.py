"""`sandbox.files` of an `AsyncSandbox`."""

from __future__ import annotations

from contextlib import aclosing, asynccontextmanager
from functools import wraps

from ..model.base.helpful import helpful
from .files import Files
from .waiting import copying, ready

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
    from typing import Any, Concatenate, ParamSpec, TypeVar

    from ..model.found import FileChange
    from .looking import Watch
    from .sync import Sandbox

    P = ParamSpec("P")
    T = TypeVar("T")


def _awaited(
    method: Callable[Concatenate[Files, P], T],
) -> Callable[Concatenate[AsyncFiles, P], Coroutine[Any, Any, T]]:
    """Make of a method of `Files` the one to await, with its parameters and result."""

    async def call(self: AsyncFiles, /, *args: P.args, **options: P.kwargs) -> T:
        return await copying(method, self._files, *args, **options)

    return wraps(method)(call)


@helpful
class AsyncFiles:
    """`sandbox.files`; see `Files`."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._files = sandbox.files

    read = _awaited(Files.read)
    read_text = _awaited(Files.read_text)
    write = _awaited(Files.write)
    open_read = _awaited(Files.open_read)
    open_write = _awaited(Files.open_write)
    list = _awaited(Files.list)
    stat = _awaited(Files.stat)
    exists = _awaited(Files.exists)
    make_dir = _awaited(Files.make_dir)
    remove = _awaited(Files.remove)
    move = _awaited(Files.move)
    upload = _awaited(Files.upload)
    download = _awaited(Files.download)
    glob = _awaited(Files.glob)
    search = _awaited(Files.search)
    replace = _awaited(Files.replace)

    @asynccontextmanager
    async def watch(
        self, path: str = ".", *, recursive: bool = False
    ) -> AsyncIterator[AsyncIterator[FileChange]]:
        """Watch `path` and everything below it for changes until the block ends."""
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
