"""Bounded storage of a stream: head and tail are kept, the bytes between are counted."""

from __future__ import annotations

import errno
import os
import select
import threading
import time

from .reader import Reader
from .segments import Segments


class Budget:
    """Bytes that may still be kept. Thread-safe; a few writers at once may overdraw it by a piece each."""

    def __init__(self, limit_bytes: int) -> None:
        self._lock, self._left = threading.Lock(), limit_bytes

    @property
    def left(self) -> int:
        """At least 0."""
        return max(0, self._left)

    def spend(self, count: int) -> None:
        """So many more are on disk; fewer, where it is negative."""
        with self._lock:
            self._left -= count


PLENTY = 1 << 62
EXHAUSTED = "as much is kept of what runs as may be"


_MOST = 1 << 20  # moved at once: what a pipe holds that was grown
_READ = 1 << 16
_SMALLEST, _LARGEST = 1 << 16, 8 << 20  # of the tail's files
_FILES_OF_TAIL = 8
_MOST_FILES = 64
_AGAIN_S = 1.0  # after a disk was full


class Track:
    """Output of a process on one stream, at most `limit` bytes of it on disk.

    One thread writes; any thread reads. Neither waits for the other.

    Args:
        is_new: The directory does not exist yet, so it is not searched.

    Attributes:
        total: Bytes that came, kept or not.
        closed: Nothing more will come.
        unwritten_bytes: Of those that came, dropped because the disk had no room for them.
        fault: The disk's error message for those; empty when there was none.
    """

    def __init__(
        self,
        directory: str,
        name: str,
        limit: int,
        total: int = 0,
        budget: Budget | None = None,
        *,
        is_new: bool = False,
    ) -> None:
        self._budget = budget or Budget(PLENTY)
        self.segments = Segments(directory, name, []) if is_new else Segments.found(directory, name)
        self.head_limit, self.tail_limit = limit - limit // 2, limit // 2
        self._file_bytes = min(max(self.tail_limit // _FILES_OF_TAIL, _SMALLEST), _LARGEST)
        self.total = max(total, self.segments.end)
        self.closed = False
        self.unwritten_bytes, self.fault = 0, ""
        self._splices, self._retry_at = True, 0.0
        self._budget.spend(self.kept_bytes)

    # -- writing ------------------------------------------------------------------------------

    def take(self, fd: int) -> int:
        """Move what a pipe or terminal has now to disk; how many bytes, 0 at its end.

        A full disk stops nothing: what finds no room is dropped and counted.

        Raises:
            BlockingIOError: It has nothing now.
        """
        # No file before the first byte: many a stream never has one.
        if not self.segments.is_open and not _has_bytes(fd):
            return 0
        if self._splices and (room := self._room()):
            try:
                count = self.segments.splice(fd, min(room, _MOST))
            except BlockingIOError:
                raise
            except OSError as exc:
                if exc.errno == errno.EBADF:
                    raise
                if exc.errno == errno.EINVAL:
                    self._splices = False
                else:
                    self._at_fault(exc)
            else:
                self._budget.spend(count)
                self._advance(count)
                return count
        try:
            data = os.read(fd, _READ)
        except BlockingIOError:
            raise
        except OSError as exc:
            if exc.errno != errno.EIO:
                raise
            data = b""  # a terminal whose other side is closed
        self.feed(data)
        return len(data)

    def feed(self, data: bytes) -> None:
        """Add bytes that somebody has read."""
        view = memoryview(data)
        while view:
            room = self._room()
            try:
                count = self.segments.write(view[:room]) if room else 0
            except OSError as exc:
                self._at_fault(exc)
                count = 0
            self._budget.spend(count)
            if not count:
                missing = self.total < self.head_limit or self.tail_limit > 0
                self.unwritten_bytes += len(view) if missing else 0
                count = len(view)
            self._advance(count)
            view = view[count:]

    def close(self) -> None:
        """Nothing more will come."""
        self.segments.finish()
        self.closed = True

    def settle(self) -> None:
        """Stop charging the kept bytes to the budget of running execs."""
        self._budget.spend(-self.kept_bytes)
        self._budget = Budget(PLENTY)

    def _room(self) -> int:
        """How much may be added to the last file, which is made or opened if need be; 0 to drop."""
        if self._retry_at and time.monotonic() < self._retry_at:
            return 0
        head = self.total < self.head_limit
        if not head and not self.tail_limit:
            return 0
        left = self._budget.left
        if not left:
            self.fault = EXHAUSTED
            return 0
        try:
            start, end = self.segments.spans[-1] if self.segments.spans else (-1, -1)
            most = self.head_limit if start < self.head_limit else start + self._file_bytes
            if end == self.total and most > end:
                self.segments.resume()
            else:
                self.segments.begin(self.total)
                most = self.head_limit if head else self.total + self._file_bytes
        except OSError as exc:
            self._at_fault(exc)
            return 0
        return min(most - self.total, left)

    def _at_fault(self, exc: OSError) -> None:
        self.fault = os.strerror(exc.errno or errno.EIO)
        self._retry_at = time.monotonic() + _AGAIN_S

    def _advance(self, count: int) -> None:
        self.total += count
        spans = self.segments.spans
        while spans:
            first = sum(start < self.head_limit for start, _ in spans[:_MOST_FILES])
            too_old = first < len(spans) - 1 and spans[first][1] <= self.total - self.tail_limit
            if not too_old and len(spans) <= _MOST_FILES:
                return
            index = min(first, len(spans) - 2)
            self._budget.spend(spans[index][0] - spans[index][1])
            self.segments.drop(index)

    # -- looking ------------------------------------------------------------------------------

    @property
    def kept(self) -> list[tuple[int, int]]:
        """`[start, end)` of what is kept, ascending, neighbours joined."""
        joined: list[tuple[int, int]] = []
        for start, end in list(self.segments.spans):
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], end)
            elif end > start:
                joined.append((start, end))
        return joined

    @property
    def dropped_bytes(self) -> int:
        """How many bytes that came are kept no more, or never were."""
        total = self.total
        return total - self.kept_bytes

    @property
    def kept_bytes(self) -> int:
        return sum(end - start for start, end in list(self.segments.spans))

    def ends(self, limit: int) -> tuple[bytes, int]:
        """The first and the last bytes, `limit` at most, and how many of all are not among them."""
        total = self.total
        if total <= limit:
            kept = self._between(0, total)
        else:
            kept = self._between(0, limit - limit // 2) + self._between(total - limit // 2, total)
        return kept, total - len(kept)

    def _between(self, start: int, end: int) -> bytes:
        """Read the kept bytes of `[start, end)`."""
        pieces = []
        with Reader(self, start) as reader:
            while reader.offset < end and (piece := reader.next(end - reader.offset)):
                pieces.append(piece.data[: max(0, end - piece.offset)])
        return b"".join(pieces)


def _has_bytes(fd: int) -> bool:
    """Return whether a pipe or terminal has bytes now; False at its end.

    Poll, do not read: bytes read and not yet written are lost when this process is killed.

    Raises:
        BlockingIOError: It may have later.
        OSError: EBADF.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    for _, events in poll.poll(0):
        if events & select.POLLNVAL:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return bool(events & select.POLLIN)
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
