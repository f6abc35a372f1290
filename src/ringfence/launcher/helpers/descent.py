"""Where one is in a tree, by descriptors: each name is taken in the directory above it.

The kernel gets no path, so none is too long for it (PATH_MAX), and no symlink leads anywhere. Few
directories are open at a time, however deep a tree is: one that was closed is found again by `..`,
and must be the same.
"""

from __future__ import annotations

import errno
import os

_MOST_OPEN = 32
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Descent:
    """A place at or below a directory, at first that directory.

    Args:
        top: Its descriptor, which is ours from now on.
        flags: `os.O_PATH` where directories need not be read.
    """

    def __init__(self, top: int, flags: int = os.O_RDONLY) -> None:
        self._flags = _FLAGS | flags
        self._fds = [top]  # of each level; -1 where it is closed
        self._known: dict[int, tuple[int, int]] = {}  # the closed ones

    @property
    def fd(self) -> int:
        return self._fds[-1]

    @property
    def depth(self) -> int:
        """Directories between this one and the first."""
        return len(self._fds) - 1

    def enter(self, name: str) -> None:
        """Go into a directory.

        Raises:
            OSError: ENOTDIR also for a symlink.
        """
        self._fds.append(os.open(name, self._flags, dir_fd=self.fd))
        far = len(self._fds) - 1 - _MOST_OPEN
        if far > 0 and self._fds[far] >= 0:
            info = os.fstat(self._fds[far])
            self._known[far] = info.st_dev, info.st_ino
            os.close(self._fds[far])
            self._fds[far] = -1

    def leave(self) -> None:
        """Go back to the directory above.

        Raises:
            OSError: ESTALE where this one was moved elsewhere meanwhile.
        """
        level = len(self._fds) - 2
        if self._fds[level] < 0:
            self._fds[level] = self._find_again(self._known.pop(level))
        os.close(self._fds.pop())

    def _find_again(self, known: tuple[int, int]) -> int:
        fd = os.open("..", self._flags, dir_fd=self.fd)
        info = os.fstat(fd)
        if (info.st_dev, info.st_ino) != known:
            os.close(fd)
            raise OSError(errno.ESTALE, "a directory was moved meanwhile")
        return fd

    def close(self) -> None:
        for fd in self._fds:
            if fd >= 0:
                os.close(fd)
        self._fds = []
