"""The library's errors as Python's own, for frameworks that expect those."""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager

from ..errors import (
    DirectoryNotEmpty,
    FileError,
    FileExists,
    FileNotFound,
    IsADirectory,
    LifecycleError,
    NotADirectory,
    PermissionDenied,
    ResourceExhausted,
    SandboxLost,
    SandboxNotFound,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

GONE = (LifecycleError, SandboxLost, SandboxNotFound)
"""Errors that mean the sandbox is gone."""

_NUMBERS = {
    FileNotFound: errno.ENOENT,
    NotADirectory: errno.ENOTDIR,
    IsADirectory: errno.EISDIR,
    DirectoryNotEmpty: errno.ENOTEMPTY,
    FileExists: errno.EEXIST,
    PermissionDenied: errno.EACCES,
    ResourceExhausted: errno.ENOSPC,
}


@contextmanager
def as_os_errors(path: str) -> Iterator[None]:
    """Raise FileNotFoundError, PermissionError, ... where a file operation on `path` says so."""
    try:
        yield
    except (FileError, ResourceExhausted) as exc:
        number = next((n for cls, n in _NUMBERS.items() if isinstance(exc, cls)), errno.EIO)
        text = os.strerror(number) if number != errno.EIO else exc.message
        raise OSError(number, text, path) from exc
