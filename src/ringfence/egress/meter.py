"""How much one sandbox may move, and how fast; what it has moved."""

from __future__ import annotations

from _collections import deque
from time import monotonic

from .io.loop import current, pause

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .io.loop import Loop, Timer
    from .io.streams import Stream

SPENT = "the sandbox has used up its network bytes"
_TICK_S = 0.01  # those that wait for the rate are looked at this often
_BURST_S = 0.1  # what was not used for so long may be used at once


class Rate:
    """A budget that refills: `per_s` a second, at most `burst` saved up. None: no limit."""

    def __init__(self, per_s: float | None, burst: float) -> None:
        self.per_s = per_s
        self._burst = max(burst, 1.0)
        self._saved = self._burst
        self._at = monotonic()

    def available(self) -> int:
        """Whole units that may be spent now."""
        if self.per_s is None:
            return 1 << 62
        now = monotonic()
        self._saved = min(self._burst, self._saved + (now - self._at) * self.per_s)
        self._at = now
        return max(0, int(self._saved))

    def spend(self, units: int) -> None:
        """Units that were used; may go below zero, and then takes longer to recover."""
        if self.per_s is not None:
            self._saved -= units

    def take(self) -> bool:
        """Spend one unit, if there is one."""
        if self.available() < 1:
            return False
        self.spend(1)
        return True


class Meter:
    """Of one sandbox; all its connections ask it.

    Args:
        total_bytes: Of both directions together, over the whole life; None: no limit.
        bytes_per_s: Of both directions together.
    """

    def __init__(
        self, loop: Loop, *, total_bytes: int | None = None, bytes_per_s: int | None = None
    ) -> None:
        self._loop = loop
        self.moved_bytes = 0
        self._waiting: deque[Callable[[], None]] = deque()
        self._timer: Timer | None = None
        self.limit(total_bytes, bytes_per_s)

    def limit(self, total_bytes: int | None, bytes_per_s: int | None) -> None:
        """Set the limits anew; what was moved stays counted."""
        self._total_bytes = total_bytes
        self._rate = Rate(bytes_per_s, (bytes_per_s or 0) * _BURST_S)
        self._is_free = total_bytes is None and bytes_per_s is None

    @property
    def is_spent(self) -> bool:
        """True once the total of bytes is used up."""
        return self._total_bytes is not None and self.moved_bytes >= self._total_bytes

    def at_once(self, most: int) -> int:
        """How much may be moved now, for who does not wait."""
        return most if self._is_free else self.grant(most, _do_nothing)

    def grant(self, most: int, again: Callable[[], None]) -> int:
        """How much may be moved now.

        At 0, `again` will be called once more may be; never, when all is spent.
        """
        if self._is_free:
            return most
        if self._total_bytes is not None:
            most = min(most, self._total_bytes - self.moved_bytes)
            if most <= 0:
                return 0
        most = min(most, self._rate.available())
        if most <= 0:
            self._waiting.append(again)
            if self._timer is None:
                self._timer = self._loop.later(_TICK_S, self._tick)
        return most

    def count(self, moved: int) -> None:
        """Bytes that were moved, after they were granted."""
        self.moved_bytes += moved
        if not self._is_free:
            self._rate.spend(moved)

    async def allowance(self, most: int) -> int:
        """As `grant`, but waits.

        Raises:
            OSError: All is spent.
        """
        task = current()
        while True:
            granted = self.grant(most, task.wake)
            if granted > 0:
                return granted
            if self.is_spent:
                raise OSError(SPENT)
            await pause()

    def _tick(self) -> None:
        """Let those that wait look again, in the order in which they came."""
        self._timer = None
        for _ in range(len(self._waiting)):
            self._waiting.popleft()()


def _do_nothing() -> None:
    pass


class Metered:
    """A stream whose reads are asked for and counted.

    Args:
        counted: Told of bytes that were read.
    """

    def __init__(self, stream: Stream, meter: Meter, counted: Callable[[int], None]) -> None:
        self._stream, self._meter, self._counted = stream, meter, counted

    async def read(self, most: int) -> bytes:
        data = await self._stream.read(await self._meter.allowance(most))
        self._meter.count(len(data))
        self._counted(len(data))
        return data

    async def write(self, data: bytes) -> None:
        await self._stream.write(data)

    async def end(self) -> None:
        await self._stream.end()

    def close(self) -> None:
        self._stream.close()

    def abort(self) -> None:
        self._stream.abort()
