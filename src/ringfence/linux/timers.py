"""Timers as file descriptors: timerfd_create(2).

Kept separate: only the pool needs it; the launcher loads no call that it does not make.
"""

from __future__ import annotations

import _struct as struct
import posix as os

from . import cdata
from .libc import declare, raise_errno

_CLOCK_MONOTONIC = 1  # include/uapi/linux/time.h
_NS = 1_000_000_000

_create = declare("timerfd_create", cdata.c_int, cdata.c_int)
_settime = declare("timerfd_settime", cdata.c_int, cdata.c_int, cdata.c_char_p, cdata.c_void_p)


def timerfd() -> int:
    """A descriptor that becomes readable when its time has come; read(2) waits for that.

    Source: timerfd_create(2).
    """
    fd = _create(_CLOCK_MONOTONIC, os.O_CLOEXEC)
    if fd < 0:
        raise_errno("timerfd_create")
    return fd


def settime(fd: int, after_s: float) -> None:
    """Let it be in `after_s` seconds, in place of what was set before; at once where that is 0 or less.

    Source: timerfd_settime(2).
    """
    # Nothing at all would stop it.
    seconds, ns = divmod(max(1, int(after_s * _NS)), _NS)
    if _settime(fd, 0, struct.pack("=4q", 0, 0, seconds, ns), None) < 0:
        raise_errno("timerfd_settime")
