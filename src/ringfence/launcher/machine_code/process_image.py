"""A process image in memory: every copy is written from this file, which its taker holds."""

from __future__ import annotations

import os

from .process_image_elf import MOST_BYTES

HEAD_IS_WRITTEN = b"H"
"""The host's message to a jail that may execute its program now."""


class ProcessImage:
    """See above; it is closed with its last user.

    Args:
        fd: Of a memfd with the whole program, which is ours from here on.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.size_bytes = os.fstat(fd).st_size

    def __del__(self) -> None:
        os.close(self.fd)

    def write_head(self, fd: int) -> None:
        """Write what is read when the program is executed, at the start of an empty file.

        Raises:
            OSError: What sendfile(2) says, ENOSPC where there is no room.
        """
        self._write(fd, 0, min(MOST_BYTES, self.size_bytes))

    def write_rest(self, fd: int) -> None:
        """Write the memory, which the program reads when it is told to. Precondition: the head is written.

        Raises:
            OSError: As `write_head`.
        """
        self._write(fd, min(MOST_BYTES, self.size_bytes), self.size_bytes)

    def _write(self, fd: int, at: int, end: int) -> None:
        while at < end:
            at += os.sendfile(fd, self.fd, at, end - at)
