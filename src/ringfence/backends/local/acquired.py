"""Giving back, step by step, what a sandbox has of the host.

Kept separate: the creates of one backend and the ends of all use it.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class Acquired:
    """Stack of callbacks that give back what was acquired, last first, all of them whichever fails.

    As `contextlib.ExitStack`, which takes longer to import.
    """

    def __init__(self) -> None:
        self._callbacks: list[tuple[Callable[..., object], tuple[object, ...]]] = []

    def callback(self, function: Callable[..., object], *args: object) -> None:
        """Call it at the end of the block, also of one that did not fail."""
        self._callbacks.append((function, args))

    def pop_all(self) -> None:
        """Leave everything to a new owner."""
        self._callbacks.clear()

    def __enter__(self) -> Acquired:
        return self

    def __exit__(self, *_: object) -> None:
        if self._callbacks:
            function, args = self._callbacks.pop()
            try:
                function(*args)
            finally:
                self.__exit__()
