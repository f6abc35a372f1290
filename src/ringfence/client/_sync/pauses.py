"""Waiting: the counterpart of `_async.pauses`, written by hand."""

from __future__ import annotations

import time
import weakref

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    import httpx2

    from .transport import Transport

    T = TypeVar("T")

CANCELLABLE = False
"""False: a blocking call cannot be cancelled from outside while it waits."""


def make_blocking(transport: Transport) -> Transport:
    """Itself: it does not await."""
    return transport


def let_go(_transport: Transport, _blocking: Transport) -> None:
    """Nothing: they are one."""


def close_when_dropped(transport: Transport, client: httpx2.Client) -> None:
    """Close the connections with their last owner: sandboxes of a server may outlive all who knew them."""
    weakref.finalize(transport, client.close).atexit = False


def pause(seconds: float) -> None:
    """Wait."""
    time.sleep(seconds)


def to_the_end(function: Callable[[], T]) -> T:
    """Call it."""
    return function()


def made(make: Callable[[], T], _end: Callable[[T], None]) -> T:
    """Run `make`; a blocking caller cannot be cancelled."""
    return make()


def blocking(function: Callable[..., T], *args: Any) -> T:
    """Call it."""
    return function(*args)
