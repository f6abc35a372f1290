"""Waiting, under whatever event loop runs this."""

from __future__ import annotations

import asyncio
import sys
import weakref
from contextlib import suppress

import anyio
import anyio.to_thread

from ...errors import RingfenceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
    from typing import Any, TypeVar

    import httpx2

    from .._sync.transport import Transport
    from .transport import AsyncTransport

    T = TypeVar("T")

CANCELLABLE = True
"""True: a waiting call can be cancelled from outside."""


def make_blocking(transport: AsyncTransport) -> Transport:
    """Return a transport with the same arguments for callers that cannot await."""
    from .._sync.transport import Transport

    return Transport(*transport.arguments)


def let_go(_transport: AsyncTransport, blocking: Transport) -> None:
    """Close the blocking transport."""
    blocking.close()


def close_when_dropped(transport: AsyncTransport, client: httpx2.AsyncClient) -> None:
    """Close the connections with their last owner, and at the latest when the event loop ends."""
    owner = weakref.ref(transport)
    trio = _running_trio()
    if trio is not None:
        is_dropped = trio.Event()
        trio.lowlevel.spawn_system_task(_close_under_trio, owner, client, is_dropped)
        finish: tuple[Any, ...] = (_tell_trio, trio.lowlevel.current_trio_token(), is_dropped)
    else:
        guard = _guard(owner, client)
        with suppress(StopIteration):  # it has reached its `yield`
            guard.asend(None).send(None)
        # An event loop closes the asynchronous generators that it began: one that is dropped at once, and
        # what is left at its own end (PEP 525).
        finish = (_drop, guard)
    weakref.finalize(transport, *finish).atexit = False


async def _guard(
    owner: weakref.ref[AsyncTransport], client: httpx2.AsyncClient
) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await _close(owner, client)


def _drop(_guard: object) -> None:
    """Nothing: the reference ends with the call."""


async def _close_under_trio(
    owner: weakref.ref[AsyncTransport], client: httpx2.AsyncClient, is_dropped: Any
) -> None:
    try:
        await is_dropped.wait()
    finally:
        with anyio.CancelScope(shield=True):
            await _close(owner, client)


def _tell_trio(token: Any, is_dropped: Any) -> None:
    with suppress(RuntimeError):  # that loop has ended, and closed the connections
        token.run_sync_soon(is_dropped.set)


async def _close(owner: weakref.ref[AsyncTransport], client: httpx2.AsyncClient) -> None:
    transport = owner()
    if transport is not None:  # which may be asked again, under another event loop
        with transport._lock:
            if transport._client is client:
                transport._client = None
    await client.aclose()


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
    """Run `make`, which creates something on the server; when the caller is cancelled, end the
    result.

    The server may carry out a request whose connection is cut, so `make` runs to its end: only its
    result says what to end.
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


async def in_own_thread(function: Callable[[], T]) -> T:
    """Run a call that may last for hours. A caller that is cancelled does not wait for its end."""
    limiter = anyio.CapacityLimiter(1)
    return await anyio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=limiter)
