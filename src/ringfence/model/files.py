"""Files inside a sandbox."""

from __future__ import annotations

from ..errors import FileError
from .base import checks
from .base.model import Model
from .base.record import dataclass

FILE = "file"
DIRECTORY = "directory"
SYMLINK = "symlink"
OTHER = "other"
KINDS = (FILE, DIRECTORY, SYMLINK, OTHER)

MOST_READ = 1 << 30
"""Bytes of a file that is read as a whole: a guest makes a sparse one of any size for nothing."""


def too_long(path: str) -> FileError:
    """The error for a file that is longer than `MOST_READ`."""
    hint = "read a part with max_bytes=, stream it with open_read(PATH), or download() it"
    return FileError(f"{path}: is longer than {MOST_READ >> 30} GiB", path=path, hint=hint)


@dataclass(frozen=True, eq=False, repr=False)
class FileInfo(Model):
    """A directory entry, symlinks not followed.

    Attributes:
        path: Absolute inside the sandbox.
        mode: Permission bits only, such as 0o644.
        mtime_s: Seconds since 1970.
        link_target: The unresolved target of a symlink; None for other kinds.
    """

    path: str
    name: str
    kind: str
    size_bytes: int
    mode: int
    mtime_s: float
    link_target: str | None = None

    def __post_init__(self) -> None:
        checks.choice(self.kind, "kind", KINDS, "file, directory, symlink or other")
