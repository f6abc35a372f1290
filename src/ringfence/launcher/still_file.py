"""One still, in memory: what all copies of it are written from. Its taker has it, and whom that gives it to."""

from __future__ import annotations

import os


class Still:
    """See above; it is closed with its last user.

    Args:
        fd: Of a memfd with the whole program, which is ours from here on.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.size_bytes = os.fstat(fd).st_size

    def __del__(self) -> None:
        os.close(self.fd)

    def write(self, fd: int) -> None:
        """The whole program, from the start of a file of ours.

        Raises:
            OSError: What sendfile(2) says, ENOSPC where there is no room.
        """
        at = 0
        while at < self.size_bytes:
            at += os.sendfile(fd, self.fd, at, self.size_bytes - at)
