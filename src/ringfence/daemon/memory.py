"""Gives memory back that a burst of requests took."""

from __future__ import annotations

import asyncio
import os

from ..linux.malloc import malloc_trim

_EVERY_S = 10.0
_WORTH_BYTES = 4 << 20


async def give_back() -> None:
    """Until cancelled: when more is resident than the last time, have the C library let go of what is free.

    It keeps what was freed below anything that is in use, be that one small object.
    """
    loop, least = asyncio.get_running_loop(), resident_bytes()
    while True:
        await asyncio.sleep(_EVERY_S)
        if resident_bytes() > least + _WORTH_BYTES:
            if not await loop.run_in_executor(None, malloc_trim):
                return
            least = resident_bytes()
        least = min(least, resident_bytes())


def resident_bytes(pid: int | str = "self") -> int:
    """What a process has in memory. Source: proc(5), statm."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
