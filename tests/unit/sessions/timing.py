"""A clock that stands still until it is told."""

from __future__ import annotations

from ringfence.sessions.clock import Clock


class FakeClock(Clock):
    """Both clocks of the machine; the one on the wall can be set, as people do."""

    def __init__(self, now: float = 1000.0) -> None:
        super().__init__()
        self.moment, self.on_the_wall = now, 1_700_000_000.0

    def now(self) -> float:
        return self.moment

    def wall(self) -> float:
        return self.on_the_wall + self.moment

    def pass_by(self, seconds: float) -> None:
        self.moment += seconds
