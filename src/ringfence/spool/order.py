"""In which order the bytes of two streams came. Pure, but for the file that remembers it.

Think of a path on squared paper: so many bytes of standard output to the right, so many of standard
error upwards. It is kept as its corners. To forget a corner loses the order of a few bytes, never a
byte: so the path is thinned when it has too many.
"""

from __future__ import annotations

import os
import struct

OUT, ERR = 0, 1
_CORNER = struct.Struct("<QQ")
_MOST_CORNERS = 16_384

Place = tuple[int, int]
"""Bytes of standard output and of standard error up to here."""


class Order:
    """The path, as far as it was seen to turn; after its last corner it goes on to the totals.

    Args:
        path: Of the file; made with the first turn. It is a help, not the truth: without room for it
            the order of what follows is forgotten, with the next process.
        is_new: There is none yet.
    """

    def __init__(self, path: str, totals: Place, *, is_new: bool = False) -> None:
        self._path = path
        self.corners = [] if is_new else _read(path, totals)
        self._last: int | None = None  # the stream that came last

    def came(self, stream: int, before: Place) -> None:
        """Bytes of `stream` came; up to them there were `before`."""
        last, self._last = self._last, stream
        turned = last != stream if last is not None else before != (0, 0)
        if not turned or self.corners[-1:] == [before]:
            return
        self.corners.append(before)
        if len(self.corners) > _MOST_CORNERS:
            self.corners = self.corners[1::2]
            self._write(self.corners, anew=True)
        else:
            self._write([before])

    def next_run(self, place: Place, totals: Place) -> tuple[int, int] | None:
        """Find the next run after `place`: its stream, and the offset where it ends.

        None at the totals. A place beside the path is led back to it: each byte comes once.
        """
        corners = self.corners
        low, high = 0, len(corners)
        while low < high:  # the first corner that is not behind us
            middle = (low + high) // 2
            if corners[middle][OUT] > place[OUT] or corners[middle][ERR] > place[ERR]:
                high = middle
            else:
                low = middle + 1
        for corner in (*corners[low : low + 1], totals):
            for stream in (OUT, ERR):
                # The writer may have turned since the totals were read: a run is never empty.
                end = min(corner[stream], totals[stream])
                if end > place[stream]:
                    return stream, end
        return None

    def _write(self, corners: list[Place], *, anew: bool = False) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_APPEND
        data = b"".join(_CORNER.pack(*corner) for corner in corners)
        path = self._path + ".new" if anew else self._path
        try:
            fd = os.open(path, flags | (os.O_TRUNC if anew else 0), 0o600)
            try:
                os.write(fd, data)
            finally:
                os.close(fd)
            if anew:
                os.replace(path, self._path)
        except OSError:
            pass  # see above


def _read(path: str, totals: Place) -> list[Place]:
    """The corners in the file, as far as they make a path that ends before the totals."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError:
        return []
    corners: list[Place] = []
    for out, err in _CORNER.iter_unpack(data[: len(data) // _CORNER.size * _CORNER.size]):
        before = corners[-1] if corners else (0, 0)
        if not (before[OUT] <= out <= totals[OUT] and before[ERR] <= err <= totals[ERR]):
            break
        corners.append((out, err))
    return corners
