"""Opening paths that somebody else may control: openat2(2), close_range(2)."""

from __future__ import annotations

import ctypes
import os
import struct

from .libc import path_bytes, syscall

# include/uapi/linux/openat2.h
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08
RESOLVE_IN_ROOT = 0x10


def openat2(dir_fd: int, path: str, flags: int, *, resolve: int, mode: int = 0) -> int:
    """Open `path` under the resolution rules `resolve`.

    Source: openat2(2), Linux 5.6.
    """
    how = ctypes.create_string_buffer(struct.pack("=QQQ", flags | os.O_CLOEXEC, mode, resolve), 24)
    return syscall("openat2", dir_fd, path_bytes(path), how, 24, what=path)


def close_from(first: int) -> None:
    """Close every file descriptor from `first` on.

    Source: close_range(2), Linux 5.9.
    """
    syscall("close_range", first, 0xFFFFFFFF, 0)
