"""When a sandbox was last used, when a session is over, and what happens then. Pure judgement."""

from __future__ import annotations

from ..model.client_session import SUSPEND, TERMINATE, SessionState

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..model.client_session import SessionTimeouts

# Processor time is seen by looking twice: a timeout is exact to a quarter of itself at worst, and
# only where something ran in the background and stopped.
_LOOKS = 4
_SHORTEST_LOOK_S = 0.05

TTL = "ttl"
REASONS = {
    SessionState.ACTIVE: "idle",
    SessionState.DETACHED: "detached",
    SessionState.SUSPENDED: "suspended",
}
"""Why a session ended that was left alone in a state for too long."""
TIMED = (TTL, *REASONS.values())
LOST = "lost"
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
        """Record an observation: whether an exec or a stream is running, and the processor time used so far."""
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


def verdict(
    state: SessionState, timeouts: SessionTimeouts, unused_s: float, left_s: float | None
) -> tuple[str, str] | None:
    """Decide on a session: (`terminate`, `suspend` or `detach`, reason); None: no action.

    Args:
        left_s: Remaining time to live; None without one.
    """
    if left_s is not None and left_s <= 0 and _is_counted(state, timeouts):
        return timeouts.on_expiry, TTL
    limit = timeouts.of(state)
    if limit is None or unused_s < limit or state == SessionState.TERMINATED:
        return None
    action = timeouts.on_idle if state == SessionState.ACTIVE else TERMINATE
    return action, REASONS[state]


def _is_counted(state: SessionState, timeouts: SessionTimeouts) -> bool:
    """Return whether the time to live goes on in this state."""
    return state != SessionState.SUSPENDED or timeouts.on_expiry != SUSPEND


def next_look_s(
    state: SessionState,
    timeouts: SessionTimeouts,
    unused_s: float,
    left_s: float | None,
    most_s: float,
) -> float:
    """Seconds until the session must be looked at again, at most `most_s`."""
    waits = [most_s]
    if left_s is not None and _is_counted(state, timeouts):
        waits.append(left_s)
    limit = timeouts.of(state)
    if limit is not None:
        waits.append(limit - unused_s)
        if state != SessionState.SUSPENDED:
            waits.append(max(_SHORTEST_LOOK_S, limit / _LOOKS))
    return max(0.0, min(waits))
