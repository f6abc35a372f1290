"""The second filter, for execs only: what namespaces and mounts refuse on other backends.

It stands behind the filter that every light sandbox has (`policy.filters`): what either refuses is
refused. Without namespaces a system call can name any process, IPC object or file of the host, and
Landlock judges neither metadata of files, limits and scheduling of processes, nor IPC.
"""

from __future__ import annotations

import functools
import os

from ...policy.seccomp import MACHINES, Condition, Rule, SeccompPolicy, compile_filter

_INT = 0xFFFFFFFF
_IPC = (
    *("semget", "semop", "semtimedop", "semctl"),  # shmget(2) and its kin ask the agent
    *("msgget", "msgsnd", "msgrcv", "msgctl"),
    *("mq_open", "mq_unlink", "mq_timedsend", "mq_timedreceive", "mq_notify", "mq_getsetattr"),
)
_ABOUT_OTHERS = (
    # Not those of `_SCHEDULING`, which Java and browsers ask of their own threads by number: the agent judges.
    *("sched_setparam", "sched_setscheduler", "sched_setaffinity", "sched_setattr", "prlimit64"),
    *("getpgid", "getsid", "get_robust_list"),
)
_SCHEDULING = (
    *("sched_getparam", "sched_getscheduler", "sched_getaffinity", "sched_getattr"),
    "sched_rr_get_interval",
)
_BY_NO_OWNER = ("chown", "fchown", "lchown", "fchownat", "utimensat")
_JUDGED = ("chmod", "fchmod", "fchmodat", "fchmodat2", *_BY_NO_OWNER)
_OLD_TIMES = ("utime", "utimes", "futimesat")  # no C library makes these calls any more
_ATTRIBUTES = (
    *("setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr"),
    *("getxattr", "lgetxattr", "listxattr", "llistxattr"),
    *("getxattrat", "setxattrat", "listxattrat", "removexattrat"),
)
# A profile of the user's own may allow these, for other backends. Here they reach the host's.
_NEVER = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "kcmp", "process_madvise"),
    *(
        "add_key",
        "request_key",
        "keyctl",
        "bpf",
        "perf_event_open",
        "userfaultfd",
        "mount",
        "umount2",
    ),
    *("name_to_handle_at", "open_by_handle_at", "fanotify_init", "fanotify_mark", "pivot_root"),
    *("chroot", "syslog", "quotactl", "migrate_pages", "move_pages", "swapon", "swapoff", "acct"),
)
_SIGNALS = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal")
_FORKS = ("clone", "fork", "vfork")  # clone3(2) has its flags in memory: every filter refuses it
_PRIORITIES = ("setpriority", "getpriority", "ioprio_set", "ioprio_get")
_PR_SCHED_CORE = 62  # include/uapi/linux/prctl.h
_F_SETOWN, _F_SETOWN_EX = 8, 15  # include/uapi/asm-generic/fcntl.h
_AF_UNIX, _AF_INET = 1, (2, 10)
_CONNECTED = (1, 5)  # SOCK_STREAM, SOCK_SEQPACKET
_MSG_FASTOPEN, _TCP_FASTOPEN_CONNECT = 0x20000000, 30  # include/linux/socket.h, uapi/linux/tcp.h
_IP_OPTIONS = 4  # include/uapi/linux/in.h


def _is(arg: int, *values: int) -> Condition:
    return Condition(arg, 32, _INT, values)


def _is_not(arg: int, *values: int) -> Condition:
    return Condition(arg, 32, _INT, values, negated=True)


def _has(arg: int, bit: int) -> Condition:
    return Condition(arg, 32, bit, (bit,))


@functools.cache
def judged_calls(*, owns_files_outside: bool) -> dict[int, str]:
    """Calls about metadata of files that the agent makes.

    Who owns no file outside can still set the times of those that everybody may write to now, and take the
    file capabilities of all by a chown to no other user and group. Which times are asked for is in memory,
    where no filter sees it.
    """
    numbers = MACHINES[os.uname().machine].numbers
    names = _JUDGED if owns_files_outside else _BY_NO_OWNER
    return {numbers[name]: name for name in names if name in numbers}


