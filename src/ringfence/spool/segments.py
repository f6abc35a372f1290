"""The files of one stream, each named by the offset of its first byte.

Names and lengths are the whole truth: a writer that was killed leaves nothing to repair, and what is
missing between two files was dropped.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self

_WRITE = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_SPLICE_F_NONBLOCK = 2  # include/linux/splice.h
_DIGITS = 16


class Segments:
    """Files `DIRECTORY/NAME-OFFSET`, contiguous or with gaps, written by one thread.

    Attributes:
        spans: `[start, end)` of each file, ascending. Other threads may copy the list at any moment:
            every change is one operation on it.
    """

    def __init__(self, directory: str, name: str, spans: list[tuple[int, int]]) -> None:
        self.directory, self.name, self.spans = directory, name, spans
        self._fd = -1

    @classmethod
    def found(cls, directory: str, name: str) -> Self:
        """Find the existing segments; none if the directory does not exist."""
        sizes: dict[int, int] = {}
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    stem, _, offset = entry.name.rpartition("-")
                    if stem == name and len(offset) == _DIGITS:
                        sizes[int(offset, 16)] = entry.stat(follow_symlinks=False).st_size
        except FileNotFoundError:
            pass
        return cls(directory, name, [(at, at + size) for at, size in sorted(sizes.items())])

    @property
    def end(self) -> int:
        """The offset after the last byte that is kept."""
        return self.spans[-1][1] if self.spans else 0

    @property
    def is_open(self) -> bool:
        """True while a file is open for writing."""
        return self._fd >= 0

    def begin(self, start: int) -> None:
        """Write a new file from here on, for what begins at `start`, which is not before `end`.

        Raises:
            OSError: ENOSPC or EDQUOT: no room for it.
        """
        self.finish()
        path = self._path(start)
        try:
            self._fd = os.open(path, _WRITE, 0o600)
        except FileNotFoundError:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            self._fd = os.open(path, _WRITE, 0o600)
        if (start, start) not in self.spans[-1:]:
            self.spans.append((start, start))

    def resume(self) -> None:
        """Write on where the last file ends.

        Raises:
            OSError: As `begin`; ENOENT: somebody removed it.
        """
        if self._fd < 0:
            self._fd = os.open(self._path(self.spans[-1][0]), _WRITE & ~os.O_CREAT)

    def splice(self, pipe: int, most: int) -> int:
        """Move bytes from a pipe to the last file; 0 at the end of the pipe.

        They go from one to the other inside the kernel: whoever kills this process at any moment
        finds each of them in one of the two.

        Raises:
            BlockingIOError: The pipe is empty.
            OSError: EINVAL: not a pipe, or a file system that cannot. ENOSPC, EDQUOT, EIO: not
                written; what was not moved is still in the pipe.

        Source: splice(2).
        """
        start, end = self.spans[-1]
        at = end - start
        count = os.splice(pipe, self._fd, most, offset_dst=at, flags=_SPLICE_F_NONBLOCK)
        self.spans[-1] = (start, end + count)
        return count

    def write(self, data: memoryview) -> int:
        """Add bytes to the last file; how many of them.

        Raises:
            OSError: As `splice`; nothing was written.
        """
        start, end = self.spans[-1]
        count = os.pwrite(self._fd, data, end - start)
        self.spans[-1] = (start, end + count)
        return count

    def drop(self, index: int) -> None:
        """Remove the file at `index`; whoever has it open can read it to its end."""
        start, _ = self.spans.pop(index)
        try:
            os.unlink(self._path(start))
        except FileNotFoundError:
            pass  # somebody cleared the directory

    def open(self, start: int) -> int:
        """A descriptor to read the file that begins at `start` with.

        Raises:
            FileNotFoundError: It was dropped.
        """
        return os.open(self._path(start), _READ)

    def finish(self) -> None:
        """Close the file that is written to; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _path(self, start: int) -> str:
        return os.path.join(self.directory, f"{self.name}-{start:0{_DIGITS}x}")
