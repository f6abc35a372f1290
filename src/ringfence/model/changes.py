"""Differences between a sandbox's files and an earlier state of them."""

from __future__ import annotations

from .base import checks
from .base.model import Model
from .base.record import dataclass
from .files import KINDS

ADDED = "added"
CHANGED = "changed"
REMOVED = "removed"


@dataclass(frozen=True, eq=False, repr=False)
class PathChange(Model):
    """A path that was added, changed or removed.

    Attributes:
        path: Absolute inside the sandbox.
        change: `added`, `changed` or `removed`.
        kind: As in `FileInfo`; of a removed path what it was.
        size_bytes: Of a file, now; of a removed file what it was.
    """

    path: str
    change: str
    kind: str
    size_bytes: int = 0

    def __post_init__(self) -> None:
        checks.choice(self.change, "change", (ADDED, CHANGED, REMOVED), "added, changed or removed")
        checks.choice(self.kind, "kind", KINDS, "file, directory, symlink or other")


@dataclass(frozen=True, eq=False, repr=False)
class Changes(Model):
    """Differences between a sandbox's files and an earlier state of them.

    Attributes:
        items: In order of path, 10,000 at most.
        is_complete: False where there are more, or where `text` leaves out a part.
        text: See `diff`.
    """

    items: tuple[PathChange, ...] = ()
    is_complete: bool = True
    text: str = ""

    def diff(self) -> str:
        """Return the changes of text files as a unified diff, as `patch` reads it; 1 MiB at most.

        Other files, and text files above 256 KiB, appear as a line that says that they differ.
        """
        return self.text
