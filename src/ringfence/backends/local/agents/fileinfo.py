"""Conversion of a stat(2) result from inside a sandbox to a `FileInfo`."""

from __future__ import annotations

import os
import stat

from ....model.base import checks
from ....model.files import DIRECTORY, FILE, OTHER, SYMLINK, FileInfo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_KINDS = {stat.S_IFREG: FILE, stat.S_IFDIR: DIRECTORY, stat.S_IFLNK: SYMLINK}


def describe(path: str, name: str, mode: int, size: int, mtime_ns: int, link: str) -> FileInfo:
    """Describe a file; `link` is the unresolved target of a symlink."""
    kind = _KINDS.get(stat.S_IFMT(mode), OTHER)
    return FileInfo(
        path=path,
        name=name,
        kind=kind,
        size_bytes=size,
        mode=stat.S_IMODE(mode),
        mtime_s=mtime_ns / 1e9,
        link_target=link if kind == SYMLINK else None,
    )


def first_names(names: Iterable[str], after: str, most: int | None) -> list[str]:
    """The first `most` of `names` after one of them, sorted; the others are not held in memory."""
    wanted = (name for name in names if name > after)
    if most is None:
        return sorted(wanted)
    import heapq

    return heapq.nsmallest(most, wanted)


def absolute(root: str, path: str) -> str:
    """A client's path as the sandbox has it, without a leading `.`; all else is the kernel's to resolve.

    Args:
        root: Where relative paths start.
    """
    given = checks.path(path, "path")
    while given.startswith("./"):
        given = given[2:].lstrip("/")
    return os.path.join(root, given) if given not in ("", ".") else root
