"""Counting what a manager does. Nothing here is estimated."""

from __future__ import annotations

import threading
from collections import Counter, deque

from ...model.manager_stats import Percentiles

_KEPT = 1000


class Durations:
    """Sum and count of all, percentiles of the last thousand; in seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: deque[float] = deque(maxlen=_KEPT)
        self.count, self.total_s = 0, 0.0

    def add(self, seconds: float) -> None:
        with self._lock:
            self._last.append(seconds)
            self.count += 1
            self.total_s += seconds

    @property
    def average_ms(self) -> float | None:
        """Of all; None while there is none."""
        with self._lock:
            return self.total_s / self.count * 1000 if self.count else None

    def percentiles(self) -> Percentiles:
        """By the nearest rank: each is one that was measured."""
        with self._lock:
            ordered = sorted(self._last)
        if not ordered:
            return Percentiles()
        ranks = [max(1, -(-len(ordered) * part // 100)) - 1 for part in (50, 95, 99)]
        p50, p95, p99 = (ordered[rank] * 1000 for rank in ranks)
        return Percentiles(p50, p95, p99)


class Counters:
    """Events by name, and how long creating took."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: Counter[str] = Counter()
        self.creation, self.claim = Durations(), Durations()

    def add(self, event: str) -> None:
        with self._lock:
            self._events[event] += 1

    def __getitem__(self, event: str) -> int:
        with self._lock:
            return self._events[event]
