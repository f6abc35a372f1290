"""Signals as file descriptors: signalfd(2)."""

from __future__ import annotations

import _signal as signal
import ctypes
import os
import struct

from .libc import syscall

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


def signalfd(signals: Iterable[int]) -> int:
    """A descriptor that becomes readable when one of `signals` (blocked here first) is pending.

    Source: signalfd(2).
    """
    chosen = list(signals)
    signal.pthread_sigmask(signal.SIG_BLOCK, chosen)
    bits = 0
    for signum in chosen:
        bits |= 1 << (signum - 1)
    mask = ctypes.create_string_buffer(struct.pack("=Q", bits), 8)
    return syscall("signalfd4", -1, mask, 8, os.O_CLOEXEC | os.O_NONBLOCK)
