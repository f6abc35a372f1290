"""A live sandbox as its users see it."""

from __future__ import annotations

from .base import checks, jsonform
from .base.checks import FrozenMap
from .base.model import Model
from .base.record import dataclass, field
from .state import State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


@dataclass(frozen=True, eq=False, repr=False)
class ResolvedMount(Model):
    """A mount as it really is.

    Attributes:
        host_path: Where the content lies on the host; None when it has no host path.
    """

    target: str
    access: str
    host_path: str | None = None

    def to_json(self, *, admin: bool = False) -> dict[str, Any]:
        """The JSON object; host paths are shown only to an admin."""
        form: dict[str, Any] = {"target": self.target, "access": self.access}
        if admin:
            form["host_path"] = self.host_path
        return form


@dataclass(frozen=True, eq=False, repr=False)
class Session(Model):
    """Id, state and mounts of a sandbox at one moment.

    Attributes:
        mounts: In the order they were made; of two at one target the newer wins, which was added later.
        metadata: The spec's labels, plus `profile` and `tier`.
    """

    id: str
    backend: str
    state: State
    mounts: tuple[ResolvedMount, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=FrozenMap)

    def __post_init__(self) -> None:
        if type(self.metadata) is not FrozenMap:
            object.__setattr__(self, "metadata", FrozenMap(self.metadata))

    def to_json(self, *, admin: bool = False) -> dict[str, Any]:
        """The JSON object; host paths are shown only to an admin."""
        mounts = [mount.to_json(admin=admin) for mount in self.mounts]
        return jsonform.dump(self, state=str(self.state), mounts=mounts)


OF_MARK, OF_FORK = "ringfence.mark", "ringfence.fork"
TEMPORARY = frozenset((OF_MARK, OF_FORK))
"""Metadata of snapshots that end with the process, or the request, that made them."""


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
