"""Which descriptors a process holds from now on, and under which numbers."""

from __future__ import annotations

import fcntl
import posix as os

from ..linux import files


def point_standard_at_null() -> None:
    """Point 0, 1 and 2 at the sandbox's own /dev/null."""
    null = os.open("/dev/null", os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    if null > 2:
        os.close(null)


def pack(keep: list[int]) -> list[int]:
    """Renumber the descriptors to keep from 3 on, and close every other one."""
    # All copies lie above where the last one goes, so none is overwritten before its turn.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3 + len(keep)) for fd in keep]
    low = [os.dup2(fd, 3 + i, inheritable=False) for i, fd in enumerate(high)]
    files.close_from(3 + len(keep))
    return low
