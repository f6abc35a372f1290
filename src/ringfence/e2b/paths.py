"""Paths as E2B's clients write them, and entries of directories as they read them."""

from __future__ import annotations

import posixpath
import stat
from typing import Any

from ..errors import FileError
from ..model.files import DIRECTORY, FILE, SYMLINK, FileInfo
from ..sandbox.files import Files
from . import metadata
from .codec import timestamp
from .settings import HOME, USER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..backends.protocol import BackendFiles

_TYPES = {FILE: "FILE_TYPE_FILE", DIRECTORY: "FILE_TYPE_DIRECTORY", SYMLINK: "FILE_TYPE_SYMLINK"}
_BITS = {DIRECTORY: "d", SYMLINK: "L"}


def absolute(path: str) -> str:
    """An absolute path; relative ones, and those below `~`, begin at the home directory."""
    if path == "~" or path.startswith("~/"):
        path = HOME + path[1:]
    return posixpath.normpath(path if path.startswith("/") else f"{HOME}/{path}")


def entries(files: Files, inner: BackendFiles, infos: Sequence[FileInfo]) -> list[dict[str, Any]]:
    """Describe files as E2B's filesystem service does."""
    known = metadata.read(inner, [info.path for info in infos if info.kind == FILE])
    return [_entry(files, info, known.get(info.path)) for info in infos]


def _entry(files: Files, info: FileInfo, notes: dict[str, str] | None) -> dict[str, Any]:
    """Describe one. Asks once more for a symlink."""
    kind, more = info.kind, {}
    if info.kind == SYMLINK:
        try:
            target = files.stat(info.path, follow=True)
            kind, more = target.kind, {"symlinkTarget": target.path}
        except FileError:
            parent = posixpath.dirname(info.path)
            more = {"symlinkTarget": posixpath.normpath(f"{parent}/{info.link_target}")}
    bits = stat.filemode(info.mode)[1:]
    return {
        "name": info.name,
        "type": _TYPES.get(kind, "FILE_TYPE_UNSPECIFIED"),
        "path": info.path,
        "size": str(info.size_bytes),
        "mode": info.mode,
        "permissions": _BITS.get(info.kind, "-") + bits,
        "owner": USER,
        "group": USER,
        "modifiedTime": timestamp(info.mtime_s),
        **more,
        **({"metadata": notes} if notes else {}),
    }
