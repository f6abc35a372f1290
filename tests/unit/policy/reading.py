"""The default policy read by hand: plain Python, from the prose, sharing nothing with the compiler.

Only the lists of calls that are allowed whatever their arguments come from the policy's data.
"""

from __future__ import annotations

import errno
import json
from pathlib import Path

import ringfence.policy
from ringfence.policy import syscalls_aarch64, syscalls_x86_64

TABLES = {"x86_64": syscalls_x86_64.NUMBERS, "aarch64": syscalls_aarch64.NUMBERS}
NAMES = {machine: {n: name for name, n in table.items()} for machine, table in TABLES.items()}
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

ALLOW = 0x7FFF0000
PRETEND = 0x00050000
KILL = 0x80000000


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def fail(number: int) -> int:
    return 0x00050000 | number


EPERM, ENOSYS, EINVAL = fail(errno.EPERM), fail(errno.ENOSYS), fail(errno.EINVAL)

_DATA = json.loads((Path(ringfence.policy.__file__).parent / "seccomp_policy.json").read_text())
ALWAYS_ALLOWED = frozenset(
    name
    for rule in _DATA["rules"]
    if rule["action"] == "allow" and not rule.keys() & {"args", "if", "unless"}
    for name in rule["names"]
)
MISSING = words(
    "clone3 io_uring_setup io_uring_enter io_uring_register openat2 process_madvise vmsplice"
    " memfd_secret cachestat statmount listmount listns lsm_get_self_attr lsm_set_self_attr"
    " lsm_list_modules rseq_slice_yield uselib _sysctl create_module get_kernel_syms query_module"
    " nfsservctl getpmsg putpmsg afs_syscall tuxcall security set_thread_area get_thread_area"
    " epoll_ctl_old epoll_wait_old vserver lookup_dcookie"
)
AIO = words("io_setup io_submit io_getevents io_pgetevents io_destroy io_cancel")
TRACING = words("ptrace process_vm_readv process_vm_writev")
IOCTLS = frozenset(
    int(word, 16)
    for word in words(
        "5401 5402 5403 5404 540b 540e 540f 5410 5413 5414 5420 5421 5422 5429 541b 5450 5451 5452"
        " 802c542a 402c542b 402c542c 402c542d 80045430 40045431 5441 80086601 40049409 4020940d"
        " c020660b 8910 8912 8913 8915 8919 891b 891d 8921 8927 8933"
        " 5409 540a 5411 5425 8905 8917"  # TCSBRK TCXONC TIOCOUTQ TCSBRKP SIOCATMARK SIOCGIFDSTADDR
    )
)
MODE_AT = {
    "chmod": 1, "fchmod": 1, "mkdir": 1, "mknod": 1, "creat": 1,
    "fchmodat": 2, "fchmodat2": 2, "mkdirat": 2, "mknodat": 2,
}  # fmt: skip
ON_PID_1 = {
    "sched_setparam": 0, "sched_setscheduler": 0, "sched_setaffinity": 0, "sched_setattr": 0,
    "setpriority": 1, "ioprio_set": 1,
}  # fmt: skip


