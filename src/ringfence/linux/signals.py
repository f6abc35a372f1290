"""Signals as file descriptors: signalfd(2).

Kept separate: the agent, packed as few modules, has this one without timers.
"""

from __future__ import annotations

import _signal as signal
import _struct as struct
import posix as os

from . import cdata
from .libc import declare, raise_errno

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


_signalfd4 = declare("signalfd4", cdata.c_int, cdata.c_char_p, cdata.c_size_t, cdata.c_int)


def signalfd(signals: Iterable[int]) -> int:
    """A descriptor that becomes readable when one of `signals` (blocked here first) is pending.

    Source: signalfd(2).
    """
    chosen = list(signals)
    signal.pthread_sigmask(signal.SIG_BLOCK, chosen)
    bits = 0
    for signum in chosen:
        bits |= 1 << (signum - 1)
    fd = _signalfd4(-1, struct.pack("=Q", bits), 8, os.O_CLOEXEC | os.O_NONBLOCK)
    if fd < 0:
        raise_errno("signalfd4")
    return fd
