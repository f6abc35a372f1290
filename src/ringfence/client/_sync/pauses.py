"""Waiting: the counterpart of `_async.pauses`, written by hand."""

from __future__ import annotations

import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    from .transport import Transport

    T = TypeVar("T")

CANCELLABLE = False
"""Whether a call can be ended from outside while it waits."""


def twin(transport: Transport) -> Transport:
    """Itself: it does not await."""
    return transport


def let_go(_transport: Transport, _its_twin: Transport) -> None:
    """Nothing: they are one."""


def pause(seconds: float) -> None:
    """Wait."""
    time.sleep(seconds)


def to_the_end(function: Callable[[], T]) -> T:
    """Call it."""
    return function()


def made(make: Callable[[], T], _end: Callable[[T], None]) -> T:
    """What `make` makes."""
    return make()


def blocking(function: Callable[..., T], *args: Any) -> T:
    """Call it."""
    return function(*args)
