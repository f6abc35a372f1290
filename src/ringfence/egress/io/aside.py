"""A coroutine that runs beside the task that started it, and no longer than that one wants."""

from __future__ import annotations

from .loop import Task, current, pause

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any, Self


class _Failed(BaseException):
    """Thrown into the block: not for those in it who catch errors of their own making."""


class Aside:
    """`async with Aside(coroutine):` runs it beside the block, and ends it with the block.

    What it raises ends the block, and is raised by it.
    """

    __slots__ = ("_coroutine", "_failed", "_parent", "_task")

    def __init__(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._coroutine = coroutine
        self._failed = _Failed()

    async def __aenter__(self) -> Self:
        self._parent = current()
        self._task = Task(self._parent.loop, self._coroutine)
        self._task.on_done = self._ended
        self._task.step()
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _where: object) -> None:
        """Return once it has ended: a stream has one reader at a time."""
        self._parent.forgive(self._failed)
        self._task.on_done = self._parent.wake
        self._task.cancel()
        interrupted: BaseException | None = None
        while not self._task.done:
            try:
                await pause()
            except BaseException as exc:  # noqa: BLE001  raised once it has ended
                interrupted = exc
        if interrupted is not None:
            raise interrupted
        if error is self._failed and self._task.error is not None:
            raise self._task.error from None

    def _ended(self) -> None:
        if self._task.error is not None:
            self._parent.interrupt(self._failed)
