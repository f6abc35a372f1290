"""The state directory: private, and held by one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat

from ..errors import IoError, StateInUse, StorageFull
from ..linux import files

LOCK = "lock"
_OF_SERVERS = (LOCK, "state.sqlite3", "audit.log")  # files that only a state directory has
_NO_ROOM = (28, 122)  # ENOSPC, EDQUOT
_LEAST_ROOM = 256 << 10  # in bytes: a sandbox and an exec are written down in a few dozen KiB
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class StateDirectory:
    """A directory of ours alone, held until `close` or the end of this process, however it ends.

    Other users can neither enter nor write to it: modes that let them enter are narrowed, but in no
    directory that has been something else until now, such as /etc.

    Attributes:
        identity: Device and inode. A copy or a restored backup has another one, a renamed directory
            the same; no other directory gets it while this one is open.

    Raises:
        StateInUse: Another process holds it, or another holder in this one.
        IoError: It cannot be made, or others may write to it.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._fd = self._lock_fd = -1
        try:
            self._fd = make_private(self.path)
            self.identity = identity_of(self._fd)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._lock_fd = os.open(LOCK, flags, 0o600, dir_fd=self._fd)
        except OSError as exc:
            self._let_go()
            raise _unusable(self.path, exc) from exc
        self._owner = os.getpid()
        try:
            # flock, not fcntl: it also keeps out a second holder in this very process.
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            holder, _ = holder_of(self._lock_fd)
            self._let_go()
            raise StateInUse(
                f"{self.path} is held by process {holder or '?'}",
                field="state_dir",
                hint="stop it, choose another state directory, or go on with `ringfence serve --take-over`",
            ) from exc
        _say_who(self._lock_fd)
        # A forked child shares the lock: it must let go of it, or it would outlive its holder.
        os.register_at_fork(after_in_child=self._let_go)

    def file(self, name: str) -> str:
        return os.path.join(self.path, name)

    def remove(self, name: str) -> None:
        """Remove a file in it, also after the directory was renamed."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def check_place(self) -> None:
        """Raises IoError where its path names another directory now, or none."""
        try:
            here = os.stat(self.path)
            if _identity(here) == self.identity:
                return
        except OSError:
            pass
        raise IoError(
            f"{self.path} was moved or replaced while in use",
            field="state_dir",
            hint="move it back, or stop the server and start it on the new path",
        )

    def check_room(self) -> None:
        """Raises StorageFull where so little is free that one record fits and a sandbox may not."""
        info = os.statvfs(self._fd)
        if info.f_blocks and info.f_bavail * info.f_frsize < _LEAST_ROOM:
            raise StorageFull(
                f"less than {_LEAST_ROOM >> 10} KiB are free in {self.path}",
                hint="free space there",
            )

    def close(self) -> None:
        """Let others have it; idempotent."""
        self._let_go()

    def _let_go(self) -> None:
        fds, self._lock_fd, self._fd = (self._lock_fd, self._fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)


def identity_of(where: int | str) -> str:
    """Device and inode of a file or directory, as a word."""
    return _identity(os.stat(where))


def _identity(info: os.stat_result) -> str:
    return f"{info.st_dev:x}-{info.st_ino:x}"


def holder_of(lock_fd: int) -> tuple[int, bool]:
    """The pid in a lock file (0: none), and whether it was written into this very file.

    A copied directory has a lock file with the original daemon's pid, until its own daemon has it.
    Earlier versions wrote the pid alone.
    """
    words = os.pread(lock_fd, 64, 0).decode("ascii", "replace").split()
    if not words or not words[0].isdecimal():
        return 0, False
    return int(words[0]), words[1:] in ([], [identity_of(lock_fd)])


def _say_who(fd: int) -> None:
    """Write our pid into the lock file, for whoever is refused. A full disk is no reason to stop."""
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {identity_of(fd)}\n".encode(), 0)
    except OSError as exc:
        if exc.errno not in _NO_ROOM:
            raise


def make_private(path: str) -> int:
    """Make the directory where it is not there, narrow its modes and those of what is in it.

    Returns:
        A descriptor of the directory.

    Raises:
        IoError: It cannot be made; others may write to it, and so may have put anything there; or they
            may enter it, and it has content and never was a state directory.
    """
    fd = -1
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        fd = os.open(path, _DIRECTORY)
        _narrow(fd, path)
    except OSError as exc:
        if fd >= 0:
            os.close(fd)
        raise _unusable(path, exc) from exc
    return fd


def _unusable(path: str, exc: OSError) -> IoError:
    hint = "name a new directory, in one that this user may write"
    return IoError(f"{path}: {exc.strerror}", field="state_dir", hint=hint)


def _narrow(fd: int, path: str) -> None:
    info = os.fstat(fd)
    if info.st_uid != os.geteuid():
        raise PermissionError(1, "belongs to another user", path)
    if info.st_mode & 0o022:
        raise PermissionError(1, "other users can write to it", path)
    entries = [entry for entry in os.scandir(fd) if entry.name != "lost+found"]
    # Regular ones: /var has a symlink `lock`.
    is_ours = not entries or any(
        e.name in _OF_SERVERS and e.is_file(follow_symlinks=False) for e in entries
    )
    if info.st_mode & 0o077:
        if not is_ours:
            why = f"other users can enter it, and {entries[0].name!r} in it is not a server's"
            raise PermissionError(1, why, path)
        os.fchmod(fd, 0o700)
    for entry in entries if is_ours else ():
        mode = entry.stat(follow_symlinks=False).st_mode
        if (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) and mode & 0o077:
            files.chmod_nofollow(fd, entry.name, stat.S_IMODE(mode) & 0o700)
