"""Installing a system-call filter: seccomp(2)."""

from __future__ import annotations

import ctypes

from .libc import syscall

SECCOMP_SET_MODE_FILTER = 1  # include/uapi/linux/seccomp.h


class _SockFprog(ctypes.Structure):
    """struct sock_fprog, include/uapi/linux/filter.h."""

    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def install_filter(program: bytes) -> None:
    """Put the calling thread and all its children under `program`, packed struct sock_filter.

    Raises:
        OSError: EACCES without no_new_privs; EINVAL for a program the kernel does not accept.

    Source: seccomp(2).
    """
    fprog = _SockFprog(len(program) // 8, program)
    syscall("seccomp", SECCOMP_SET_MODE_FILTER, 0, ctypes.byref(fprog))
