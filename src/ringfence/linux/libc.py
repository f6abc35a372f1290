"""The one door to system calls that Python's standard library lacks."""

from __future__ import annotations

import posix as os
from _functools import partial  # the C half: `functools` costs every start a millisecond

from . import cdata

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

# arch/*/include/generated/uapi/asm/unistd_64.h; from 424 on the numbers are the same everywhere.
_X86_64 = {
    "shmget": 29,
    "clone": 56,
    "shmat": 30,
    "shmctl": 31,
    "shmdt": 67,
    "pivot_root": 155,
    "mount": 165,
    "umount2": 166,
    "setns": 308,
    "seccomp": 317,
    "capset": 126,
    "socket": 41,
    "connect": 42,
    "bind": 49,
    "setfsuid": 122,
    "munmap": 11,
    "madvise": 28,
    "ptrace": 101,
    "signalfd4": 289,
    "timerfd_create": 283,
    "timerfd_settime": 286,
    "inotify_init1": 294,
    "inotify_add_watch": 254,
    "sethostname": 170,
    "unshare": 272,
    "prctl": 157,
    "prlimit64": 302,
    "finit_module": 313,
    "reboot": 169,
    "fchmodat": 268,
    "fchownat": 260,
    "utimensat": 280,
    "get_robust_list": 274,
    "rt_sigprocmask": 14,
    "rseq": 334,
    "kcmp": 312,
    "tee": 276,
    "arch_prctl": 158,
    "setuid": 105,
    "setreuid": 113,
    "setresuid": 117,
    "sched_setparam": 142,
    "sched_setscheduler": 144,
    "sched_setaffinity": 203,
    "sched_setattr": 314,
    "setpriority": 141,
    "ioprio_set": 251,
}
_AARCH64 = {
    "clone": 220,
    "pivot_root": 41,
    "munmap": 215,
    "madvise": 233,
    "ptrace": 117,
    "mount": 40,
    "umount2": 39,
    "setns": 268,
    "seccomp": 277,
    "capset": 91,
    "socket": 198,
    "connect": 203,
    "bind": 200,
    "setfsuid": 151,
    "signalfd4": 74,
    "timerfd_create": 85,
    "timerfd_settime": 86,
    "inotify_init1": 26,
    "inotify_add_watch": 27,
    "sethostname": 161,
    "unshare": 97,
    "prctl": 167,
    "prlimit64": 261,
    "finit_module": 273,
    "reboot": 142,
    "fchmodat": 53,
    "fchownat": 54,
    "utimensat": 88,
    "get_robust_list": 100,
    "rt_sigprocmask": 135,
    "rseq": 293,
    "kcmp": 272,
    "tee": 77,
    "shmget": 194,
    "shmctl": 195,
    "shmat": 196,
    "shmdt": 197,
    "setreuid": 145,
    "setuid": 146,
    "setresuid": 147,
    "setpriority": 140,
    "sched_setparam": 118,
    "sched_setscheduler": 119,
    "sched_setaffinity": 122,
    "sched_setattr": 274,
    "ioprio_set": 30,
    "arch_prctl": -1,  # of x86 alone
}
_COMMON = {
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "clone3": 435,
    "close_range": 436,
    "openat2": 437,
    "pidfd_getfd": 438,
    "mount_setattr": 442,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
}
MACHINE = os.uname().machine
# include/uapi/linux/audit.h
AUDIT_ARCH = 0xC00000B7 if MACHINE == "aarch64" else 0xC000003E
_NR = {**_COMMON, **(_AARCH64 if MACHINE == "aarch64" else _X86_64)}


def raise_errno(call: str, *what: object) -> NoReturn:
    """Raise the OSError of the call that just failed, naming it and what it was about."""
    number = cdata.get_errno()
    raise OSError(number, f"{call}: {os.strerror(number)}", *(str(w) for w in what[:1]))


def declare(name: str, *types: type) -> Callable[..., int]:
    """A function that makes one system call, the C types of its arguments declared once, at import.

    It returns -1 where the kernel refused; the caller asks `raise_errno` to say why.
    Every sandbox makes hundreds of calls, so this is the thinnest way that ctypes has.

    Source: syscall(2).
    """
    function = cdata.function("syscall", cdata.c_long, cdata.c_long, *types)
    call: Callable[..., int] = partial(function, _NR[name])
    return call


