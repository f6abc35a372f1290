"""Worker threads for an event loop: `ThreadPoolExecutor` without the parts that one loop does not
need.

A call through the library's executor makes two futures, a condition and four locks, and whichever
thread has waited longest gets it. Here the one that worked last does, whose memory is still at hand.
"""

from __future__ import annotations

import asyncio
import threading
from _thread import allocate_lock
from collections import deque
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, TypeVar

    T = TypeVar("T")


class _Call:
    __slots__ = ("args", "error", "function", "future", "loop", "more", "value")

    def __init__(
        self, function: Callable[..., Any], args: Sequence[Any], more: Mapping[str, Any]
    ) -> None:
        self.function, self.args, self.more = function, args, more
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.value: Any = None
        self.error: BaseException | None = None

    def make(self) -> None:
        if self.future.cancelled():
            return  # nobody waits for it any more, and it has not begun
        try:
            self.value = self.function(*self.args, **self.more)
        except BaseException as exc:  # noqa: BLE001  it is of whoever waits
            self.error = exc

    def tell(self) -> None:
        with suppress(RuntimeError):  # the loop is over
            self.loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        error, self.error = self.error, None
        if self.future.cancelled():
            return
        if error is None:
            self.future.set_result(self.value)
        else:
            self.future.set_exception(error)


class _Worker:
    def __init__(self, workers: Workers, first: _Call, name: str) -> None:
        self._workers, self._call = workers, first
        self._awake = allocate_lock()
        self._awake.acquire()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def give(self, call: _Call | None) -> None:
        """Something to do; None ends it. Preconditions: it is idle."""
        self._next = call
        self._awake.release()

    def _run(self) -> None:
        call: _Call | None = self._call
        del self._call
        while call is not None:
            call.make()
            # First this: who is told of the result and goes on to the next call finds us idle.
            following = self._workers.next_for(self)
            call.tell()
            call = following
            if call is None:
                self._awake.acquire()
                call, self._next = self._next, None


class Workers:
    """Up to `most` threads, made when they are needed. Of one event loop.

    Nobody waits for them at the end of the process: what they do then is cut off.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name, self._made = most, name, 0
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._waiting: deque[_Call] = deque()
        self._closed = False

    async def do(
        self, function: Callable[..., T], args: Sequence[Any] = (), more: Mapping[str, Any] = {}
    ) -> T:
        """`function(*args, **more)` in one of the threads, or when one comes free."""
        call = _Call(function, args, more)
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name} takes no more")
            worker = self._idle.pop() if self._idle else None
            is_new = worker is None and self._made < self._most
            if is_new:
                self._made += 1
            elif worker is None:
                self._waiting.append(call)
        if worker is not None:
            worker.give(call)
        elif is_new:
            _Worker(self, call, f"{self._name}_{self._made}")
        try:
            found: T = await call.future
            return found
        finally:
            del call  # it has an error whose traceback has this frame

    def next_for(self, worker: _Worker) -> _Call | None:
        """Take the call that waits longest; without one, the worker becomes idle."""
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            if self._closed:
                worker.give(None)
            else:
                self._idle.append(worker)
            return None

    def close(self) -> None:
        """Take no more; what waits is given up, and what runs ends by itself."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            waiting, self._waiting = self._waiting, deque()
        for worker in idle:
            worker.give(None)
        for call in waiting:
            with suppress(RuntimeError):  # the loop is over
                call.loop.call_soon_threadsafe(call.future.cancel)
