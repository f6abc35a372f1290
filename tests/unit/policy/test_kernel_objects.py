"""The table of kernel objects covers every system call that makes some, and names probes that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ringfence.attack import inside, outside
from ringfence.policy.seccomp import SeccompPolicy

PAGE = Path(__file__).parents[3] / "docs/explanation/kernel-objects.md"
COLUMNS = 7
# What the filter allows and makes nothing that stays: it reads, waits, gives back, or changes what is there.
_NAMES = """
    adjtimex arch_prctl capget chdir chmod chown clock_adjtime clock_getres clock_gettime clock_nanosleep
    close close_range epoll_pwait epoll_pwait2 epoll_wait exit exit_group fadvise64 fchdir fchmod fchmodat
    fchmodat2 fchown fchownat fdatasync fgetxattr file_getattr flistxattr fremovexattr fstat fstatfs fsync
    futex_requeue futex_wake futimesat get_mempolicy get_robust_list getcpu getcwd getdents getdents64 getegid
    geteuid getgid getgroups getitimer getpeername getpgid getpgrp getpid getppid getpriority getrandom
    getresgid getresuid getrlimit getrusage getsid getsockname getsockopt gettid gettimeofday getuid getxattr
    getxattrat inotify_rm_watch io_cancel io_destroy io_getevents io_pgetevents ioprio_get ioprio_set lchown
    lgetxattr listxattr listxattrat llistxattr lremovexattr lseek mincore mq_getsetattr mq_timedreceive
    mq_unlink msgctl msgrcv msync munlock munlockall munmap nanosleep pause personality pkey_free pkey_mprotect
    poll ppoll pread64 preadv preadv2 process_vm_readv process_vm_writev pselect6 ptrace read readahead readlink
    readlinkat readv recvfrom recvmmsg recvmsg removexattr removexattrat restart_syscall rmdir rt_sigaction
    rt_sigpending rt_sigprocmask rt_sigreturn rt_sigsuspend rt_sigtimedwait sched_get_priority_max
    sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler
    sched_rr_get_interval sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield select
    set_tid_address setfsgid setfsuid setgid setpgid setpriority setregid setresgid setresuid setreuid setsid
    setuid shmctl shmdt sigaltstack statfs sync_file_range syncfs sysinfo time timer_delete timer_getoverrun
    timer_gettime timerfd_gettime timerfd_settime times umask uname unlink unlinkat unshare uprobe uretprobe
    utime utimensat utimes wait4 waitid
"""
MAKES_NOTHING = frozenset(_NAMES.split())


def rows() -> list[list[str]]:
    """The cells of the table, without its head."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def named(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


def allowed() -> set[str]:
    policy = SeccompPolicy.default()
    rules = [rule for rule in (*policy.guards, *policy.rules) if rule.action == "allow"]
    return {name for rule in rules for name in rule.names}


def test_every_call_that_makes_something_has_a_row() -> None:
    told = {name for row in rows() for name in named(row[1])}

    assert set() == allowed() - told - MAKES_NOTHING
    assert set() == told - allowed(), "not allowed, or no system call"
    assert set() == told & MAKES_NOTHING


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_a_row_says_who_counts_it_what_bounds_it_and_what_tries_it(row: list[str]) -> None:
    assert COLUMNS == len(row)
    probe = row[6]
    known = {*inside.registered(), *outside.registered()}

    assert all(row[i] for i in (0, 1, 4, 5, 6))
    assert probe.startswith("none: ") or named(probe)
    assert set() == named(probe) - known if not probe.startswith("none: ") else True
