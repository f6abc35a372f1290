"""Queries about files and processes inside, one per function."""

from __future__ import annotations

import errno
import os
import resource
import stat

from ..launcher.pid1 import processes

_MACHINE_ID = "/etc/machine-id"
_NO_FILE = (
    errno.ENOENT,
    errno.ELOOP,
    errno.ENXIO,
    errno.EISDIR,
)  # the last: what a guest may have put there

# For calls with an absolute path, for which the kernel reads no descriptor: without one, the calls of an
# agent would wait for itself where a filter asks about them (`asking`).
NO_DIRECTORY = 0


def field_of(path: str, name: bytes) -> bytes:
    """The word behind a name in a file of /proc.

    Raises:
        ProcessLookupError: It is not there: the process has ended.
    """
    found = processes.read(path).partition(name)[2].split(None, 1)
    if not found:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    return found[0]


def open_file(path: str, flags: int, mode: int) -> int:
    """A regular file, as the guest's user sees it. Never blocks on a FIFO."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK, mode)
    found = os.fstat(fd)
    kind = found.st_mode & 0o170000
    problem: OSError | None = None
    if kind == 0o040000:
        problem = IsADirectoryError(errno.EISDIR, "is a directory", path)
    elif kind != 0o100000:
        problem = OSError(errno.EINVAL, "is not a regular file", path)
    elif not path.startswith("/proc/") and found.st_dev == os.stat("/proc").st_dev:
        # A guest's symlink to /proc/self would show our own side of things: it is not theirs to read.
        problem = PermissionError(errno.EACCES, "a link into /proc", path)
    if problem is not None:
        os.close(fd)
        raise problem
    return fd


def can_read(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def can_write(path: str) -> bool:
    """By opening it; in a directory, by making a file there and removing it again."""
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        if not os.path.isdir(path):
            os.close(os.open(path, flags))
            return True
        trial = os.path.join(path, f".ringfence-{os.urandom(8).hex()}")
        os.close(os.open(trial, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=NO_DIRECTORY))
        os.unlink(trial, dir_fd=NO_DIRECTORY)
    except OSError:
        return False
    return True


def described(path: str) -> bytes:
    info = os.lstat(path)
    link = os.readlink(path) if (info.st_mode & 0o170000) == 0o120000 else ""
    head = f"{info.st_mode} {info.st_size} {info.st_mtime_ns} "
    return head.encode() + os.fsencode(link)


def holders_of_the_hosts() -> list[int]:
    """Processes with a descriptor of the host's open, but for us and who is just ending."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            links = [os.readlink(f"/proc/{name}/fd/{fd}") for fd in os.listdir(f"/proc/{name}/fd")]
        except OSError:
            continue
        if any(link.startswith("host:") for link in links):
            found.append(int(name))
    return found


def name_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "?"


def resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def renew_machine_id() -> None:
    """Where there is a machine-id(5), another one: whoever else goes on from here has it too.

    Raises:
        OSError: It cannot be written.
    """
    flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(_MACHINE_ID, flags)
    except OSError as exc:
        if exc.errno in _NO_FILE:
            return
        raise
    try:
        found = os.fstat(fd)
        if stat.S_ISREG(found.st_mode) and found.st_size:  # an empty one is for somebody to fill
            os.write(fd, os.urandom(16).hex().encode() + b"\n")
    finally:
        os.close(fd)
