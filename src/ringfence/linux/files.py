"""Opening paths that somebody else may control: openat2(2), close_range(2)."""

from __future__ import annotations

import _struct as struct
import errno
import posix as os

from . import cdata
from .libc import declare, path_bytes, raise_errno

# include/uapi/linux/openat2.h
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08
RESOLVE_IN_ROOT = 0x10
# A rename or a mount anywhere on the host, during a walk through "..", ends the walk with EAGAIN.
_TRIES = 128

_openat2 = declare("openat2", cdata.c_int, cdata.c_char_p, cdata.c_char_p, cdata.c_size_t)
_close_range = declare("close_range", cdata.c_uint, cdata.c_uint, cdata.c_uint)


def openat2(dir_fd: int, path: str, flags: int, *, resolve: int, mode: int = 0) -> int:
    """Open `path` under the resolution rules `resolve`.

    Raises OSError; with EAGAIN only where renames or mounts met each of 128 walks.
    Source: openat2(2), Linux 5.6: EAGAIN is to be tried again.
    """
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, mode, resolve)
    encoded, tries = path_bytes(path), _TRIES
    while (fd := _openat2(dir_fd, encoded, how, 24)) < 0:
        tries -= 1
        if tries == 0 or cdata.get_errno() != errno.EAGAIN:
            raise_errno("openat2", path)
    return fd


def chmod_nofollow(directory: int, name: str, mode: int) -> None:
    """Set the mode of what `name` is in `directory`; of a link it is refused.

    Source: chmod(2), proc(5); fchmodat2(2) does it in one call, since Linux 6.6.
    """
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        os.chmod(f"/proc/self/fd/{fd}", mode)
    finally:
        os.close(fd)


def close_from(first: int) -> None:
    """Close every file descriptor from `first` on.

    Source: close_range(2), Linux 5.9.
    """
    if _close_range(first, 0xFFFFFFFF, 0) < 0:
        raise_errno("close_range")
