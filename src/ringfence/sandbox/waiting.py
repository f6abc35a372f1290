"""Waiting for other threads, under asyncio and under trio."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from math import inf

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Any, TypeVar

    T = TypeVar("T")

# Control calls are short (milliseconds) but do block: they run here, execs in the reactor. Copies may
# take long, and have threads of their own: however many there are, `terminate` finds one that is free.
control = ThreadPoolExecutor(max_workers=32, thread_name_prefix="ringfence")
copies = ThreadPoolExecutor(max_workers=32, thread_name_prefix="ringfence-files")


async def resolve(future: Future[T], timeout_s: float | None = None) -> T:
    """Wait for a future of another thread under whatever event loop runs this.

    Raises:
        TimeoutError: It had no result within `timeout_s` seconds.
        RuntimeError: No event loop that is known here runs.
    """
    if timeout_s is not None and timeout_s <= 0 and future.done():
        return future.result()  # an event loop hears of it only later, which would be too late
    trio = _running_trio()
    if trio is None:
        import asyncio

        return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)
    done = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def tell(_: Future[T]) -> None:
        try:
            token.run_sync_soon(done.set)
        except trio.RunFinishedError:
            pass  # who waited was cancelled, and so is everything else there

    future.add_done_callback(tell)
    with trio.move_on_after(inf if timeout_s is None else timeout_s):
        await done.wait()
    if not done.is_set():
        raise TimeoutError
    return future.result()


async def see_through(future: Future[Any], cause: BaseException, most_s: float = 5.0) -> None:
    """Wait for the end of what was killed for `cause`, a cancellation: until then it counts, for limits too.

    However often the caller is cancelled meanwhile. Nothing is waited for where no event loop would let
    us, as for a coroutine that is thrown away.
    """
    trio = _running_trio()
    if trio is not None:
        if isinstance(cause, trio.Cancelled):
            with trio.CancelScope(shield=True):
                await _settled(resolve(shield(future), most_s))
        return
    import asyncio

    if not isinstance(cause, asyncio.CancelledError):
        return
    task = asyncio.ensure_future(_settled(resolve(shield(future), most_s)))
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            pass  # one is on its way already


async def _settled(waiting: Awaitable[object]) -> None:
    try:
        await waiting
    except Exception:  # noqa: BLE001  how it ended is nobody's business any more
        pass


async def in_thread(function: Callable[..., T], *args: Any, **options: Any) -> T:
    """Run a short blocking call elsewhere."""
    return await resolve(control.submit(partial(function, *args, **options)))


async def in_own_thread(function: Callable[[], T]) -> T:
    """Run a call that may last for hours. A caller that is cancelled does not wait for its end."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as exc:  # noqa: BLE001  for whoever waits
            future.set_exception(exc)

    threading.Thread(target=run, name="ringfence-call", daemon=True).start()
    return await resolve(shield(future))


async def copying(function: Callable[..., T], *args: Any, **options: Any) -> T:
    """Run a call that may take long, on threads that nothing short waits for."""
    return await resolve(copies.submit(partial(function, *args, **options)))


async def owned(
    make: Callable[[], T], end: Callable[[T], object], pool: ThreadPoolExecutor = control
) -> T:
    """Make something; when the waiting task is cancelled meanwhile, end it once it is made."""
    future = pool.submit(make)
    try:
        return await resolve(shield(future))
    except BaseException:
        future.add_done_callback(partial(_end_made, end))
        raise


def _end_made(end: Callable[[T], object], future: Future[T]) -> None:
    if not future.cancelled() and future.exception() is None:
        end(future.result())


def _running_trio() -> Any:
    """The module, when its event loop is the one that runs here."""
    trio = sys.modules.get("trio")
    return trio if trio is not None and trio.lowlevel.in_trio_run() else None


async def ready(fd: int, side: str) -> None:
    """Wait until a `side`, `reader` or `writer`, of `fd`, which stays open meanwhile, would not block."""
    trio = _running_trio()
    if trio is not None:
        waits = {"reader": trio.lowlevel.wait_readable, "writer": trio.lowlevel.wait_writable}
        await waits[side](fd)
        return
    import asyncio

    loop = asyncio.get_running_loop()
    may_go: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        if not may_go.done():
            may_go.set_result(None)

    getattr(loop, f"add_{side}")(fd, tell)
    try:
        await may_go
    finally:
        getattr(loop, f"remove_{side}")(fd)


def shield(future: Future[T]) -> Future[T]:
    """A future that may be cancelled without cancelling the work behind it."""
    outer: Future[T] = Future()

    def copy(done: Future[T]) -> None:
        if outer.cancelled() or not outer.set_running_or_notify_cancel():
            return
        error = done.exception()
        if error is not None:
            outer.set_exception(error)
        else:
            outer.set_result(done.result())

    future.add_done_callback(copy)
    return outer
