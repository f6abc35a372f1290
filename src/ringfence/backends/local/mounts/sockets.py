"""Unix sockets of the host's, which a mount must not bring within reach."""

from __future__ import annotations

import os
import stat

from ....errors import IsolationError

_SCANNED_ENTRIES = 50_000


def refuse_sockets(source: str) -> None:
    """A directory with unix sockets is not shown to a sandbox that may connect to them.

    Raises:
        IsolationError: It has one, or is too large to tell.
    """
    seen = 0
    _refuse_socket(source)
    for directory, names, files in os.walk(source):
        for name in files:
            _refuse_socket(os.path.join(directory, name))
        seen += len(names) + len(files)
        if seen > _SCANNED_ENTRIES:
            raise IsolationError(
                f"{source} has too many files to look for unix sockets in it",
                hint="give the mount when the sandbox is created",
            )


def _refuse_socket(path: str) -> None:
    if stat.S_ISSOCK(os.lstat(path).st_mode):
        raise IsolationError(
            f"{path} is a unix socket, and this sandbox may connect to it",
            hint="give the mount when the sandbox is created: it then has no unix sockets",
        )
