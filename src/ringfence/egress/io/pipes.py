"""Pipes for splice(2): bytes go from socket to socket without passing through this process."""

from __future__ import annotations

import os
from fcntl import fcntl

F_SETPIPE_SZ = 1031  # include/uapi/linux/fcntl.h
_BIG_BYTES = 1 << 20
# The user's own programs share what an account may have of pipes (64 MiB, pipe-user-pages-soft).
_MOST_BIG = 16
_MOST_KEPT = 32


class Pipe:
    __slots__ = ("held", "is_big", "read_fd", "write_fd")

    def __init__(self, *, big: bool) -> None:
        self.read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.held = 0
        self.is_big = False
        try:
            self.is_big = big and fcntl(self.write_fd, F_SETPIPE_SZ, _BIG_BYTES) > 0
        except OSError:
            pass  # over the account's limit: a small one does, in more calls

    def close(self) -> None:
        """Give both descriptors back."""
        os.close(self.read_fd)
        os.close(self.write_fd)


class Pipes:
    """A stock of empty pipes: a connection has one only while bytes wait in it."""

    def __init__(self) -> None:
        self._idle: list[Pipe] = []
        self._big = 0

    def take(self) -> Pipe:
        """An empty pipe.

        Raises:
            OSError: EMFILE, ENFILE: no descriptors left.
        """
        if self._idle:
            return self._idle.pop()
        pipe = Pipe(big=self._big < _MOST_BIG)
        self._big += pipe.is_big
        return pipe

    def give_back(self, pipe: Pipe) -> None:
        """Keep it for another connection, unless something is left in it: that is never theirs."""
        if pipe.held or len(self._idle) >= _MOST_KEPT:
            self._big -= pipe.is_big
            pipe.close()
        elif pipe.is_big:
            self._idle.append(pipe)  # to be taken first
        else:
            self._idle.insert(0, pipe)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
