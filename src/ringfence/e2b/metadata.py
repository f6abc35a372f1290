"""Metadata of files: extended attributes `user.e2b.NAME`, set by headers `X-Metadata-NAME`."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from ..errors import RingfenceError
from ..sandbox import looking
from .call import ApiError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import BinaryIO

    from ..backends.protocol import BackendFiles

_HEADER, _ATTRIBUTE = "x-metadata-", "user.e2b."
_MOST_NAME, _MOST_BYTES = 246, 4096
_AT_ONCE = 500  # files that a helper inside is asked about
_NOT_HERE = (errno.ENOTSUP, errno.EINVAL, errno.EBADF)


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
