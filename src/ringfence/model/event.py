"""Something that happened to a sandbox."""

from __future__ import annotations

from . import checks
from .frozen import FrozenMap
from .noun import Noun

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from dataclasses import dataclass, field
else:
    from .record import dataclass, field

GAP = "gap"
CONFIG = "config"
EVENTS = ("created", "active", "detached", "suspended", "snapshot", "network", "ended", CONFIG)


@dataclass(frozen=True, eq=False, repr=False)
class Event(Noun):
    """One event.

    Attributes:
        seq: Counts from 1 without a gap, over all clients, since the manager started.
        kind: One of `EVENTS`: a state that was entered, or what was done. To a client that follows them
            also `GAP`: events before it were missed for good. `config` is of no sandbox: the config of
            the execution service changed, which admins are told.
        time: Seconds since 1970.
        reason: Of `ended`: why.
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
