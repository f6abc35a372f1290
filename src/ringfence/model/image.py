"""An OCI image that is on this machine, unpacked."""

from __future__ import annotations

from .base import checks
from .base.checks import FrozenMap
from .base.model import Model
from .base.record import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, eq=False, repr=False)
class Image(Model):
    """An image that sandboxes can start from.

    Attributes:
        reference: The full form of the requested name.
        id: Digest of its configuration: equal for equal content from any registry.
        digest: Digest of its manifest; empty for an image made from a directory.
        size_bytes: Of the files, unpacked.
        created_at: When it was stored here; seconds since 1970, UTC.
        uid, user, home: The user of its commands, from its own /etc/passwd; `uid` is None where that
            has no such user: then a sandbox has to name one.
        workdir: Working directory of its commands.
        entrypoint, command: The command that runs where an exec names none.
    """

    reference: str
    id: str
    digest: str = ""
    size_bytes: int = 0
    created_at: float = 0.0
    uid: int | None = 0
    user: str = "root"
    home: str = "/root"
    workdir: str = "/"
    env: Mapping[str, str] = field(default_factory=FrozenMap)
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=FrozenMap)

    def __post_init__(self) -> None:
        for name in ("env", "labels"):
            object.__setattr__(self, name, checks.string_map(getattr(self, name), name))
        for name in ("entrypoint", "command"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def argv(self) -> list[str]:
        """The command that runs where an exec names none."""
        return [*self.entrypoint, *self.command]
