"""Files as E2B's clients name and describe them: paths, entries, and metadata.

Metadata are extended attributes `user.e2b.NAME`, set by headers `X-Metadata-NAME`.
"""

from __future__ import annotations

import errno
import os
import posixpath
import stat
from contextlib import suppress
from typing import Any

from ..errors import FileError, RingfenceError
from ..model.files import DIRECTORY, FILE, SYMLINK, FileInfo
from ..sandbox import looking
from ..sandbox.files import Files
from .call import ApiError
from .codec import timestamp
from .settings import HOME, USER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import BinaryIO

    from ..backends.protocol import BackendFiles

_TYPES = {FILE: "FILE_TYPE_FILE", DIRECTORY: "FILE_TYPE_DIRECTORY", SYMLINK: "FILE_TYPE_SYMLINK"}
_BITS = {DIRECTORY: "d", SYMLINK: "L"}
_HEADER, _ATTRIBUTE = "x-metadata-", "user.e2b."
_MOST_NAME, _MOST_BYTES = 246, 4096
_AT_ONCE = 500  # files that a helper inside is asked about
_NOT_HERE = (errno.ENOTSUP, errno.EINVAL, errno.EBADF)


def absolute(path: str, home: str = HOME) -> str:
    """An absolute path; relative ones, and those below `~`, begin at the home directory."""
    if path == "~" or path.startswith("~/"):
        path = home + path[1:]
    return posixpath.normpath(path if path.startswith("/") else f"{home}/{path}")


def entries(files: Files, inner: BackendFiles, infos: Sequence[FileInfo]) -> list[dict[str, Any]]:
    """Describe files as E2B's filesystem service does."""
    known = read(inner, [info.path for info in infos if info.kind == FILE])
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


def given(headers: Mapping[str, str]) -> dict[str, str]:
    """Read the headers of an upload.

    Raises:
        ApiError: A name or value cannot be kept.
    """
    found = {
        name.lower().removeprefix(_HEADER): value
        for name, value in headers.items()
        if name.lower().startswith(_HEADER)
    }
    for name, value in found.items():
        if not name or len(name) > _MOST_NAME or not name.isascii() or not name.isprintable():
            raise ApiError(400, f"metadata: '{name}' is not a valid key")
        if not value.isascii() or not value.isprintable():
            raise ApiError(400, f"metadata: the value of '{name}' is not printable ASCII")
    if sum(len(_ATTRIBUTE) + len(name) + len(value) for name, value in found.items()) > _MOST_BYTES:
        raise ApiError(400, f"metadata: over {_MOST_BYTES} bytes")
    return found


def put(files: BackendFiles, path: str, file: BinaryIO, notes: Mapping[str, str]) -> None:
    """Set a file's metadata, and clear what it had before.

    Raises:
        ApiError: Files of this sandbox have none, and some was given.
    """
    try:
        if not _is_file(file):
            _ask(files, [path], notes)
            return
        for name in _of(file).keys() - notes.keys():
            os.removexattr(file.fileno(), _ATTRIBUTE + name)
        for name, value in notes.items():
            os.setxattr(file.fileno(), _ATTRIBUTE + name, value.encode())
    except OSError as exc:
        if not notes:
            return
        if exc.errno not in _NOT_HERE:
            raise ApiError(507, f"metadata: {exc.strerror}") from exc
        raise ApiError(501, "metadata of files is not supported in this sandbox") from exc
    except RingfenceError as exc:
        if notes:
            raise ApiError(501, f"metadata of files: {exc.message}") from exc


def read(files: BackendFiles, paths: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the metadata of those files that have any, by path."""
    found = {}
    for path in paths:
        try:
            with files.open_read(path) as file:
                if not _is_file(file):
                    break
                found[path] = _of(file)
        except (RingfenceError, OSError):
            continue
    else:
        return {path: notes for path, notes in found.items() if notes}
    # A pipe to the agent inside, which is asked about all at once.
    for at in range(0, len(paths), _AT_ONCE):
        with suppress(RingfenceError, OSError):
            found.update(_ask(files, paths[at : at + _AT_ONCE], None))
    return {path: notes for path, notes in found.items() if notes}


def _ask(
    files: BackendFiles, paths: Sequence[str], notes: Mapping[str, str] | None
) -> dict[str, dict[str, str]]:
    names = [path.lstrip("/") for path in paths]
    wanted = None if notes is None else dict(notes)
    asked = {"prefix": _ATTRIBUTE, "names": names, "set": wanted}
    items = looking.ask(files, "attributes", "/", asked)["items"]
    return {each["path"]: each["attributes"] for each in items}


def _is_file(file: BinaryIO) -> bool:
    return stat.S_ISREG(os.fstat(file.fileno()).st_mode)


def _of(file: BinaryIO) -> dict[str, str]:
    try:
        fd = file.fileno()
        names = [each for each in os.listxattr(fd) if each.startswith(_ATTRIBUTE)]
        return {
            name.removeprefix(_ATTRIBUTE): os.getxattr(fd, name).decode("ascii", "replace")
            for name in names
        }
    except OSError:
        return {}
