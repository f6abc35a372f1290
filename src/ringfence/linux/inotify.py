"""Changes of files, as they happen: inotify(7)."""

from __future__ import annotations

import _struct as struct
import posix as os

from . import cdata
from .libc import declare, raise_errno

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

# include/uapi/linux/inotify.h
IN_MODIFY = 0x2
IN_ATTRIB = 0x4
IN_CLOSE_WRITE = 0x8
IN_OPEN = 0x20
IN_MOVED_FROM = 0x40
IN_MOVED_TO = 0x80
IN_CREATE = 0x100
IN_DELETE = 0x200
IN_DELETE_SELF = 0x400
IN_MOVE_SELF = 0x800
IN_Q_OVERFLOW = 0x4000
IN_IGNORED = 0x8000
IN_DONT_FOLLOW = 0x2000000
IN_ISDIR = 0x40000000

_HEAD = struct.Struct("=iIII")  # struct inotify_event, without its name

_init1 = declare("inotify_init1", cdata.c_int)
_add_watch = declare("inotify_add_watch", cdata.c_int, cdata.c_char_p, cdata.c_uint)


def inotify_init1() -> int:
    """A descriptor to read events from, non-blocking.

    Source: inotify_init(2).
    """
    fd = _init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        raise_errno("inotify_init1")
    return fd


def inotify_add_watch(fd: int, path: bytes, mask: int) -> int:
    """Watch `path`; the number that its events will carry.

    Source: inotify_add_watch(2).
    """
    number = _add_watch(fd, path, mask)
    if number < 0:
        raise_errno("inotify_add_watch", path)
    return number


def events(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Parse the read bytes to (watch, mask, cookie, name); the name is empty for the watched file
    itself.
    """
    at = 0
    while at < len(data):
        watch, mask, cookie, length = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        yield watch, mask, cookie, data[at : at + length].rstrip(b"\0")
        at += length
