"""Something that happened to a sandbox."""

from __future__ import annotations

from .base import checks
from .base.checks import FrozenMap
from .base.model import Model
from .base.record import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

GAP = "gap"
CONFIG = "config"
EVENTS = ("created", "active", "detached", "suspended", "snapshot", "network", "ended", CONFIG)


@dataclass(frozen=True, eq=False, repr=False)
class Event(Model):
    """An event.

    Attributes:
        seq: Counts from 1 without a gap, over all clients, since the manager started.
        kind: One of `EVENTS`: a state that was entered, or an action. A client that follows events also
            gets `GAP`: earlier events were lost. `config` belongs to no sandbox: the execution service's
            config changed; only admins get it.
        time: Seconds since 1970.
        reason: Why the sandbox ended; only with `ended`.
    """

    seq: int
    kind: str
    time: float
    sandbox_id: str
    session_id: str
    client_id: str
    reason: str = ""
    details: Mapping[str, str] = field(default_factory=FrozenMap)

    def __post_init__(self) -> None:
        object.__setattr__(self, "details", checks.string_map(self.details, "details"))
