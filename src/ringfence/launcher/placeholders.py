"""What stood in for absent protected paths on the host, mostly empty directories, and its removal.

Every sandbox whose protection rests on a placeholder holds a shared lock on it: one that another
sandbox still needs is left, or that one's protection would vanish with it.
"""

from __future__ import annotations

import fcntl
import posix as os

TYPE_CHECKING = False
if TYPE_CHECKING:
    # (directory, name, device, inode) of what was made
    Placeholder = tuple[str, str, int, int]

# A file's whole content, where a directory would break who reads it; none means anything to git.
FILES = {"commondir": b".\n", "config.worktree": b""}
MARK = 0o1000  # sticky: tells a directory made as a placeholder from one of the user's own
_OPEN_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def remove(made: list[Placeholder]) -> None:
    """Remove those that are as they were made and that nobody needs, innermost first."""
    for directory, name, device, inode in reversed(made):
        try:
            parent = os.open(directory, _OPEN_DIR)
        except OSError:
            continue
        try:
            _remove_one(parent, name, (device, inode))
        except OSError:
            pass  # gone already, in use, or the sandbox put something next to what is protected
        finally:
            os.close(parent)


def erase_note(path: str) -> None:
    """Remove the note of placeholders that are gone now; its directory goes with the last one."""
    try:
        os.unlink(path)
        os.rmdir(path.rpartition("/")[0])
    except OSError:
        pass  # swept by another start, or other notes are in it


def _remove_one(parent: int, name: str, identity: tuple[int, int]) -> None:
    fd = os.open(name, _OPEN, dir_fd=parent)
    try:
        found = os.fstat(fd)
        if (found.st_dev, found.st_ino) != identity:
            return
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if found.st_mode & 0o170000 == 0o040000:
            try:
                os.rmdir(name, dir_fd=parent)
            except OSError:
                if not _holds_only_placeholders(fd):  # in use now: then it is the user's own
                    os.fchmod(fd, found.st_mode & 0o777)
        elif os.read(fd, 64) == FILES.get(name):
            os.unlink(name, dir_fd=parent)
    finally:
        os.close(fd)


def _holds_only_placeholders(directory: int) -> bool:
    """Whether another sandbox, starting or ending, is all that keeps `directory` from being empty."""
    for name in os.listdir(directory):
        try:
            fd = os.open(name, _OPEN, dir_fd=directory)
        except FileNotFoundError:
            continue
        except OSError:
            return False
        try:
            if not is_one(fd, name):
                return False
        finally:
            os.close(fd)
    return True


def is_one(fd: int, name: str) -> bool:
    """Whether what is open as `fd` was made as a placeholder."""
    mode = os.fstat(fd).st_mode
    if mode & 0o170000 == 0o040000:
        return bool(mode & MARK)
    return name in FILES and os.pread(fd, 64, 0) == FILES[name]
