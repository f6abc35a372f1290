"""Monotonic clock for measuring, wall clock for display."""

from __future__ import annotations

import time

_READINGS, _AT_ONCE_S = 10, 2e-6
_FURTHEST_S = 86_400.0  # further than that a clock was wrong before, and is right now


class Clock:
    """The machine's clocks.

    Attributes:
        first_ahead_s: How far `wall` was ahead of `now` when this boot was first heard of.
    """

    def __init__(self) -> None:
        self.boot = _boot_id()
        self.first_ahead_s: float | None = None

    def now(self) -> float:
        """Seconds that only ever go forward, until the machine restarts."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since 1970. May jump; nothing is decided by it."""
        return time.time()

    @property
    def ahead_s(self) -> float:
        """How far `wall` is ahead of `now`: the same, to a microsecond, until somebody sets the clock.

        The clocks are read one after the other, and the kernel may let others run in between: of several
        readings the one that took the shortest time is the true one.
        """
        least, found = float("inf"), 0.0
        for _ in range(_READINGS):
            before, wall, after = self.now(), self.wall(), self.now()
            if after - before < least:
                least, found = after - before, wall - before
            if least <= _AT_ONCE_S:
                break
        return found

    def ago(self, span_s: float) -> float:
        """Return a wall time at least `span_s` ago: setting the wall clock forward ages nothing."""
        ahead = self.ahead_s
        first = ahead if self.first_ahead_s is None else self.first_ahead_s
        return self.wall() - span_s - min(max(0.0, ahead - first), _FURTHEST_S)

    def wall_at(self, moment: float) -> float:
        """Convert a moment of `now` to wall time."""
        return moment + self.ahead_s


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
