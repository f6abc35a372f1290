"""System calls that PID 1 makes for a process that waits for its answer.

Each carries a key in its fifth argument (for metadata of files in its sixth), which the kernel does not
read: the sandbox's first filter lets these calls pass only with it (see `launcher.pid1.notifications`).
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
_socket = declare("socket", _int, _int, _int, _int, _key)
_bind = declare("bind", _int, cdata.c_char_p, _int, _int, _key)
_fchmodat = declare("fchmodat", _int, cdata.c_char_p, _int, _int, _int, _key)
_fchownat = declare("fchownat", _int, cdata.c_char_p, _int, _int, _int, _key)
_utimensat = declare("utimensat", _int, cdata.c_char_p, cdata.c_char_p, _int, _int, _key)
_shmget = declare("shmget", _int, _int, _int, _int, _key)
_shmat = declare("shmat", _int, _int, _int, _int, _key)
_shmctl = declare("shmctl", _int, _int, _int, _int, _key)
_shmdt = declare("shmdt", _int)
_AT_FDCWD = -100
_PATH_MAX = 4096


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
    found = _memory(thread, address, length)
    if len(found) != length:
        raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
    return found


def path(thread: int, address: int) -> bytes:
    """A path in its memory, without the NUL.

    Raises:
        OSError: As `memory`; ENAMETOOLONG where no NUL is among the first 4,096 bytes.
    """
    found, end, _rest = _memory(thread, address, _PATH_MAX).partition(b"\0")
    if not end:
        number = errno.ENAMETOOLONG if len(found) == _PATH_MAX else errno.EFAULT
        raise OSError(number, os.strerror(number))
    return found


def _memory(thread: int, address: int, most: int) -> bytes:
    fd = os.open(f"/proc/{thread}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(fd, most, address)
    except (OSError, OverflowError):
        return b""
    finally:
        os.close(fd)


def connect(fd: int, address: bytes, key: int) -> int:
    """Its errno, 0 when connected. A signal ends the wait with EINTR.

    Source: connect(2).
    """
    return cdata.get_errno() if _connect(fd, address, len(address), 0, key) < 0 else 0


def socket(family: int, kind: int, key: int) -> int:
    """A socket of ours.

    Source: socket(2).
    """
    fd = _socket(family, kind, 0, 0, key)
    if fd < 0:
        raise_errno("socket")
    return fd


def bind(fd: int, address: bytes, key: int) -> int:
    """Its errno, 0 when bound.

    Source: bind(2).
    """
    return _errno_of(_bind(fd, address, len(address), 0, key))


def segment(size: int, key: int) -> tuple[int, int]:
    """A new segment of System V shared memory: its id, and where it is attached here.

    It is marked as removed: it goes with the last process that is attached, however that ends.

    Raises:
        OSError: As the kernel said.

    Source: shmget(2), shmop(2), shmctl(2) on IPC_RMID.
    """
    id = _shmget(0, size, 0o1600, 0, key)
    if id < 0:
        raise_errno("shmget")
    address = _shmat(id, 0, 0, 0, key)
    number = _errno_of(address)
    _shmctl(id, 0, 0, 0, key)
    if number:
        raise OSError(number, os.strerror(number))
    return id, address


def detach(address: int) -> None:
    """Let go of a segment.

    Source: shmop(2).
    """
    _shmdt(address)


def change_mode(fd: int, mode: int, key: int) -> int:
    """Set the mode of the inode behind an O_PATH descriptor; its errno, 0 when changed.

    Source: fchmodat(2), open(2) on O_PATH.
    """
    return _errno_of(_fchmodat(_AT_FDCWD, b"/proc/self/fd/%d" % fd, mode, 0, 0, key))


def change_owner(fd: int, uid: int, gid: int, key: int) -> int:
    """Set its owner, as `change_mode`; -1 leaves an id as it is.

    Source: fchownat(2).
    """
    return _errno_of(_fchownat(_AT_FDCWD, b"/proc/self/fd/%d" % fd, uid, gid, 0, key))


def change_times(fd: int, times: bytes | None, key: int) -> int:
    """Set its times, as `change_mode`: two struct timespec; None: now.

    Source: utimensat(2).
    """
    return _errno_of(_utimensat(_AT_FDCWD, b"/proc/self/fd/%d" % fd, times, 0, 0, key))


def _errno_of(result: int) -> int:
    return cdata.get_errno() if result < 0 else 0
