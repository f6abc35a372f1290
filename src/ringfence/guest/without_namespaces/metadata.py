"""Modes, owners and times of files, which Landlock does not judge: the agent sets them for its programs.

A first filter has each such call wait for the agent. It opens what the call names with O_PATH, sees
whether just that inode lies in a directory that the sandbox may write, and changes it by the
descriptor. Nothing is left to the caller's own call: another thread could swap the path, a link, the
descriptor or the working directory in the meantime.
"""

from __future__ import annotations

import errno
import os

from ...launcher.pid1 import connects
from ...linux import on_behalf, seccomp
from .. import looking

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypedDict

    class Judged(TypedDict):
        """Calls that are judged, and directories where they are allowed."""

        calls: dict[int, str]  # number of each call on this machine, and its name
        roots: list[str]  # directories that the sandbox may write, without links


_AT_FDCWD, _AT_SYMLINK_NOFOLLOW, _AT_EMPTY_PATH = -100, 0x100, 0x1000
_TIMES_BYTES = 32  # two struct timespec
# A descriptor of the caller's own, by name: for us /proc/self would be another process.
_OWN_DESCRIPTORS = (b"/proc/self/fd", b"/proc/thread-self/fd", b"/dev/fd")


class Metadata:
    """Answers each question about metadata.

    Args:
        fd, key: Of `asking.guard`.
    """

    def __init__(self, fd: int, judged: Judged, key: int) -> None:
        self.fd, self._calls, self._key = fd, judged["calls"], key
        self._roots = judged["roots"]
        self._beneath = tuple(f"{root}/" for root in self._roots)

    def serve(self, asked: seccomp.Notification) -> None:
        try:
            number = self._change(asked)
        except OSError as exc:
            number = exc.errno or errno.EIO
        # An undumpable caller cannot be read: EPERM is what these calls know.
        seccomp.answer(self.fd, asked, errno.EPERM if number == errno.EACCES else number)

    def _change(self, asked: seccomp.Notification) -> int:
        name, values = self._calls[asked.number], asked.arguments
        times = None
        if name == "utimensat" and values[2]:
            times = on_behalf.memory(asked.pid, values[2], _TIMES_BYTES)
        fd = self._open(asked.pid, *_place(name, values))
        try:
            if not self._is_own(fd):
                return errno.EPERM
            if not seccomp.is_waiting(self.fd, asked):
                return errno.EINTR  # its number may be another thread's by now; nobody hears this
            if name == "utimensat":
                return on_behalf.change_times(fd, times, self._key)
            at = 2 if name.endswith(("at", "at2")) else 1
            numbers = [connects.signed(value) for value in values[at : at + 2]]
            if "chmod" in name:
                return on_behalf.change_mode(fd, numbers[0], self._key)
            return on_behalf.change_owner(fd, numbers[0], numbers[1], self._key)
        finally:
            os.close(fd)

    def _open(self, thread: int, directory: int, address: int | None, flags: int) -> int:
        """The inode that a call names: by a path at `address`, or, without one, the descriptor itself."""
        if flags & ~(_AT_SYMLINK_NOFOLLOW | _AT_EMPTY_PATH):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        path = b"" if address is None else on_behalf.path(thread, address)
        own = _own_descriptor(path)
        if own >= 0 and not flags & _AT_SYMLINK_NOFOLLOW:
            path, directory, address = b"", own, None
        if path.startswith(b"/"):
            return _opened(connects.as_seen_here(thread, path), flags)
        if not path and address is not None and not flags & _AT_EMPTY_PATH:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        base = _descriptor(thread, directory)
        if not path:
            return base
        try:
            return _opened(path, flags, base)
        finally:
            os.close(base)

    def _is_own(self, fd: int) -> bool:
        """Return whether the inode lies in a directory of the sandbox's.

        The name is the kernel's own, of the opened file, and no call of a guest's moves a file across
        the border of these directories: Landlock refuses to link or rename it.
        """
        path = os.readlink(f"/proc/self/fd/{fd}")
        return path in self._roots or path.startswith(self._beneath)


def _opened(path: bytes, flags: int, base: int = looking.NO_DIRECTORY) -> int:
    link = os.O_NOFOLLOW if flags & _AT_SYMLINK_NOFOLLOW else 0
    return os.open(path, os.O_PATH | os.O_CLOEXEC | link, dir_fd=base)


def _own_descriptor(path: bytes) -> int:
    """Return the descriptor of the caller's own that a path names; -1: it names none."""
    directory, _, number = path.rpartition(b"/")
    is_own = directory in _OWN_DESCRIPTORS and number.isdigit() and len(number) <= 9
    return int(number) if is_own else -1


def _descriptor(thread: int, number: int) -> int:
    """The file of a descriptor of the caller's; its working directory for AT_FDCWD."""
    name = "cwd" if number == _AT_FDCWD else f"fd/{number}"
    try:
        return os.open(f"/proc/{thread}/{name}", os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from None


def _place(name: str, values: tuple[int, ...]) -> tuple[int, int | None, int]:
    """The descriptor, the address of the path (None: the call has no path) and the flags of a call."""
    if name in ("fchmod", "fchown"):
        return connects.signed(values[0]), None, 0
    if name in ("chmod", "chown", "lchown"):
        return _AT_FDCWD, values[0], _AT_SYMLINK_NOFOLLOW if name == "lchown" else 0
    flags = {"fchmodat": 0, "fchownat": values[4]}.get(name, values[3]) & 0xFFFFFFFF
    address = values[1] or None if name == "utimensat" else values[1]
    return connects.signed(values[0]), address, flags