@functools.cache
def socket_calls() -> dict[int, str]:
    """Calls about sockets that the agent makes, as the network is the host's."""
    numbers = MACHINES[os.uname().machine].numbers
    return {numbers[name]: name for name in ("socket", "connect", "bind")}


@functools.cache
def shared_calls() -> dict[int, str]:
    """Calls that open and name POSIX shared memory: of a C library, where it makes the older ones."""
    numbers = MACHINES[os.uname().machine].numbers
    names = ["openat", *(("link", "unlink") if "unlink" in numbers else ("linkat", "unlinkat"))]
    return {numbers[name]: name for name in names}


@functools.cache
def segment_calls() -> dict[int, str]:
    """Calls about System V shared memory that the agent judges."""
    numbers = MACHINES[os.uname().machine].numbers
    return {numbers[name]: name for name in ("shmget", "shmat", "shmctl")}


@functools.cache
def fork_calls() -> list[int]:
    """Calls that make a process or a thread."""
    numbers = MACHINES[os.uname().machine].numbers
    return [numbers[name] for name in _FORKS if name in numbers]


@functools.cache
def scheduling_calls() -> list[int]:
    """Calls that read how a thread is scheduled: of the sandbox's own only, as the agent says."""
    numbers = MACHINES[os.uname().machine].numbers
    return [numbers[name] for name in _SCHEDULING]


@functools.cache
def second_filter(*, scopes_signals: bool) -> bytes:
    """The program.

    Args:
        scopes_signals: Landlock keeps signals inside; else nothing but the caller's group gets any.
    """
    rules = [
        # Also netlink: the network is the host's. The agent makes TCP sockets: `guest.without_namespaces`.
        Rule(("socket",), "EAFNOSUPPORT", (_is_not(0, _AF_UNIX, *_AF_INET),)),
        Rule(("socketpair",), "EAFNOSUPPORT", (_is_not(0, _AF_UNIX),)),
        # The address of a datagram is in memory (sendmsg), where no filter sees it.
        Rule(
            ("socket", "socketpair"),
            "ESOCKTNOSUPPORT",
            (Condition(1, 32, 0xF, _CONNECTED, negated=True),),
        ),
        # TCP Fast Open connects by sending.
        Rule(("sendto", "sendmmsg"), "ENOTSUP", (_has(3, _MSG_FASTOPEN),)),
        Rule(("sendmsg",), "ENOTSUP", (_has(2, _MSG_FASTOPEN),)),
        Rule(("setsockopt",), "ENOPROTOOPT", (_is(1, 6), _is(2, _TCP_FASTOPEN_CONNECT))),
        # Source routes.
        Rule(("setsockopt",), "ENOPROTOOPT", (_is(1, 0), _is(2, _IP_OPTIONS))),
        Rule(_IPC, "ENOSYS"),
        Rule(_NEVER, "EPERM"),
        # A descriptor of any process of the host; libraries fall back to SIGCHLD.
        Rule(("pidfd_open",), "ENOSYS"),
        Rule(("fcntl",), "EPERM", (_is(1, _F_SETOWN, _F_SETOWN_EX),)),
        Rule(_ABOUT_OTHERS, "EPERM", (_is_not(0, 0),)),
        # PRIO_PROCESS (0) and IOPRIO_WHO_PROCESS (1) of the caller.
        Rule(("setpriority", "getpriority"), "EPERM", (_is_not(0, 0),)),
        Rule(("ioprio_set", "ioprio_get"), "EPERM", (_is_not(0, 1),)),
        Rule(_PRIORITIES, "EPERM", (_is_not(1, 0),)),
        Rule(("prctl",), "EPERM", (_is(0, _PR_SCHED_CORE),)),
        # Names in directories that cannot be listed: inotify asks for no Landlock right. And its
        # instances are counted for each user of the host.
        Rule(("inotify_init", "inotify_init1", "inotify_add_watch"), "ENOSYS"),
        Rule(_ATTRIBUTES, "ENOTSUP"),
        Rule(_OLD_TIMES, "EPERM"),
    ]
    if not scopes_signals:
        rules.append(Rule(("kill",), "EPERM", (_is_not(0, 0),)))
        rules.append(Rule(_SIGNALS[1:], "EPERM"))
    return compile_filter(policy=SeccompPolicy("allow", "allow", (), tuple(rules)))
