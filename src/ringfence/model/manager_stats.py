"""How a session manager is doing."""

from __future__ import annotations

from .base.model import Model
from .base.record import dataclass, field


@dataclass(frozen=True, eq=False, repr=False)
class Percentiles(Model):
    """Of the last thousand, in milliseconds; None while there is none."""

    p50_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None


@dataclass(frozen=True, eq=False, repr=False)
class ManagerStats(Model):
    """Counted since the manager started, or true right now.

    A server gives a key that is neither an admin's nor for metrics what its own client has now; the
    rest is at its default then.

    Attributes:
        created: Sandboxes handed to clients, from a pool or made for them.
        active_sandboxes: Clients' sandboxes that exist now.
        active_sessions, detached_sessions, suspended_sessions: By state, now.
        pool_size: Warm sandboxes that could be claimed now.
        pool_hits, pool_misses: Of acquires that would have taken a warm one.
        pool_hit_rate: None while there was none of either.
        average_creation_ms: From the request to the session; None while there was none.
        timeout_destroys: Sessions ended by a timeout or their time to live.
        lost: Sandboxes that went away by themselves.
        refused: Acquires refused for want of room.
        waiting: Acquires that wait for room now.
        terminated: Sessions that ended, for whatever reason.
    """

    uptime_s: float
    created: int = 0
    active_sandboxes: int = 0
    active_sessions: int = 0
    detached_sessions: int = 0
    suspended_sessions: int = 0
    pool_size: int = 0
    pool_hits: int = 0
    pool_misses: int = 0
    pool_hit_rate: float | None = None
    average_creation_ms: float | None = None
    creation: Percentiles = field(default_factory=Percentiles)
    pool_claim: Percentiles = field(default_factory=Percentiles)
    timeout_destroys: int = 0
    terminated: int = 0
    lost: int = 0
    refused: int = 0
    waiting: int = 0
    max_sandboxes: int = 0


@dataclass(frozen=True, eq=False, repr=False)
class Check(Model):
    """A health check; `detail` is the observation."""

    name: str
    ok: bool
    detail: str = ""


@dataclass(frozen=True, eq=False, repr=False)
class Health(Model):
    """Health of a manager: at least one backend can make sandboxes, and the shared parts work.

    Attributes:
        checks: All checks, including those that do not affect `ok`.
    """

    ok: bool
    checks: tuple[Check, ...] = ()
