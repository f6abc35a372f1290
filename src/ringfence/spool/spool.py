"""All output of one exec, on disk."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from .order import ERR, OUT, Order, Place
from .reader import Reader
from .track import Track

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from .track import Budget

NAMES = ("stdout", "stderr")
_END = 1 << 62


class Spool:
    """Output of an exec. One thread writes; any number read, also in later processes.

    Args:
        directory: Its own; made with the first byte. Existing output is continued.
        limit: Bytes kept of each stream.
        totals: Of each stream, where they are known: bytes without a file were dropped.
        budget: Shared by all running execs, by this one until `settle`; None: no shared budget.

    Attributes:
        tracks: Standard output and standard error.
        totals: Bytes that came so far of each.
    """

    def __init__(
        self,
        directory: str,
        limit: int,
        totals: Place = (0, 0),
        budget: Budget | None = None,
    ) -> None:
        self.directory = directory
        is_new = not os.path.lexists(directory)
        self.tracks = (
            Track(directory, "o", limit, totals[OUT], budget, is_new=is_new),
            Track(directory, "e", limit, totals[ERR], budget, is_new=is_new),
        )
        # The totals visible to readers: raised only once the order file has the new bytes.
        self.totals: Place = (self.tracks[OUT].total, self.tracks[ERR].total)
        self._order = Order(os.path.join(directory, "order"), self.totals, is_new=is_new)
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []

    @property
    def closed(self) -> bool:
        """True if both streams have ended."""
        return self.tracks[OUT].closed and self.tracks[ERR].closed

    def take(self, stream: int, fd: int) -> int:
        """Move what a descriptor has now to disk; see `Track.take`. At its end the stream is closed."""
        count = self.tracks[stream].take(fd)
        if count:
            self._came(stream)
        else:
            self.close(stream)
        return count

    def feed(self, stream: int, data: bytes) -> None:
        """Add bytes that somebody has read."""
        if data:
            self.tracks[stream].feed(data)
            self._came(stream)

    def _came(self, stream: int) -> None:
        self._order.came(stream, self.totals)
        self.totals = (self.tracks[OUT].total, self.tracks[ERR].total)
        self._ring()

    def close(self, stream: int | None = None) -> None:
        """Nothing more will come, of one stream or of both; idempotent."""
        for number in (OUT, ERR) if stream is None else (stream,):
            self.tracks[number].close()
        self._ring()

    def settle(self) -> None:
        """It is over, and what is kept of it is counted elsewhere."""
        for track in self.tracks:
            track.settle()

    def listen(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have `callback` called, in the writer's thread, after each change; returns what ends that."""
        with self._lock:
            self._listeners = [*self._listeners, callback]

        def stop() -> None:
            with self._lock:
                self._listeners = [each for each in self._listeners if each is not callback]

        return stop

    def _ring(self) -> None:
        for callback in self._listeners:
            callback()

    def follow(self, place: Place = (0, 0), wanted: tuple[int, ...] = (OUT, ERR)) -> Follower:
        """Read streams, both in the order in which they came, from a place on."""
        return Follower(self, self._order, place, wanted)


@dataclass(frozen=True)
class Event:
    """Bytes of one of the streams, or the news that some are missing.

    Attributes:
        seq: How many bytes of the streams that are read came before it; ascending.
        stream: OUT or ERR.
        offset: Of the first byte, in its stream.
        dropped_bytes: Missing right before `offset`.
        place: To go on from after it.
    """

    seq: int
    stream: int
    offset: int
    data: bytes
    dropped_bytes: int
    place: Place


class Follower:
    """A place in both streams, or in one. Not thread-safe; close it, or use it as a context manager."""

    def __init__(self, spool: Spool, order: Order, place: Place, wanted: tuple[int, ...]) -> None:
        self._spool, self._order, self.place = spool, order, place
        # Of a stream that is not wanted everything has been read, as far as the order goes.
        self._skipped: Place = (0 if OUT in wanted else _END, 0 if ERR in wanted else _END)
        self._readers = (
            Reader(spool.tracks[OUT], place[OUT]),
            Reader(spool.tracks[ERR], place[ERR]),
        )

    def next(self, most: int) -> Event | None:
        """Read at most `most` bytes of one stream; None if nothing new has come."""
        skipped = self._skipped
        place = (max(self.place[OUT], skipped[OUT]), max(self.place[ERR], skipped[ERR]))
        run = self._order.next_run(place, self._spool.totals)
        if run is None:
            return None
        stream, end = run
        piece = self._readers[stream].next(min(most, end - place[stream]))
        if piece is None:
            return None
        before = 0 if skipped[1 - stream] else self.place[1 - stream]
        self.place = _with(self.place, stream, piece.end)
        seq = piece.offset + before
        return Event(seq, stream, piece.offset, piece.data, piece.dropped_bytes, self.place)

    def close(self) -> None:
        for reader in self._readers:
            reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def _with(place: Place, stream: int, offset: int) -> Place:
    return (offset, place[ERR]) if stream == OUT else (place[OUT], offset)
