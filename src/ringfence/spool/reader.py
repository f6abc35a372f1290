"""Reading a stream from any offset: every byte that is kept once, and what is missing counted."""

from __future__ import annotations

import os
from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self

    from .track import Track


@dataclass(frozen=True)
class Piece:
    """Bytes of a stream.

    Attributes:
        offset: Of the first of `data`.
        dropped_bytes: Missing right before it, since the last piece.
    """

    offset: int
    data: bytes
    dropped_bytes: int = 0

    @property
    def end(self) -> int:
        """The offset after the last byte."""
        return self.offset + len(self.data)


class Reader:
    """A place in a stream. Not thread-safe; close it, or use it as a context manager.

    It keeps the file open that it is in: what is dropped meanwhile is still read to that file's end.

    Attributes:
        offset: Of the next byte. It may lie beyond what has come so far.
    """

    def __init__(self, track: Track, offset: int) -> None:
        self.track, self.offset = track, offset
        self._fd, self._start = -1, 0

    def next(self, most: int) -> Piece | None:
        """Read at most `most` bytes; None if nothing new has come.

        `data` is empty where everything up to the present was dropped.
        """
        # The total first: bytes dropped during this loop must not count as yet to come.
        total, dropped = self.track.total, 0
        while self.offset < total:
            data = os.pread(self._fd, most, self.offset - self._start) if self._fd >= 0 else b""
            if data:
                piece = Piece(self.offset, data, dropped)
                self.offset = piece.end
                return piece
            there = self._open_next(total)
            dropped += there - self.offset
            self.offset = there
        return Piece(self.offset, b"", dropped) if dropped else None

    def _open_next(self, total: int) -> int:
        """Open the file of the next byte that is kept, at or after ours; its offset."""
        self.close()
        for start, end in list(self.track.segments.spans):
            if self.offset >= end:
                continue
            try:
                self._fd, self._start = self.track.segments.open(start), start
            except FileNotFoundError:
                # Dropped by the writer just now, or removed by somebody else.
                continue
            return max(start, self.offset)
        return total

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
