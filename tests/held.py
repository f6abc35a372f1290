"""A lock that another thread has: whoever wants it is known, without a thread and without waiting."""

from __future__ import annotations

from typing import Any


class HeldError(Exception):
    """It would wait."""


class Held:
    """A lock, or condition, that somebody else has from the time on that it was taken so often.

    Args:
        free: How often it can be had before.
    """

    def __init__(self, inner: Any, free: int = 0) -> None:
        self._inner, self._free = inner, free

    def acquire(self, *args: Any, **options: Any) -> bool:
        if not self._free:
            raise HeldError
        self._free -= 1
        return bool(self._inner.acquire(*args, **options))

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self._inner.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def state_of(thing: object, lock: str) -> dict[str, str]:
    """All that is in it, but for its lock."""
    return {name: repr(value) for name, value in vars(thing).items() if name != lock}
