"""The state directory: private, and held by one process at a time."""

from __future__ import annotations

import fcntl
import os

from ..errors import IoError, StateInUse

_LOCK = "lock"
_NO_ROOM = (28, 122)  # ENOSPC, EDQUOT


class StateDirectory:
    """A directory of ours alone, held until `close` or the end of this process, however it ends.

    Raises:
        StateInUse: Another process holds it, or another holder in this one.
        IoError: It cannot be made, or others may write to it.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        try:
            os.makedirs(self.path, mode=0o700, exist_ok=True)
            _check_private(self.path)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._lock_fd = os.open(os.path.join(self.path, _LOCK), flags, 0o600)
        except OSError as exc:
            raise IoError(f"no state directory: {exc}", field="state_dir") from exc
        self._owner = os.getpid()
        try:
            # flock, not fcntl: it also keeps out a second holder in this very process.
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            holder = os.pread(self._lock_fd, 32, 0).decode("ascii", "replace").strip()
            os.close(self._lock_fd)
            raise StateInUse(
                f"{self.path} is held by process {holder or '?'}",
                field="state_dir",
                hint="stop it, choose another state directory, or go on with `ringfence serve --take-over`",
            ) from exc
        _say_who(self._lock_fd)
        # A forked child shares the lock: it must let go of it, or it would outlive its holder.
        os.register_at_fork(after_in_child=self._let_go)

    def file(self, name: str) -> str:
        """The path of a file in it."""
        return os.path.join(self.path, name)

    def close(self) -> None:
        """Let others have it; idempotent."""
        self._let_go()

    def _let_go(self) -> None:
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)


def _say_who(fd: int) -> None:
    """Write our pid into the lock file, for whoever is refused. A full disk is no reason to stop."""
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    except OSError as exc:
        if exc.errno not in _NO_ROOM:
            raise


def _check_private(path: str) -> None:
    info = os.stat(path)
    if info.st_uid != os.geteuid():
        raise PermissionError(1, "belongs to somebody else", path)
    if info.st_mode & 0o022:
        raise PermissionError(1, "others may write to it", path)
