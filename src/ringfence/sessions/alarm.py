"""Timer whose expiry can change without waking the thread that waits for it."""

from __future__ import annotations

import os

from ..linux import timers


class Alarm:
    """Timer of one waiting thread. `set` may be called from any thread."""

    def __init__(self) -> None:
        self._fd = timers.timerfd()

    def set(self, after_s: float) -> None:
        """Expire in `after_s` seconds instead of at the earlier set time; 0: now."""
        timers.settime(self._fd, after_s)

    def wait(self) -> None:
        """Wait until it expires. Preconditions: it is set, or will be."""
        os.read(self._fd, 8)

    def close(self) -> None:
        """Preconditions: no thread waits, and none will set it."""
        os.close(self._fd)