def judge(  # noqa: C901 - one long list of cases, as in the prose
    machine: str,
    arch: int,
    number: int,
    args: tuple[int, ...],
    *,
    debug: bool = False,
    aio: bool = False,
    allow_af_unix: bool = False,
    by_init: bool = False,
    strict: bool = False,
    tag_key: int | None = None,
) -> int:
    if arch != ARCH[machine]:
        return KILL
    if machine == "x86_64" and number & 0x40000000 and number != 0xFFFFFFFF:
        return KILL
    name = NAMES[machine].get(number)
    if name is None:
        return ENOSYS
    low = [arg & 0xFFFFFFFF for arg in args]

    if name in AIO:
        return ALLOW if aio else ENOSYS
    if name in TRACING:
        return ALLOW if debug else EPERM
    if name in MISSING:
        return ENOSYS
    if name in MODE_AT and low[MODE_AT[name]] & 0o6000:
        return EPERM
    if (name == "setpriority" and low[0] > 2) or (name == "ioprio_set" and low[0] not in (1, 2, 3)):
        return EINVAL
    if name in ON_PID_1 and low[ON_PID_1[name]] == 1:
        return EPERM
    if (name, low[0]) in {("setpriority", 2), ("ioprio_set", 3)}:  # all of this uid: PID 1 too
        return EPERM
    match name:
        case "clone":
            if (low[0] & 0x200 and low[0] & 0x10020000) or (
                low[0] & 0x10000 and low[0] & 0x30000000
            ):
                return EINVAL
            return EPERM if low[0] & 0x7E020000 else ALLOW
        case "unshare":
            if args[0] & ~(0x50F00 | 0x7E020000 | 0x80 | 0x100000):
                return EINVAL
            return EPERM if args[0] & ~0x50F00 else ALLOW
        case "setns":
            return EPERM
        case "open" | "openat":
            flags, mode = low[1:3] if name == "open" else low[2:4]
            creates = flags & 0x40 or flags & 0x400000
            return EPERM if creates and mode & 0o6000 else ALLOW
        case "mknod" | "mknodat":
            kind = low[MODE_AT[name]] & 0o170000
            return (
                ALLOW
                if kind in (0, 0o100000, 0o010000, 0o140000)
                else EPERM
                if kind in (0o020000, 0o040000, 0o060000)
                else EINVAL
            )
        case "renameat2":
            if low[4] & 4 and (low[4] & 2 or low[4] > 7):
                return EINVAL
            return EPERM if low[4] & 4 else ALLOW
        case "socket" | "socketpair" if low[1] & ~0x8080F or low[1] & 0xF > 10:
            return EINVAL
        case "socket" | "socketpair" if allow_af_unix and by_init and low[0] == 1:
            return ALLOW if low[1] & 0xF in (1, 5) else fail(errno.ESOCKTNOSUPPORT)
        case "pidfd_getfd":
            return ALLOW if by_init else EPERM
        case "socket":
            if strict and low[0] == 16:
                return fail(errno.EAFNOSUPPORT)
            return _socket(low[0], low[1], low[2], allow_af_unix)
        case "socketpair":
            if low[0] != 1:
                return fail(errno.EOPNOTSUPP if low[0] in (2, 10, 16) else errno.EAFNOSUPPORT)
            if not allow_af_unix and low[1] & 0xF not in (1, 5):
                return fail(errno.EPROTONOSUPPORT)
            return ALLOW
        case "setrlimit":
            return PRETEND if low[0] == 4 else EPERM if low[0] == 15 else ALLOW
        case "prlimit64":
            if tag_key is not None and (args[0], args[1]) == (
                tag_key >> 32 << 32,
                (tag_key & 0xFFFFFFFF) << 32 | 15,
            ):
                return ALLOW
            sets = args[2] != 0
            if sets and low[1] == 4:
                return fail(errno.EINVAL) if args[3] else PRETEND
            return EPERM if sets and (low[0] == 1 or low[1] == 15) else ALLOW
        case "prctl":
            if by_init and low[0] == 4 and args[1] == 0 and args[2] != 0x52464E44:
                return PRETEND
            if low[0] in (35, 36):
                return EPERM
            return fail(errno.EINVAL) if low[0] in (62, 67) else ALLOW
        case "ioctl":
            if tag_key is not None and low[1] in (0xC0502100, 0xC0182101, 0x40082102):
                return ALLOW
            return ALLOW if low[1] in IOCTLS else fail(errno.ENOTTY)
        case "fcntl":
            locks = (6, 7) if strict else ()
            if low[1] in (1024, 1040, *locks):
                return EPERM
            return fail(errno.EINVAL) if low[1] in (36, 37, 38) else ALLOW
        case "flock":
            return EPERM if strict else ALLOW
        case "madvise":
            return fail(errno.EINVAL) if low[2] == 12 else ALLOW
        case "mmap":
            return fail(errno.ENOMEM) if low[3] & 0x40000 and low[3] & 0x20 else ALLOW
        case "memfd_create":
            if (low[1] & 4 and low[1] & 0x3FFFFE0) or low[1] & 0x18 == 0x18:
                return EINVAL
            return fail(errno.ENOMEM) if low[1] & 4 else ALLOW
        case "shmget":
            return (
                fail(errno.ENOMEM)
                if low[2] & 0o4000 and (low[0] == 0 or low[2] & 0o1000)
                else ALLOW
            )
        case "setsockopt":
            if low[1] == 1 and low[2] in (26, 50, 51, 52):
                return EPERM
            if low[1] == 1 and low[2] in (7, 8, 32, 33):
                return PRETEND
            if (low[1], low[2]) == (17, 100):
                return fail(errno.ENOPROTOOPT)
            return fail(errno.ENOENT) if (low[1], low[2]) == (6, 31) else ALLOW
        case "seccomp":
            return fail(errno.EINVAL) if low[1] & 8 else ALLOW
        case "personality":
            fine = (0, 8, 0x20000, 0x20008, 0xFFFFFFFF, *((0x40000,) if debug else ()))
            return ALLOW if low[0] in fine else EPERM
    return ALLOW if name in ALWAYS_ALLOWED else EPERM


def _socket(family: int, kind: int, protocol: int, allow_af_unix: bool) -> int:
    if family == 1:
        return ALLOW if allow_af_unix else fail(errno.EAFNOSUPPORT)
    if family in (2, 10):
        if protocol > 511:
            return EINVAL
        if kind & 0xF not in (1, 2, 3, 10):
            return fail(errno.ESOCKTNOSUPPORT)
        fine = kind & 0xF in (1, 2) and protocol in (0, 6, 17)
        return ALLOW if fine else fail(errno.EPROTONOSUPPORT)
    if family == 16:
        return ALLOW if protocol == 0 else fail(errno.EPROTONOSUPPORT)
    return fail(errno.EAFNOSUPPORT)
