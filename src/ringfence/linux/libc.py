"""The one door to system calls that Python's standard library lacks."""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
prctl = _libc.prctl

# arch/*/include/generated/uapi/asm/unistd_64.h; from 424 on the numbers are the same everywhere.
_X86_64 = {
    "pivot_root": 155,
    "mount": 165,
    "umount2": 166,
    "setns": 308,
    "seccomp": 317,
    "capset": 126,
    "signalfd4": 289,
    "sethostname": 170,
    "unshare": 272,
    "prctl": 157,
    "prlimit64": 302,
}  # noqa: E501
_AARCH64 = {
    "pivot_root": 41,
    "mount": 40,
    "umount2": 39,
    "setns": 268,
    "seccomp": 277,
    "capset": 91,
    "signalfd4": 74,
    "sethostname": 161,
    "unshare": 97,
    "prctl": 167,
    "prlimit64": 261,
}  # noqa: E501
_COMMON = {
    "open_tree": 428,
    "move_mount": 429,
    "clone3": 435,
    "close_range": 436,
    "openat2": 437,
    "mount_setattr": 442,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
}
MACHINE = os.uname().machine
_NR = {**_COMMON, **(_AARCH64 if MACHINE == "aarch64" else _X86_64)}


def raise_errno(call: str, *what: object) -> None:
    """Raise the OSError of the call that just failed, naming it and what it was about."""
    number = ctypes.get_errno()
    raise OSError(number, f"{call}: {os.strerror(number)}", *(str(w) for w in what[:1]))


def syscall(name: str, *args: object, what: object = None) -> int:
    """Make one system call; integers are passed as 64-bit words.

    Raises:
        OSError: whatever the kernel answered.

    Source: syscall(2).
    """
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    result: int = _libc.syscall(ctypes.c_long(_NR[name]), *words)
    # ctypes keeps the errno of an earlier failure: the result decides, never errno.
    if result < 0:
        raise_errno(name, *(() if what is None else (what,)))
    return result


def path_bytes(path: str | bytes) -> bytes:
    """`path` as the kernel wants it."""
    return os.fsencode(path)


def prlimit64(pid: int, resource: int, soft: int, hard: int) -> None:
    """Set a resource limit; all 64 bits of `pid` and `resource` reach the system-call filter.

    The kernel reads only their lower halves.
    Source: prlimit(2).
    """
    limits = (ctypes.c_uint64 * 2)(soft, hard)
    syscall("prlimit64", pid, resource, ctypes.byref(limits), None)
