"""Installing a system-call filter: seccomp(2)."""

from __future__ import annotations

from . import cdata
from .libc import declare, raise_errno

SECCOMP_SET_MODE_FILTER = 1  # include/uapi/linux/seccomp.h


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
