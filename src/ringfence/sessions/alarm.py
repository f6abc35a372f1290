"""What a thread sleeps on whose time to wake others may change, without waking it for that."""

from __future__ import annotations

import os

from ..linux import timers


class Alarm:
    """Of one thread that waits. `set` may be called from any."""

    def __init__(self) -> None:
        self._fd = timers.timerfd()

    def set(self, after_s: float) -> None:
        """Ring in so many seconds, and not when it was to ring before; 0: now."""
        timers.settime(self._fd, after_s)

    def wait(self) -> None:
        """Until it has rung. Preconditions: it is set, or will be."""
        os.read(self._fd, 8)

    def close(self) -> None:
        """Preconditions: nobody waits, and nobody will set it."""
        os.close(self._fd)
