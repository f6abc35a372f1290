"""How the C library keeps memory: mallopt(3) and malloc_trim(3), of glibc alone.

Kept separate: it needs all of ctypes, which the launcher does without.
"""

from __future__ import annotations

import ctypes

M_ARENA_MAX = -8  # malloc.h


def mallopt(param: int, value: int) -> bool:
    """Set a parameter of malloc; False where the C library has none.

    Source: mallopt(3).
    """
    try:
        call = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False  # musl, say
    call.argtypes, call.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    return bool(call(param, value))


def malloc_trim() -> bool:
    """Give free memory back to the system; False where the C library cannot. Others run meanwhile.

    Source: malloc_trim(3).
    """
    try:
        call = ctypes.CDLL(None).malloc_trim
    except AttributeError:
        return False
    call.argtypes, call.restype = (ctypes.c_size_t,), ctypes.c_int
    call(0)
    return True
