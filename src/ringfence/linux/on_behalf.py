"""System calls that PID 1 makes for a process that waits for its answer.

Each carries a key in its fifth argument, which the kernel does not read: the sandbox's first filter
lets these calls pass only with it (see `launcher.pid1.notifications`).
"""

from __future__ import annotations

import errno
import posix as os

from . import cdata
from .libc import declare, raise_errno

_PIDFD_THREAD = os.O_EXCL  # include/uapi/linux/pidfd.h, Linux 6.9

_int, _key = cdata.c_long, cdata.c_ulong
_pidfd_getfd = declare("pidfd_getfd", _int, _int, _int, _int, _key)
_connect = declare("connect", _int, cdata.c_char_p, _int, _int, _key)


def descriptor(thread: int, number: int, key: int) -> int:
    """A descriptor of ours for the open file that `thread` has as `number`.

    Raises:
        OSError: EBADF where it has none, EPERM where it may not be traced.

    Source: pidfd_getfd(2), Linux 5.6.
    """
    pidfd = _open(thread)
    try:
        fd = _pidfd_getfd(pidfd, number, 0, 0, key)
        if fd < 0:
            raise_errno("pidfd_getfd")
        return fd
    finally:
        os.close(pidfd)


def _open(thread: int) -> int:
    """A pidfd of the thread; before Linux 6.9, of its process."""
    try:
        return os.pidfd_open(thread, _PIDFD_THREAD)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
    with open(f"/proc/{thread}/status", "rb") as file:
        leader = file.read().partition(b"\nTgid:")[2].split(None, 1)[0]
    return os.pidfd_open(int(leader), 0)


def memory(thread: int, address: int, length: int) -> bytes:
    """Bytes of its memory.

    Raises:
        OSError: EFAULT where there are fewer, EACCES or EPERM where it may not be traced.

    Source: proc(5), /proc/PID/mem.
    """
    fd = os.open(f"/proc/{thread}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.pread(fd, length, address)
    except (OSError, OverflowError):
        found = b""
    finally:
        os.close(fd)
    if len(found) != length:
        raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
    return found


def connect(fd: int, address: bytes, key: int) -> int:
    """Its errno, 0 when connected. A signal ends the wait with EINTR.

    Source: connect(2).
    """
    return cdata.get_errno() if _connect(fd, address, len(address), 0, key) < 0 else 0
