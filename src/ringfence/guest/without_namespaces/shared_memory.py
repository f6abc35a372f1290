"""Shared memory without a /dev/shm or an IPC namespace of the sandbox's own: POSIX and System V.

The C library opens the files of POSIX shared memory by a fixed name, in flags that few other programs use,
so a first filter asks about those. What names no file in /dev/shm goes on to the kernel, where Landlock
judges it: nothing is granted by that, whatever the caller makes of the name meanwhile.
"""

from __future__ import annotations

import errno
import os
import stat

from ...launcher.pid1 import connects
from ...linux import on_behalf, seccomp
from ..looking import NO_DIRECTORY, field_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypedDict

    class Shared(TypedDict):
        calls: dict[int, str]  # calls that ask, by their numbers on this machine
        place: str  # a directory that the sandbox may write


_DIRECTORY = b"/dev/shm/"
_FLAGS = os.O_ACCMODE | os.O_CREAT | os.O_EXCL | os.O_TRUNC
# Flags that ask: those of shm_open(3) and sem_open(3), not those that walk a tree.
ASKED = (
    (os.O_NOFOLLOW, os.O_NOFOLLOW | os.O_DIRECTORY),
    (os.O_CREAT | os.O_EXCL, os.O_CREAT | os.O_EXCL),
)
"""Each as a value and the mask that it is seen through."""


class SharedMemory:
    """Answers each question.

    Args:
        listener_fd: Of `asking.guard`.
    """

    def __init__(self, listener_fd: int, shared: Shared) -> None:
        self.calls = shared["calls"]
        self._listener_fd, self._place = listener_fd, os.fsencode(shared["place"])

    def serve(self, asked: seccomp.Notification) -> None:
        name, words = self.calls[asked.number], asked.arguments
        at = 1 if name.endswith("at") else 0
        connects.start_guard()
        try:
            own = self._own(asked.pid, words[at])
            if own is None:
                seccomp.go_on(self._listener_fd, asked)
                return
            if name.startswith("open"):
                self._open(asked, own, words[at + 1], words[at + 2])
                return
            if name.startswith("link"):
                other = self._own(asked.pid, words[3 if at else 1])
                if other is None:
                    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
                self._check(asked)
                os.link(own, other, src_dir_fd=NO_DIRECTORY, dst_dir_fd=NO_DIRECTORY)
            else:
                self._check(asked)
                os.unlink(own, dir_fd=NO_DIRECTORY)
            number = 0
        except OSError as exc:
            number = exc.errno or errno.EIO
        finally:
            connects.end_guard()
        seccomp.answer(self._listener_fd, asked, number)

    def _own(self, thread: int, address: int) -> bytes | None:
        """The path for a name in /dev/shm; None for others."""
        try:
            path = on_behalf.path(thread, address)
        except OSError:
            return None  # the kernel says what is wrong with it
        name = path[len(_DIRECTORY) :] if path.startswith(_DIRECTORY) else b""
        return None if b"/" in name or name in (b"", b".", b"..") else self._place + b"/" + name

    def _check(self, asked: seccomp.Notification) -> None:
        if not seccomp.is_waiting(self._listener_fd, asked):
            raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))

    def _open(self, asked: seccomp.Notification, path: bytes, flags: int, mode: int) -> None:
        before = -1
        if flags & os.O_CREAT:
            before = os.umask(int(field_of(f"/proc/{asked.pid}/status", b"\nUmask:"), 8))
        try:
            self._check(asked)
            # Not to wait for who opens the other end of a pipe that a program made there.
            ours = flags & _FLAGS | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(path, ours, mode & 0o777, dir_fd=NO_DIRECTORY)
        finally:
            if before >= 0:
                os.umask(before)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            os.set_blocking(fd, True)
            seccomp.answer_with(self._listener_fd, asked, fd, flags & os.O_CLOEXEC)
        finally:
            os.close(fd)


_IPC_CREAT, _IPC_EXCL = 0o1000, 0o2000  # include/uapi/linux/ipc.h
_IPC_RMID, _IPC_STAT = 0, 2
_MOST, _MOST_BYTES = 64, 64 << 20  # what nobody is attached to counts as no program's memory


class Segments:
    """System V shared memory, in a list of the sandbox's own in place of a namespace.

    The agent makes each segment without a key and stays attached to it. An id is in a register, so that
    `shmat` and `shmctl` on one of the sandbox's own can go on to the kernel.

    Args:
        listener_fd, key: Of `asking.guard`.
        calls: Calls that ask, by their numbers on this machine.
    """

    def __init__(self, listener_fd: int, calls: dict[int, str], key: int) -> None:
        self.calls, self._listener_fd, self._key = calls, listener_fd, key
        self._own: dict[int, tuple[int, int, int]] = {}  # id: its key, size and address here

    def serve(self, asked: seccomp.Notification) -> None:
        first, second, third = (word & 0xFFFFFFFF for word in asked.arguments[:3])
        name = self.calls[asked.number]
        if name == "shmget":
            try:
                id = self._get(first, asked.arguments[1], third)
            except OSError as exc:
                seccomp.answer(self._listener_fd, asked, exc.errno or errno.EIO)
            else:
                seccomp.answer_value(self._listener_fd, asked, id)
        elif first not in self._own:
            seccomp.answer(self._listener_fd, asked, errno.EINVAL)
        elif name == "shmat" or second == _IPC_STAT:
            seccomp.go_on(self._listener_fd, asked)
        elif second == _IPC_RMID:
            on_behalf.detach(self._own.pop(first)[2])
            seccomp.answer(self._listener_fd, asked, 0)
        else:
            seccomp.answer(self._listener_fd, asked, errno.EPERM)

    def _get(self, key: int, size: int, flags: int) -> int:
        for id, (of_key, has, _address) in self._own.items():
            if key and key == of_key:
                if flags & (_IPC_CREAT | _IPC_EXCL) == _IPC_CREAT | _IPC_EXCL:
                    raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
                if size > has:
                    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
                return id
        if key and not flags & _IPC_CREAT:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        total = sum(each[1] for each in self._own.values())
        if len(self._own) >= _MOST or size > _MOST_BYTES - total:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        id, address = on_behalf.segment(size, self._key)
        self._own[id] = key, size, address
        return id