def number(name: str) -> int:
    """Of a system call that we make."""
    return _NR[name]


def attempt(number: int, *arguments: int) -> int:
    """Make any system call, by number; its errno, 0 when it did what it says.

    Source: syscall(2).
    """
    given = (*arguments, 0, 0, 0, 0, 0, 0)[:6]
    return cdata.get_errno() if _any(number, *given) < 0 else 0


_any = cdata.function("syscall", *[cdata.c_long] * 8)


def path_bytes(path: str | bytes) -> bytes:
    """`path` as the kernel wants it."""
    return path if isinstance(path, bytes) else path.encode("utf-8", "surrogateescape")


def prlimit64(pid: int, resource: int, soft: int, hard: int) -> None:
    """Set a resource limit; all 64 bits of `pid` and `resource` reach the system-call filter.

    The kernel reads only their lower halves.
    Source: prlimit(2).
    """
    _limits[0], _limits[1] = soft, hard  # used again: each exec of a sandbox sets one
    if _prlimit64(pid, resource, _limits, None) < 0:
        raise_errno("prlimit64")


def munmap(start: int, length: int) -> None:
    """Take away what is mapped there, whatever it is; nothing of ours may use it any more.

    Source: mmap(2).
    """
    if _munmap(start, length) < 0:
        raise_errno("munmap")


def same_file(pid: int, one: int, other_pid: int, other: int) -> bool:
    """Return whether two descriptors, of one process or of two, are of one open file.

    Source: kcmp(2), KCMP_FILE.
    """
    return _is_same(pid, other_pid, 0, one, other)


def share_memory_or_files(pid: int, other: int) -> bool:
    """Return whether two processes share memory, descriptors or their working directory.

    Source: kcmp(2), KCMP_VM, KCMP_FILES, KCMP_FS.
    """
    return any(_is_same(pid, other, kind) for kind in (1, 2, 3))


def _is_same(pid: int, other: int, kind: int, one: int = 0, two: int = 0) -> bool:
    result = _kcmp(pid, other, kind, one, two)
    if result < 0:
        raise_errno("kcmp", pid)
    return result == 0


def tee(source: int, target: int, most: int) -> int:
    """Copy bytes from one pipe to another, and leave them in the first; how many.

    Source: tee(2).
    """
    count = _tee(source, target, most, 0)
    if count < 0:
        raise_errno("tee")
    return count


def block_every_signal() -> None:
    """Block all signals, also the two that the C library keeps to itself: rt_sigprocmask(2)."""
    mask = cdata.c_uint64((1 << 64) - 1)
    if _sigprocmask(0, cdata.byref(mask), None, 8) < 0:
        raise_errno("rt_sigprocmask")


def bytes_at(address: int, length: int) -> bytes:
    fd = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(fd, length, address)
    finally:
        os.close(fd)


def word_of(name: str, length: int) -> int:
    """Value of a variable of the C library.

    Raises:
        OSError: It has none of that name.
    """
    return int.from_bytes(bytes_at(cdata.address_of_variable(name), length), "little", signed=True)


def unregister_sequence(offset: int, signature: int) -> None:
    """Have the kernel forget the restartable sequences of this thread.

    Args:
        offset: From the thread pointer to its area.

    Source: rseq(2).
    """
    thread = cdata.c_ulong()
    if _arch_prctl(0x1003, cdata.byref(thread)) < 0:  # ARCH_GET_FS
        raise_errno("arch_prctl")
    if _rseq(thread.value + offset, 32, 1, signature) < 0:
        raise_errno("rseq")


_sigprocmask = declare(
    "rt_sigprocmask", cdata.c_long, cdata.c_void_p, cdata.c_void_p, cdata.c_size_t
)
_rseq = declare("rseq", *[cdata.c_ulong] * 4)
_arch_prctl = declare("arch_prctl", cdata.c_long, cdata.c_void_p)
_kcmp = declare("kcmp", *[cdata.c_long] * 3, cdata.c_ulong, cdata.c_ulong)
_tee = declare("tee", cdata.c_int, cdata.c_int, cdata.c_size_t, cdata.c_uint)
_munmap = declare("munmap", cdata.c_ulong, cdata.c_size_t)
_limits = (cdata.c_uint64 * 2)()
_prlimit64 = declare("prlimit64", cdata.c_long, cdata.c_long, cdata.c_void_p, cdata.c_void_p)
