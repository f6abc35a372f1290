"""Saved state of a sandbox."""

from __future__ import annotations

from .base import checks
from .base.frozen import FrozenMap
from .base.model import Model

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from dataclasses import dataclass, field
else:
    from .base.record import dataclass, field


@dataclass(frozen=True, eq=False, repr=False)
class Snapshot(Model):
    """A snapshot with content of its own: it outlives the session it was taken of.

    Attributes:
        created_at: Seconds since 1970, UTC.
        size_bytes: What the content takes up in the catalogue.
        has_memory: Restored, its processes go on where they were.
    """

    id: str
    session_id: str
    backend: str
    created_at: float
    size_bytes: int = 0
    has_memory: bool = False
    metadata: Mapping[str, str] = field(default_factory=FrozenMap)

    def __post_init__(self) -> None:
        object.__setattr__(self, "metadata", checks.string_map(self.metadata, "metadata"))
