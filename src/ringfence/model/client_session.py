"""A client's lease on one sandbox, its states, and how long each may last."""

from __future__ import annotations

from ..errors import LifecycleError
from .base import checks, jsonform
from .base.checks import FrozenMap
from .base.model import Model
from .base.record import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from enum import StrEnum
    from typing import Any, Protocol

    class HasSessionId(Protocol):
        """A `ClientSession`, or a `SandboxView` of a server."""

        @property
        def session_id(self) -> str: ...

    class HasId(Protocol):
        """A `Lease`, a `Sandbox` or a sandbox of a server."""

        @property
        def id(self) -> str: ...

    SessionRef = str | HasSessionId | HasId
    """What names a session: an id, or an object that has one."""
else:
    from .base.words import StrEnum

_LONGEST_S = 10 * 366 * 86_400.0

SUSPEND, TERMINATE, DETACH = "suspend", "terminate", "detach"
ON_IDLE = (TERMINATE, SUSPEND, DETACH)
ON_EXPIRY = (TERMINATE, SUSPEND)


class SessionState(StrEnum):
    """Where a session is in its life.

    `active`: somebody works with it. `detached`: nobody does, and its processes run on.
    `suspended`: every process is frozen. `terminated`: over, and its sandbox with it.
    """

    ACTIVE = "active"
    DETACHED = "detached"
    SUSPENDED = "suspended"
    TERMINATED = "terminated"


SESSION_NEXT: dict[SessionState, frozenset[SessionState]] = {
    SessionState.ACTIVE: frozenset(SessionState),
    SessionState.DETACHED: frozenset(SessionState),
    SessionState.SUSPENDED: frozenset(
        {SessionState.SUSPENDED, SessionState.ACTIVE, SessionState.TERMINATED}
    ),
    SessionState.TERMINATED: frozenset({SessionState.TERMINATED}),
}
"""Staying put is legal, because the verbs are idempotent; terminating is legal everywhere."""


def check_session_step(now: SessionState, then: SessionState) -> SessionState:
    """`then`, when a session in `now` may go there.

    Raises:
        LifecycleError: The table has no such step.
    """
    if then not in SESSION_NEXT[now]:
        hint = "resume it first" if now == SessionState.SUSPENDED else "acquire a new one"
        raise LifecycleError(f"a {now} session cannot become {then}", hint=hint)
    return then


def id_of(session: SessionRef, field: str = "session") -> str:
    """The id of a session or sandbox, given as text or as the object that has it.

    Raises:
        InvalidRequest: It is neither.
    """
    found = session
    if not isinstance(session, str):
        found = getattr(session, "session_id", None) or getattr(session, "id", None) or session
    if not isinstance(found, str):
        hint = "give an id, or the ClientSession, Lease or Sandbox itself"
        checks.refuse(field, f"must be a session or its id, not {type(session).__name__}", hint)
    return checks.text(found, field)


@dataclass(frozen=True, eq=False, repr=False)
class SessionTimeouts(Model):
    """How long a session may stay in a state unused; None is for ever.

    Attributes:
        idle_s: Active, while nothing runs, streams or uses the processor.
        detach_s: Detached, counted in the same way.
        suspend_s: Suspended.
        on_idle: What becomes of an active session then: `terminate`, `suspend` or `detach`.
        on_expiry: What the end of its time to live does: `terminate`, or `suspend`. The
            time to live of a session suspended by either does not count; extend it to resume.
    """

    idle_s: float | None = 300.0
    detach_s: float | None = 3_600.0
    suspend_s: float | None = 86_400.0
    on_idle: str = TERMINATE
    on_expiry: str = TERMINATE

    def __post_init__(self) -> None:
        for name in ("idle_s", "detach_s", "suspend_s"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, checks.number(value, name, 0.001, _LONGEST_S))
        checks.choice(self.on_idle, "on_idle", ON_IDLE, "terminate, suspend or detach")
        checks.choice(self.on_expiry, "on_expiry", ON_EXPIRY, "terminate or suspend")

    def of(self, state: SessionState) -> float | None:
        """Seconds that a session may be unused in `state`; a terminated one is always expired."""
        return {
            SessionState.ACTIVE: self.idle_s,
            SessionState.DETACHED: self.detach_s,
            SessionState.SUSPENDED: self.suspend_s,
        }.get(state, 0.0)


@dataclass(frozen=True, eq=False, repr=False)
class ClientSession(Model):
    """A client's lease on one sandbox, at one moment.

    Attributes:
        created_at, last_active_at: Seconds since 1970, UTC; what expires is counted on a clock
            that nobody can set.
        expires_in_s: Until the time to live is over; None without one.
        time_remaining_s: Until it expires if nobody uses it, counting its timeouts and its time to
            live; None: never, or it has ended.
        reason: Why it ended: `released`, `terminated`, `idle`, `detached`, `suspended`, `ttl`,
            `lost` (its sandbox went away), `closed`, `restart`; empty while it lives.
    """

    session_id: str
    sandbox_id: str
    client_id: str
    state: SessionState
    backend: str
    created_at: float
    last_active_at: float
    timeouts: SessionTimeouts = field(default_factory=SessionTimeouts)
    metadata: Mapping[str, str] = field(default_factory=FrozenMap)
    expires_in_s: float | None = None
    reason: str = ""
    time_remaining_s: float | None = None

    @property
    def is_timed_out(self) -> bool:
        """True if the session's time is over; always true of a terminated session."""
        return self.state == SessionState.TERMINATED or self.time_remaining_s == 0

    def __post_init__(self) -> None:
        if type(self.metadata) is not FrozenMap:
            object.__setattr__(self, "metadata", checks.string_map(self.metadata, "metadata"))

    def to_json(self) -> dict[str, Any]:
        """The JSON object of all fields."""
        return jsonform.dump(self, state=str(self.state))
