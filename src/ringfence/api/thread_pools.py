"""Thread pools for blocking calls: one sandbox's calls cannot starve those of others."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from concurrent.futures import Future

from ..errors import TooManyRequests
from .workers import Workers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    T = TypeVar("T")

CONTROL, COPIES, ENDING, BODIES = "control", "copies", "ending", "bodies"
PARSING = "parsing"  # of what pauses: nothing that is quick waits behind it
# Made when they are needed. More than one client may have requests (`Bounds.requests_of_client`): with
# every one of them stuck, there are threads for the others.
# What computes for bodies has few: as many as want the interpreter, the event loop waits for.
_THREADS = {CONTROL: 640, COPIES: 576, ENDING: 576, BODIES: 2, PARSING: 2}
_WIDTH = {
    CONTROL: 4,
    COPIES: 8,
    ENDING: 1,
    BODIES: 1,
    PARSING: 1,
}  # calls of one sandbox, or client, at once
_MOST_TASKS = 16  # helpers in one sandbox at once
_MOST_WAITING = 256  # calls of one sandbox


class _Queue:
    def __init__(self, width: int) -> None:
        self.semaphore = asyncio.Semaphore(width)
        self.users = 0


class ThreadPools:
    """Thread pools, one for each kind of call; termination has its own.

    Used by one event loop only.
    """

    def __init__(self) -> None:
        self._pools = {
            pool: Workers(count, name=f"ringfence-{pool}") for pool, count in _THREADS.items()
        }
        self._queues: dict[tuple[str, str], _Queue] = {}
        self._tasks: Counter[str] = Counter()

    async def call(
        self,
        function: Callable[..., T],
        *args: Any,
        key: str = "",
        pool: str = CONTROL,
        **more: Any,
    ) -> T:
        """`function(*args, **more)` in a thread of `pool`.

        Args:
            key: The sandbox it is about (of `parsing`, the client): its calls share a semaphore.
                Empty for none.

        Raises:
            TooManyRequests: Too many calls on the same sandbox wait already.
        """
        workers = self._pools[pool]
        if not key:
            return await workers.do(function, args, more)
        queue = self._queue(pool, key)
        queue.users += 1
        try:
            async with queue.semaphore:
                return await workers.do(function, args, more)
        finally:
            queue.users -= 1
            if not queue.users:
                self._queues.pop((pool, key), None)

    def begin_task(self, key: str) -> None:
        """Count a helper that starts in a sandbox.

        Raises:
            TooManyRequests: The sandbox already runs the most helpers.
        """
        if self._tasks[key] >= _MOST_TASKS:
            raise TooManyRequests(f"{_MOST_TASKS} transfers of sandbox {key} are in progress")
        self._tasks[key] += 1

    def end_task(self, key: str) -> None:
        self._tasks[key] -= 1
        if not self._tasks[key]:
            del self._tasks[key]

    async def alone(self, function: Callable[..., T], *args: Any) -> T:
        """`function(*args)` in a thread of its own: it may have to wait for a sandbox that is frozen."""
        made: Future[T] = Future()

        def run() -> None:
            try:
                made.set_result(function(*args))
            except BaseException as exc:  # noqa: BLE001
                made.set_exception(exc)

        threading.Thread(target=run, name="ringfence-alone", daemon=True).start()
        return await asyncio.wrap_future(made)

    def later(self, function: Callable[[], object]) -> None:
        """`function()` in a thread of its own; nobody waits for it or hears how it went."""
        threading.Thread(target=function, name="ringfence-later", daemon=True).start()

    def _queue(self, pool: str, key: str) -> _Queue:
        queue = self._queues.get((pool, key))
        if queue is None:
            queue = self._queues[pool, key] = _Queue(_WIDTH[pool])
        if queue.users >= _MOST_WAITING:
            raise TooManyRequests(f"{queue.users} calls are waiting for sandbox {key}")
        return queue

    def close(self) -> None:
        """Take no more; what runs ends by itself."""
        for pool in self._pools.values():
            pool.close()
