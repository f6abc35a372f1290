"""A sandbox of the server as its owner sees it."""

from __future__ import annotations

from .base import jsonform
from .base.checks import FrozenMap
from .base.model import Model
from .base.record import dataclass, field
from .client_session import SessionState, SessionTimeouts
from .limits import Limits
from .net.network import NetworkPolicy
from .session import ResolvedMount
from .state import State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


@dataclass(frozen=True, eq=False, repr=False)
class SandboxView(Model):
    """A sandbox and its session at one moment; also one that has ended, for a while.

    Attributes:
        owner: The client whose it is.
        state: Of the sandbox; `session_state` is that of the lease on it.
        created_at, last_active_at: Seconds since 1970, UTC.
        expires_in_s: Until its time to live is over; None without one.
        reason: Why it ended; empty while it lives.
        image, user, workdir: As in the spec; None is the default.
        env_names: Names of the variables that the spec adds; values are not shown.
        expires_at, ended_at: Seconds since 1970, UTC; None: without a time to live; while it lives.
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
    image: str | None = None
    user: str | None = None
    workdir: str | None = None
    env_names: tuple[str, ...] = ()
    expires_at: float | None = None
    ended_at: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "env_names", tuple(self.env_names))

    def to_json(self, *, admin: bool = False) -> dict[str, Any]:
        """The JSON object; host paths are shown only to an admin."""
        return jsonform.dump(
            self,
            state=str(self.state),
            session_state=str(self.session_state),
            mounts=[mount.to_json(admin=admin) for mount in self.mounts],
        )
