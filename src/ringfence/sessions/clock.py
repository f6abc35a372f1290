"""Time: one clock that nobody can set, to count by, and the one on the wall, to show."""

from __future__ import annotations

import time


class Clock:
    """The machine's clocks."""

    def __init__(self) -> None:
        self.boot = _boot_id()

    def now(self) -> float:
        """Seconds that only ever go forward, until the machine restarts."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since 1970. May jump; nothing is decided by it."""
        return time.time()

    def wall_at(self, moment: float) -> float:
        """What `wall` says of a moment of `now`."""
        return self.wall() - (self.now() - moment)


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
