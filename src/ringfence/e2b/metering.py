"""Samples of what sandboxes use, kept for an hour each, as E2B's metrics have them."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..api.service import Service
from ..errors import RingfenceError
from ..model.client_session import SessionState
from ..sessions.live import Live
from .codec import timestamp

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_EVERY_S = 5.0
_KEPT_S = 3600.0
_MOST = int(_KEPT_S / _EVERY_S)
_FRESH_S = 1.0
_AT_ONCE = 8  # sandboxes that are looked at
_MIB = 1 << 20
_MACHINE_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
"""What a sandbox without a limit has of memory, and of disk, which is memory without one."""


def sizes(limits: Mapping[str, Any]) -> dict[str, int]:
    """Return a sandbox's processors, memory and disk as E2B tells them, none of which is ever 0.

    Args:
        limits: As `Limits.to_json` writes them.
    """
    return {
        "cpuCount": max(1, round(limits.get("cpus") or 1)),
        "memoryMB": (limits.get("memory_bytes") or _MACHINE_BYTES) // _MIB,
        "diskSizeMB": (limits.get("disk_bytes") or _MACHINE_BYTES) // _MIB,
    }


@dataclass(frozen=True)
class _Sample:
    at: float
    cpu_ns: int
    memory: int
    disk: int


class Meter:
    """Samples of each sandbox, every five seconds while the server has any. Of one event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._samples: dict[str, deque[_Sample]] = {}
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Sample from now on, unless that is done already."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        limit = asyncio.Semaphore(_AT_ONCE)

        async def look(live: Live) -> None:
            async with limit:
                await self.look(live)

        while lives := self._service.manager.index.all():
            for sandbox_id in self._samples.keys() - {live.sandbox_id for live in lives}:
                del self._samples[sandbox_id]
            awake = [live for live in lives if live.state != SessionState.SUSPENDED]
            await asyncio.gather(*(look(live) for live in awake))
            await asyncio.sleep(_EVERY_S)
        self._samples.clear()

    async def look(self, live: Live) -> None:
        """Take one sample. A value that cannot be read leaves it out."""
        call = self._service.thread_pools.call
        try:
            found = await call(live.inner.stats, key=live.sandbox_id)
        except (RingfenceError, OSError):
            return
        if found.cpu_ns is None or found.memory_bytes is None:
            return
        samples = self._samples.setdefault(live.sandbox_id, deque(maxlen=_MOST))
        sample = _Sample(time.time(), found.cpu_ns, found.memory_bytes, found.disk_bytes or 0)
        samples.append(sample)

    async def points(self, live: Live, start: float, end: float) -> list[dict[str, Any]]:
        """Return the points of a sandbox between two moments, oldest first."""
        samples = self._samples.get(live.sandbox_id)
        is_paused = live.state == SessionState.SUSPENDED
        if not is_paused and (not samples or samples[-1].at < time.time() - _FRESH_S):
            await self.look(live)
        found, before = [], None
        for each in [*self._samples.get(live.sandbox_id, ())]:
            if start <= each.at <= end:
                found.append(_point(live, each, before))
            before = each
        return found


def _point(live: Live, sample: _Sample, before: _Sample | None) -> dict[str, Any]:
    limits = live.spec.limits
    cpus = max(1, round(limits.cpus or 1))
    used = sample.cpu_ns - before.cpu_ns if before else 0
    took = sample.at - before.at if before else 1.0
    return {
        "timestamp": timestamp(sample.at),
        "timestampUnix": int(sample.at),
        "cpuCount": cpus,
        "cpuUsedPct": round(max(0.0, 100 * used / 1e9 / max(took, 0.001)), 2),
        "memUsed": sample.memory,
        "memTotal": limits.memory_bytes or _MACHINE_BYTES,
        "memCache": 0,
        "diskUsed": sample.disk,
        "diskTotal": limits.disk_bytes or _MACHINE_BYTES,
    }
