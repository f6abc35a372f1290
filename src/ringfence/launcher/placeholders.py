"""Placeholders for absent protected paths on the host, mostly empty directories, and their removal.

Every sandbox whose protection rests on a placeholder holds a shared lock on it: a placeholder that
another sandbox still needs is left, or that sandbox would lose its protection.
"""

from __future__ import annotations

import fcntl
import posix as os

TYPE_CHECKING = False
if TYPE_CHECKING:
    # (directory, name, device, inode) of what was made; of a state of git that was absent, 0 and 0
    Placeholder = tuple[str, str, int, int]

_COMMENT = b"# Held by a running sandbox; removed when it ends.\n"
# A file's whole content, where a directory would break who reads it; none means anything to its reader.
FILES = {"commondir": b".\n", "config.worktree": b"", "hgrc": _COMMENT, ".yarnrc.yml": _COMMENT}
# State files that git continues from, as the user's `git rebase --continue` does, and their
# commands that run nothing.
STATES = {
    "rebase-merge": (
        b"pick p reword r edit e squash s fixup f drop d break b label l reset t merge m update-ref u noop"
    ).split(),
    "sequencer": b"pick p revert".split(),
}
_STRATEGIES = (b"", b"ort", b"recursive")
_OPTIONS = (
    b"allow-empty allow-empty-message allow-ff default-msg-cleanup drop-redundant-commits edit"
    b" keep-redundant-commits mainline no-commit record-origin signoff"
).split()
_MOST_STATE = 1 << 16
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
    if identity == (0, 0):
        _set_aside(parent, name)
        return
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


def _set_aside(parent: int, name: str) -> None:
    """Take from git's way what a sandbox left to go on with, unless that only picks commits."""
    try:
        fd = os.open(name, _OPEN, dir_fd=parent)
    except FileNotFoundError:
        return
    except OSError:
        fd = -1  # a link
    try:
        if fd < 0 or not _runs_nothing(fd, name):
            os.rename(
                name, f"{name}.left-{os.urandom(6).hex()}", src_dir_fd=parent, dst_dir_fd=parent
            )
    finally:
        if fd >= 0:
            os.close(fd)


def _runs_nothing(state: int, name: str) -> bool:
    is_rebase = name == "rebase-merge"
    todo = _lines(state, "git-rebase-todo" if is_rebase else "todo")
    strategy, options = _lines(state, "strategy", b""), _lines(state, "opts", b"[options]")
    if todo is None or strategy is None or options is None:
        return False
    commands = {line.split()[0] for line in todo if not line.startswith(b"#")}
    keys = {line.partition(b"=")[0].rstrip() for line in options if line != b"[options]"}
    return (
        commands.issubset(STATES[name])
        and set(strategy).issubset(_STRATEGIES)
        and (is_rebase or keys.issubset(_OPTIONS))
    )


def _lines(directory: int, name: str, absent: bytes | None = None) -> list[bytes] | None:
    """The lines of a file that are not blank; None: it cannot be read, or is too long."""
    try:
        fd = os.open(name, _OPEN, dir_fd=directory)
    except FileNotFoundError:
        return None if absent is None else absent.split()
    except OSError:
        return None
    try:
        if os.fstat(fd).st_mode & 0o170000 != 0o100000:
            return None
        data = os.read(fd, _MOST_STATE + 1)
    finally:
        os.close(fd)
    if len(data) > _MOST_STATE:
        return None
    return [line.strip() for line in data.split(b"\n") if line.strip()]


def _holds_only_placeholders(directory: int) -> bool:
    """Return whether `directory` holds nothing but placeholders of a sandbox that starts or ends."""
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
    """Return whether the open file was made as a placeholder."""
    mode = os.fstat(fd).st_mode
    if mode & 0o170000 == 0o040000:
        return bool(mode & MARK)
    return name in FILES and os.pread(fd, 64, 0) == FILES[name]
