"""How much of what runs is kept on disk, of all execs together."""

from __future__ import annotations

import threading


class Budget:
    """Bytes that may still be kept. Thread-safe; a few writers at once may overdraw it by a piece each."""

    def __init__(self, limit_bytes: int) -> None:
        self._lock, self._left = threading.Lock(), limit_bytes

    @property
    def left(self) -> int:
        """At least 0."""
        return max(0, self._left)

    def spend(self, count: int) -> None:
        """So many more are on disk; fewer, where it is negative."""
        with self._lock:
            self._left -= count


PLENTY = 1 << 62
EXHAUSTED = "as much is kept of what runs as may be"
