"""Bound on the event loop's time spent on data from guests and clients.

Parsing a byte costs a guest nothing and this process microseconds: whoever sends frames or chunks of one
byte each would have the loop for itself. So what is parsed on the loop is parsed in small slices, and
slices wait for their turn when their share of the time is used up. Meanwhile nothing more is read.
Turns are by start-time fair queueing (Goyal, Vin, Cheng, 1996): a connection that has sent little goes
before the next slices of those that send much.
To read at all costs as much as to parse: connections that send many small pieces of something are read
in turn, so many of them in a second together.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    T = TypeVar("T")

MESSAGE_S = 100e-6
"""About what one message costs on its way through."""
_SHARE = 0.5
_BURST_S = 0.002
_SLICE_S = 0.001  # charged for a slice until it is known what it cost
_LEAST_BYTES = 256
_UNREAD = 1 << 16
_SMALL_READ = 1024  # bytes
_FREE_READS = 16  # small ones of a connection, until something is complete
# Of all connections together: one that finds 300 sends takes the kernel 0.4 ms.
_BETWEEN_READS_S = 0.002


class LoopShare:
    """Semaphore over the event loop's time: work begins in turns while its time is within the share.

    Used by one event loop only.
    """

    def __init__(self) -> None:
        self._credit_s, self._at = _BURST_S, time.monotonic()
        self._waiting: list[tuple[float, int, asyncio.Future[None], float]] = []  # a heap
        self._numbers = itertools.count()
        self._due = 0.0  # that of the work that began last
        self._timer: asyncio.TimerHandle | None = None
        self._next_read = 0.0

    @property
    def is_free(self) -> bool:
        """True if work may begin now."""
        return not self._waiting and self._credit() > 0

    async def take(self, cost_s: float = MESSAGE_S, due: float = 0.0) -> float:
        """Wait until work may begin that takes about `cost_s`; return when more of the same is due.

        Args:
            due: What the call before has returned for this connection; what is due first goes first.
        """
        is_first, due = not due, max(due, self._due)
        if self.is_free:
            self._credit_s -= cost_s
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (due, next(self._numbers), turn, cost_s))
            self._set_timer()
            await turn
        # The first work of each moves the time on as well: else what is due later would wait for as long as
        # new connections come.
        self._due = max(self._due, due + cost_s if is_first else due)
        return due + cost_s

    async def run(self, work: Callable[[], T], cost_s: float = MESSAGE_S) -> T:
        """Do on the loop, in its turn, what takes a short while that nobody knows before.

        Args:
            cost_s: What its result costs besides, on its further way.
        """
        await self.take(cost_s)
        began = time.monotonic()
        try:
            return work()
        finally:
            self.charge(time.monotonic() - began)

    def charge(self, seconds: float) -> None:
        """Count what work has taken, or has taken less than was asked for."""
        self._credit_s -= seconds
        if self._timer is not None and self._credit_s > 0:  # sooner than had been thought
            self._timer.cancel()
            self._wake()

    def read_in_s(self) -> float:
        """Take the next turn to read; in how many seconds it is. Turns are evenly spaced."""
        now = time.monotonic()
        self._next_read = max(now, self._next_read + _BETWEEN_READS_S)
        return self._next_read - now

    def _credit(self) -> float:
        now = time.monotonic()
        self._credit_s = min(_BURST_S, self._credit_s + (now - self._at) * _SHARE)
        self._at = now
        return self._credit_s

    def _set_timer(self) -> None:
        if self._timer is None and self._waiting:
            delay_s = max(0.0, -self._credit_s) / _SHARE
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        while self._waiting and self._credit() > 0:
            _due, _number, turn, cost_s = heapq.heappop(self._waiting)
            if not turn.done():  # cancelled
                self._credit_s -= cost_s
                turn.set_result(None)
        self._set_timer()


class Valve:
    """A transport that is read while both its protocol and the slices of it want more.

    Attributes:
        wanted: Set while the protocol wants more.
        answering: The protocol parses, and what it writes answers that by itself: a pong, say.
    """

    answering = False

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.wanted = asyncio.Event()
        self.wanted.set()
        self._is_held, self._is_reading = False, True

    def pause_reading(self) -> None:
        """For the protocol: see `asyncio.ReadTransport`."""
        self.wanted.clear()
        self._turn()

    def resume_reading(self) -> None:
        self.wanted.set()
        self._turn()

    def hold(self, is_held: bool) -> None:
        """Read nothing until this is taken back, whatever the protocol wants."""
        self._is_held = is_held
        self._turn()

    def _turn(self) -> None:
        reading = self.wanted.is_set() and not self._is_held
        if reading == self._is_reading or self._transport.is_closing():
            return
        self._is_reading = reading
        if reading:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def write(self, data: Any) -> None:
        """Send. Answers to who reads none are dropped: they would be kept here without a bound."""
        if not self.answering or self._transport.get_write_buffer_size() < _UNREAD:
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class InSlices(asyncio.Protocol):
    """Mix-in of a protocol: gives it what comes in slices, each in its turn.

    Attributes:
        share: What the slices wait for.
        most_bytes: Of a slice. Of the least that can be sent, parsing so many takes 20 ms at most.
    """

    share: LoopShare
    most_bytes = 2048
    valve: Valve
    _slice_bytes = _LEAST_BYTES
    _pending, _at = b"", 0
    _small_reads = 0
    _due = 0.0
    _feeding: asyncio.Task[None] | None = None

    def connection_made(self, transport: Any) -> None:
        self.valve = Valve(transport)
        super().connection_made(self.valve)  # type: ignore[arg-type]  # it acts as one

    def connection_lost(self, exc: Exception | None) -> None:
        self.drop_pending()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what is little at once, unless others wait, or it comes in too many pieces."""
        self._small_reads += len(data) < _SMALL_READ
        is_often = self._small_reads > _FREE_READS
        is_next = self._feeding is None and len(data) <= self.most_bytes and not is_often
        if is_next and self.share.is_free:
            self.share.charge(self._parse(data))
            return
        self._pending = self._pending[self._at :] + data
        self._at = 0
        self.valve.hold(True)
        if self._feeding is None:
            wait_s = self.share.read_in_s() if is_often else 0.0
            self._feeding = asyncio.get_running_loop().create_task(self._feed(wait_s))

    def complete(self) -> None:
        """For the protocol: what came is a whole message, or a whole head of one."""
        self._small_reads = 0

    def parse(self, data: bytes) -> None:
        """Parse a slice; it is what `data_received` is without this mix-in."""
        super().data_received(data)

    @property
    def is_behind(self) -> bool:
        """True while received data is not parsed yet."""
        return self._feeding is not None

    def drop_pending(self) -> None:
        """Forget what was not parsed yet; what comes from now on is."""
        self._pending, self._at = b"", 0
        feeding, self._feeding = self._feeding, None
        if feeding is not None and feeding is not asyncio.current_task():
            feeding.cancel()
        self.valve.hold(False)

    def _parse(self, data: bytes) -> float:
        """Parse; how long it took."""
        began = time.monotonic()
        self.valve.answering = True
        try:
            self.parse(data)
        finally:
            self.valve.answering = False
        return time.monotonic() - began

    async def _feed(self, wait_s: float) -> None:
        if wait_s:
            await asyncio.sleep(wait_s)
        while self._at < len(self._pending) and not self.valve.is_closing():
            while not self.valve.wanted.is_set():
                await self.valve.wanted.wait()
            self._due = await self.share.take(_SLICE_S, self._due)
            piece = self._pending[self._at : self._at + self._slice_bytes]
            self._at += len(piece)
            spent_s = self._parse(piece) if piece else 0.0
            self.share.charge(spent_s - _SLICE_S)
            self._due += spent_s - _SLICE_S
            wanted = self._slice_bytes * 2 if spent_s < _SLICE_S else self._slice_bytes // 4
            self._slice_bytes = max(_LEAST_BYTES, min(self.most_bytes, wanted))
        self.drop_pending()
