"""Gives memory back that a burst of requests took."""

from __future__ import annotations

import asyncio
import gc
import os

from ..linux.malloc import malloc_trim

_EVERY_S = 5.0
_WORTH_BYTES = 4 << 20


async def give_back() -> None:
    """Until cancelled: when more is resident than at the start, let go of what nobody refers to any more.

    The collector looks by itself only after many objects were made, and the C library keeps what was
    freed below anything that is in use, be that one small object.
    """
    # Freeze what exists now: otherwise each collection stops all threads for milliseconds.
    gc.collect()
    gc.freeze()
    loop, least, last = asyncio.get_running_loop(), resident_bytes(), 0
    while True:
        await asyncio.sleep(_EVERY_S)
        now = resident_bytes()
        if now > least + _WORTH_BYTES and now != last:
            await loop.run_in_executor(None, _let_go)
            last = resident_bytes()


def _let_go() -> None:
    gc.collect()
    malloc_trim()


def resident_bytes(pid: int | str = "self") -> int:
    """Read the resident size of a process. Source: proc(5), statm."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
