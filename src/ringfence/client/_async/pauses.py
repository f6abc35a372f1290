"""Waiting, under whatever event loop runs this."""

from __future__ import annotations

import asyncio
import sys

import anyio
import anyio.to_thread

from ...errors import RingfenceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from typing import Any, TypeVar

    import httpx2

    from .._sync.transport import Transport
    from .transport import AsyncTransport

    T = TypeVar("T")

CANCELLABLE = True
"""Whether a call can be ended from outside while it waits."""


def twin(transport: AsyncTransport) -> Transport:
    """The same for whoever cannot await."""
    from .._sync.transport import Transport

    return Transport(*transport.arguments)


def let_go(_transport: AsyncTransport, its_twin: Transport) -> None:
    """Close the twin."""
    its_twin.close()


def close_when_dropped(_transport: AsyncTransport, _client: httpx2.AsyncClient) -> None:
    """Nothing: closing has to be awaited."""


async def pause(seconds: float) -> None:
    """Wait."""
    await anyio.sleep(seconds)


async def to_the_end(function: Callable[[], Awaitable[T]]) -> T:
    """Call it, and see it through although the caller is being cancelled."""
    with anyio.CancelScope(shield=True):
        result = await (function() if _running_trio() else _seen_through(function()))
    return result  # noqa: RET504  the type checker does not see that the scope swallows nothing


async def _seen_through(awaitable: Awaitable[T]) -> T:
    """Its result, however often asyncio's own `Task.cancel` is called meanwhile: no scope shields of that."""
    task = asyncio.ensure_future(awaitable)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            pass  # whoever calls this is on its way out already
        except Exception:  # noqa: BLE001  it is raised below
            break
    return task.result()


async def made(
    make: Callable[[], Coroutine[Any, Any, T]], end: Callable[[T], Awaitable[None]]
) -> T:
    """What `make` makes on the server; when the caller is cancelled meanwhile, it is ended again.

    A request that is cut off may have been obeyed all the same: it is seen through, to know what to end.
    """
    trio = _running_trio()
    if trio is not None:
        with trio.CancelScope(shield=True):
            found = await make()
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
        except BaseException:
            with trio.CancelScope(shield=True):
                await end(found)
            raise
        return found
    task = asyncio.ensure_future(make())
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        try:
            found = await _seen_through(task)
        except RingfenceError:
            raise asyncio.CancelledError from None  # nothing was made
        await _seen_through(end(found))
        raise


def _running_trio() -> Any:
    trio = sys.modules.get("trio")
    return trio if trio is not None and trio.lowlevel.in_trio_run() else None


async def blocking(function: Callable[..., T], *args: Any) -> T:
    """Call what blocks, elsewhere."""
    return await anyio.to_thread.run_sync(function, *args, abandon_on_cancel=True)
