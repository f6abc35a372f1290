"""`AsyncContext`: the surface of `Context` for asyncio and trio."""

from __future__ import annotations

import threading
from functools import partial

from ..model.base.helpful import helpful
from .context import Turn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Any, Protocol, TypeVar, Unpack

    from .context import CellParts, Context
    from .execution import Execution

    T = TypeVar("T")

    class InThread(Protocol):
        """A function that runs another one in a thread of its own."""

        def __call__(self, function: Callable[[], T]) -> Awaitable[T]:
            """Run it; a caller that is cancelled does not wait for its end."""
            ...


@helpful
class AsyncContext:
    """A live interpreter in a sandbox; see `Context`. Callbacks are called from another thread."""

    def __init__(self, context: Context, in_thread: InThread) -> None:
        self._context, self._in_thread = context, in_thread

    @property
    def id(self) -> str:
        """Of the exec that runs it."""
        return self._context.id

    @property
    def language(self) -> str:
        """Language of the cells."""
        return self._context.language

    @property
    def running(self) -> bool:
        """True until the interpreter has ended."""
        return self._context.running

    async def run(self, code: str, **options: Unpack[CellParts]) -> Execution:
        """Run a cell to its end; options as for `Context.run`. Cancelled, the cell is interrupted."""
        turn = Turn()
        follow = partial(self._context.follow, turn, code, **options)
        is_over = False

        def run() -> Execution:
            nonlocal is_over
            try:
                return follow()
            finally:
                is_over = True

        try:
            return await self._in_thread(run)
        finally:
            if not is_over:
                threading.Thread(target=self._context.abandon, args=(turn,), daemon=True).start()

    async def variables(self, *, timeout_s: float = 30.0) -> list[dict[str, str]]:
        """List the variables of the cells; see `Context.variables`."""
        return await self._in_thread(partial(self._context.variables, timeout_s=timeout_s))

    async def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the cell that runs."""
        await self._in_thread(self._context.interrupt)

    async def restart(self) -> None:
        """End the interpreter with all that it started, and begin a fresh one."""
        await self._in_thread(self._context.restart)

    async def close(self) -> None:
        """End it with everything that it started; idempotent."""
        await self._in_thread(self._context.close)

    async def __aenter__(self) -> AsyncContext:
        return self

    async def __aexit__(self, *_exc: Any) -> None:
        await self._in_thread(self._context.close)

    def __repr__(self) -> str:
        return f"<Async{repr(self._context)[1:]}"
