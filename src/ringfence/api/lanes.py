"""Threads for calls that block, in lanes: whatever one sandbox does, the others' calls go on."""

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
_MOST_ERRANDS = 16  # helpers in one sandbox at once
_MOST_WAITING = 256  # calls of one sandbox


class _Gate:
    """One sandbox's share of a lane."""

    def __init__(self, width: int) -> None:
        self.semaphore = asyncio.Semaphore(width)
        self.users = 0


class Lanes:
    """One pool of threads for each kind of call; ending things has threads of its own.

    Of one event loop only.
    """

    def __init__(self) -> None:
        self._pools = {
            lane: Workers(count, name=f"ringfence-{lane}") for lane, count in _THREADS.items()
        }
        self._gates: dict[tuple[str, str], _Gate] = {}
        self._errands: Counter[str] = Counter()

    async def call(
        self,
        function: Callable[..., T],
        *args: Any,
        key: str = "",
        lane: str = CONTROL,
        **more: Any,
    ) -> T:
        """`function(*args, **more)` in a thread of `lane`.

        Args:
            key: The sandbox it is about (of `parsing`, the client): its calls share a narrow gate.
                Empty for none.

        Raises:
            TooManyRequests: Too many calls on the same sandbox wait already.
        """
        workers = self._pools[lane]
        if not key:
            return await workers.do(function, args, more)
        gate = self._gate(lane, key)
        gate.users += 1
        try:
            async with gate.semaphore:
                return await workers.do(function, args, more)
        finally:
            gate.users -= 1
            if not gate.users:
                self._gates.pop((lane, key), None)

    def begin_errand(self, key: str) -> None:
        """One more helper in a sandbox.

        Raises:
            TooManyRequests: There are as many as there may be.
        """
        if self._errands[key] >= _MOST_ERRANDS:
            raise TooManyRequests(
                f"{_MOST_ERRANDS} transfers of sandbox {key} are under way already"
            )
        self._errands[key] += 1

    def end_errand(self, key: str) -> None:
        """One less."""
        self._errands[key] -= 1
        if not self._errands[key]:
            del self._errands[key]

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

    def _gate(self, lane: str, key: str) -> _Gate:
        gate = self._gates.get((lane, key))
        if gate is None:
            gate = self._gates[lane, key] = _Gate(_WIDTH[lane])
        if gate.users >= _MOST_WAITING:
            raise TooManyRequests(f"{gate.users} calls wait for sandbox {key} already")
        return gate

    def close(self) -> None:
        """Take no more; what runs ends by itself."""
        for pool in self._pools.values():
            pool.close()
