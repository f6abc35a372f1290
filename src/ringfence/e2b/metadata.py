"""Metadata of files: extended attributes `user.e2b.NAME`, set by headers `X-Metadata-NAME`."""

from __future__ import annotations

import errno
import os

from .call import ApiError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import BinaryIO

    from ..sandbox.files import Files

_HEADER, _ATTRIBUTE = "x-metadata-", "user.e2b."
_MOST_NAME, _MOST_BYTES = 246, 4096
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


def put(file: BinaryIO, notes: Mapping[str, str]) -> None:
    """Set a file's metadata, and clear what it had before.

    Raises:
        ApiError: Files of this sandbox have none, and some was given.
    """
    try:
        for name in of(file).keys() - notes.keys():
            os.removexattr(file.fileno(), _ATTRIBUTE + name)
        for name, value in notes.items():
            os.setxattr(file.fileno(), _ATTRIBUTE + name, value.encode())
    except OSError as exc:
        if exc.errno not in _NOT_HERE:
            raise ApiError(507, f"metadata: {exc.strerror}") from exc
        raise ApiError(501, "metadata of files is not supported in this sandbox") from exc


def of(file: BinaryIO) -> dict[str, str]:
    """Return a file's metadata; none where the sandbox's files have none."""
    try:
        fd = file.fileno()
        names = [each for each in os.listxattr(fd) if each.startswith(_ATTRIBUTE)]
        return {
            name.removeprefix(_ATTRIBUTE): os.getxattr(fd, name).decode("ascii", "replace")
            for name in names
        }
    except OSError:
        return {}


def at(files: Files, path: str) -> dict[str, str]:
    """Return the metadata of the file at a path; none of one that cannot be read."""
    from ..errors import RingfenceError

    try:
        with files.open_read(path) as file:
            return of(file)
    except (RingfenceError, OSError):
        return {}
