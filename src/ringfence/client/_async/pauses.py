"""Waiting, under whatever event loop runs this."""

from __future__ import annotations

import anyio
import anyio.to_thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Any, TypeVar

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


async def pause(seconds: float) -> None:
    """Wait."""
    await anyio.sleep(seconds)


async def to_the_end(function: Callable[[], Awaitable[T]]) -> T:
    """Call it, and see it through although the caller is being cancelled."""
    with anyio.CancelScope(shield=True):
        result = await function()
    return result  # noqa: RET504  the type checker does not see that the scope swallows nothing


async def blocking(function: Callable[..., T], *args: Any) -> T:
    """Call what blocks, elsewhere."""
    return await anyio.to_thread.run_sync(function, *args, abandon_on_cancel=True)
