"""Installing a system-call filter, and answering for the system calls that it asks about: seccomp(2)."""

from __future__ import annotations

import _struct as struct
import errno
import fcntl

from . import cdata
from .libc import declare, raise_errno

# include/uapi/linux/seccomp.h
SECCOMP_SET_MODE_FILTER = 1
_NEW_LISTENER, _WAIT_KILLABLE_RECV = 1 << 3, 1 << 5
RET_ALLOW, RET_USER_NOTIF, RET_ERRNO = 0x7FFF0000, 0x7FC00000, 0x00050000
_NOTIF_RECV, _NOTIF_SEND, _NOTIF_ID_VALID = 0xC0502100, 0xC0182101, 0x40082102
_NOTIF_ADDFD = 0x40182103
_FLAG_CONTINUE = 1
_ADDFD_SETFD = 1
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")  # struct seccomp_notif
_RESPONSE = struct.Struct("=QqiI")
_ID = struct.Struct("=Q")
_ADDFD = struct.Struct("=QIIII")  # struct seccomp_notif_addfd


class _SockFprog(cdata.Structure):
    """struct sock_fprog, include/uapi/linux/filter.h."""

    _fields_ = (("len", cdata.c_ushort), ("filter", cdata.c_char_p))


_seccomp = declare("seccomp", cdata.c_uint, cdata.c_uint, cdata.c_void_p)


def install_filter(program: bytes) -> None:
    """Put the calling thread and all its children under `program`, packed struct sock_filter.

    Raises:
        OSError: EACCES without no_new_privs; EINVAL for a program the kernel does not accept.

    Source: seccomp(2).
    """
    fprog = _SockFprog(len(program) // 8, program)
    if _seccomp(SECCOMP_SET_MODE_FILTER, 0, cdata.byref(fprog)) < 0:
        raise_errno("seccomp")


def install_listener(program: bytes) -> int:
    """As `install_filter`; what it gives RET_USER_NOTIF to waits for who reads from the result.

    Raises:
        OSError: EBUSY where a filter above has a listener; EINVAL before Linux 5.0.

    Source: seccomp_unotify(2).
    """
    fprog = _SockFprog(len(program) // 8, program)
    flags = _NEW_LISTENER | _WAIT_KILLABLE_RECV
    fd = _seccomp(SECCOMP_SET_MODE_FILTER, flags, cdata.byref(fprog))
    if fd < 0 and cdata.get_errno() == errno.EINVAL:
        # Before Linux 5.19: a signal ends the wait, and the call begins again or is EINTR.
        fd = _seccomp(SECCOMP_SET_MODE_FILTER, _NEW_LISTENER, cdata.byref(fprog))
    if fd < 0:
        raise_errno("seccomp")
    return fd


class Notification:
    """A system call that waits.

    Attributes:
        pid: The thread that makes it, as our PID namespace numbers it.
        number, arguments: Of the call, as in its registers.
    """

    def __init__(self, id: int, pid: int, number: int, arguments: tuple[int, ...]) -> None:
        self.id, self.pid, self.number, self.arguments = id, pid, number, arguments


def receive(listener_fd: int) -> Notification:
    """The next one that waits.

    Raises:
        OSError: ENOENT where it no longer does.
    """
    data = bytearray(_NOTIFICATION.size)
    fcntl.ioctl(listener_fd, _NOTIF_RECV, data)
    id, pid, _flags, number, _arch, _at, *arguments = _NOTIFICATION.unpack(data)
    return Notification(id, pid, number, tuple(arguments))


def is_waiting(listener_fd: int, asked: Notification) -> bool:
    """Return whether the notifying thread still waits: only then was its memory read from the right
    thread.
    """
    try:
        fcntl.ioctl(listener_fd, _NOTIF_ID_VALID, _ID.pack(asked.id))
    except OSError:
        return False
    return True


def go_on(listener_fd: int, asked: Notification) -> None:
    """Let the kernel do it. Only where what was judged lies in registers: memory may have changed since.

    Source: seccomp_unotify(2), Linux 5.5.
    """
    _respond(listener_fd, _RESPONSE.pack(asked.id, 0, 0, _FLAG_CONTINUE))


def answer(listener_fd: int, asked: Notification, number: int) -> None:
    """Answer with an errno, or with 0."""
    _respond(listener_fd, _RESPONSE.pack(asked.id, 0, -number, 0))


def answer_value(listener_fd: int, asked: Notification, value: int) -> None:
    _respond(listener_fd, _RESPONSE.pack(asked.id, value, 0, 0))


def answer_with(listener_fd: int, asked: Notification, fd: int, flags: int) -> None:
    """Answer with a descriptor of the notifying process for the open file `fd`; O_CLOEXEC may be a flag.

    In two steps: SECCOMP_ADDFD_FLAG_SEND, interrupted, lets the call return 0 as if that were it.

    Raises:
        OSError: EMFILE where that process has no room, ENOENT where nobody waits any longer.
    """
    number = _add(listener_fd, _ADDFD.pack(asked.id, 0, fd, 0, flags))
    _respond(listener_fd, _RESPONSE.pack(asked.id, number, 0, 0))


def put_in_place(listener_fd: int, asked: Notification, fd: int, number: int, flags: int) -> None:
    """Make `number` of the notifying process a descriptor for the open file `fd`, whatever it was.

    Raises:
        OSError: ENOENT where nobody waits any longer.
    """
    _add(listener_fd, _ADDFD.pack(asked.id, _ADDFD_SETFD, fd, number, flags))


def _add(listener_fd: int, added: bytes) -> int:
    while True:
        try:
            number: int = fcntl.ioctl(listener_fd, _NOTIF_ADDFD, bytearray(added))
            return number
        except InterruptedError:
            continue


def _respond(listener_fd: int, response: bytes) -> None:
    try:
        fcntl.ioctl(listener_fd, _NOTIF_SEND, bytearray(response))
    except OSError as exc:
        if exc.errno != errno.ENOENT:  # nobody waits any longer
            raise
