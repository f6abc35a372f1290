"""A sandbox of the server as its owner sees it."""

from __future__ import annotations

from . import jsonform
from .client_session import SessionState, SessionTimeouts, read_session_state
from .frozen import FrozenMap
from .limits import Limits
from .network import NetworkPolicy
from .noun import Noun
from .session import ResolvedMount
from .state import State, read_state

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from dataclasses import dataclass, field
    from typing import Any
else:
    from .record import dataclass, field


@dataclass(frozen=True, eq=False, repr=False)
class SandboxView(Noun):
    """A sandbox and its session at one moment; also one that has ended, for a while.

    Attributes:
        owner: The client whose it is.
        state: Of the sandbox; `session_state` is that of the lease on it.
        created_at, last_active_at: Seconds since 1970, UTC.
        expires_in_s: Until its time to live is over; None without one.
        reason: Why it ended; empty while it lives.
    """

    id: str
    session_id: str
    owner: str
    state: State
    session_state: SessionState
    backend: str
    created_at: float
    last_active_at: float
    name: str = ""
    labels: Mapping[str, str] = field(default_factory=FrozenMap)
    metadata: Mapping[str, str] = field(default_factory=FrozenMap)
    template: str = "default"
    tier: str = "light"
    profile: str = "os_hardened"
    limits: Limits = field(default_factory=Limits)
    network: NetworkPolicy = field(default_factory=NetworkPolicy)
    mounts: tuple[ResolvedMount, ...] = ()
    timeouts: SessionTimeouts = field(default_factory=SessionTimeouts)
    expires_in_s: float | None = None
    reason: str = ""

    def to_json(self, *, admin: bool = False) -> dict[str, Any]:
        """The JSON object; host paths are shown only to an admin."""
        return jsonform.dump(
            self,
            state=str(self.state),
            session_state=str(self.session_state),
            mounts=[mount.to_json(admin=admin) for mount in self.mounts],
        )

    @classmethod
    def _nested(cls) -> jsonform.Readers:
        return {
            "state": read_state,
            "session_state": read_session_state,
            "limits": Limits.from_json,
            "network": NetworkPolicy.from_json,
            "mounts": jsonform.each(ResolvedMount.from_json),
            "timeouts": SessionTimeouts.from_json,
        }
