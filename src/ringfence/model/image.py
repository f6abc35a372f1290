"""An OCI image that is on this machine, unpacked."""

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


@dataclass(frozen=True, eq=False, repr=False)
class Image(Noun):
    """What a sandbox can start from.

    Attributes:
        reference: The name it was asked for by, in full.
        id: Digest of its configuration: the same for the same content, whoever serves it.
        digest: Digest of its manifest; empty where there was none (a directory).
        size_bytes: Of the files, unpacked.
        created_at: When it came here; seconds since 1970, UTC.
        uid, user, home: Who its commands run as, by its own list of users; `uid` is None where that
            has no such user, and who starts a sandbox from it has to name one.
        workdir: Where they start.
        entrypoint, command: What it runs when nobody says what.
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
        """What it runs when nobody says what."""
        return [*self.entrypoint, *self.command]
