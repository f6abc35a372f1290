"""Detection of use of a sandbox. Pure: the caller passes the time and the observations."""

from __future__ import annotations

# Looking costs a sandbox some processor time itself: below these it counts as doing nothing.
_LEAST_CPU_NS = 5_000_000
_LEAST_CORES = 0.002


class Activity:
    """When a sandbox was last used: called, running something, or spending processor time.

    Attributes:
        last: That moment, in seconds of the caller's clock.
    """

    def __init__(self, now: float) -> None:
        self.last = now
        self.looked = now
        self._cpu_ns: int | None = None

    def touch(self, now: float) -> None:
        self.last = max(self.last, now)

    def look(self, now: float, *, busy: bool, cpu_ns: int | None) -> None:
        """Record an observation: whether an exec or a stream is running, and the processor time
        used so far.
        """
        spent = None if cpu_ns is None or self._cpu_ns is None else cpu_ns - self._cpu_ns
        passed_ns = (now - self.looked) * 1e9
        least = max(_LEAST_CPU_NS, passed_ns * _LEAST_CORES)
        if busy or (spent is not None and spent >= least):
            self.last = max(self.last, now)
        self.looked = now
        if cpu_ns is not None:
            self._cpu_ns = cpu_ns

    def unused_s(self, now: float) -> float:
        """For how long it has not been used."""
        return max(0.0, now - self.last)
