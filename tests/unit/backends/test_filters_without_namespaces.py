"""The filters of a sandbox without namespaces, call by call: what is refused, what asks the agent, what passes.

The tables are written by hand from the manual pages; the simulator of `tests.unit.policy` runs the programs.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest
from tests.unit.policy import reading, simulator

from ringfence.backends.landlock import filters
from ringfence.guest.without_namespaces import asking
from ringfence.guest.without_namespaces.shared_memory import ASKED
from ringfence.linux import seccomp

pytestmark = [
    pytest.mark.anyone,
    pytest.mark.skipif(
        os.uname().machine not in reading.TABLES, reason="no filter for this machine"
    ),
]

MACHINE = os.uname().machine
KEY = 0x0123456789ABCDEF
ALLOW, ASK = seccomp.RET_ALLOW, seccomp.RET_USER_NOTIF
EPERM, ENOSYS = reading.fail(errno.EPERM), reading.fail(errno.ENOSYS)
ENOTSUP, ENOPROTOOPT = reading.fail(errno.ENOTSUP), reading.fail(errno.ENOPROTOOPT)
EAFNOSUPPORT = reading.fail(errno.EAFNOSUPPORT)
ESOCKTNOSUPPORT = reading.fail(errno.ESOCKTNOSUPPORT)

Judge = Callable[..., int]

# (call, its first arguments): what the filter says.
ALWAYS_REFUSED = {
    **dict.fromkeys(
        reading.words(
            "semget semop semtimedop semctl msgget msgsnd msgrcv msgctl mq_open mq_unlink mq_timedsend"
            " mq_timedreceive mq_notify mq_getsetattr pidfd_open inotify_init inotify_init1 inotify_add_watch"
        ),
        ENOSYS,
    ),
    **dict.fromkeys(
        reading.words(
            "ptrace process_vm_readv process_vm_writev pidfd_getfd kcmp process_madvise add_key request_key"
            " keyctl bpf perf_event_open userfaultfd mount umount2 name_to_handle_at open_by_handle_at"
            " fanotify_init fanotify_mark pivot_root chroot syslog quotactl migrate_pages move_pages swapon"
            " swapoff acct utime utimes futimesat"
        ),
        EPERM,
    ),
    **dict.fromkeys(
        reading.words(
            "setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr getxattr lgetxattr listxattr"
            " llistxattr getxattrat setxattrat listxattrat removexattrat"
        ),
        ENOTSUP,
    ),
}
ABOUT_A_PROCESS = reading.words(
    "sched_setparam sched_setscheduler sched_setaffinity sched_setattr prlimit64 getpgid getsid"
    " get_robust_list"
)
STREAM, DGRAM, RAW, RDM, SEQPACKET, PACKET = 1, 2, 3, 4, 5, 10
CLOEXEC, NONBLOCK = 0o2000000, 0o4000
FASTOPEN = 0x20000000
BY_ARGUMENTS: list[tuple[str, tuple[int, ...], int]] = [
    *(("socket", (family, STREAM), ALLOW) for family in (1, 2, 10)),
    *(("socket", (family, STREAM), EAFNOSUPPORT) for family in (0, 3, 16, 17, 38, 40, 44, 0xFFFF)),
    ("socketpair", (1, STREAM), ALLOW),
    *(("socketpair", (family, STREAM), EAFNOSUPPORT) for family in (0, 2, 10, 16)),
    *(
        (call, (1, kind | flags), ALLOW)
        for call in ("socket", "socketpair")
        for kind in (STREAM, SEQPACKET)
        for flags in (0, CLOEXEC, NONBLOCK)
    ),
    *(
        (call, (1, kind | flags), ESOCKTNOSUPPORT)
        for call in ("socket", "socketpair")
        for kind in (0, DGRAM, RAW, RDM, 6, PACKET, 15)
        for flags in (0, CLOEXEC)
    ),
    *(("socket", (2, kind), ESOCKTNOSUPPORT) for kind in (DGRAM, RAW)),
    *((call, (3, 0, 0, FASTOPEN | 0x4000), ENOTSUP) for call in ("sendto", "sendmmsg")),
    *((call, (3, 0, FASTOPEN, 0x4000), ALLOW) for call in ("sendto", "sendmmsg")),
    ("sendmsg", (3, 0, FASTOPEN | 0x4000), ENOTSUP),
    ("sendmsg", (3, 0, 0x4000), ALLOW),
    ("setsockopt", (3, 6, 30), ENOPROTOOPT),  # TCP_FASTOPEN_CONNECT
    ("setsockopt", (3, 6, 1), ALLOW),
    ("setsockopt", (3, 1, 30), ALLOW),
    ("setsockopt", (3, 0, 4), ENOPROTOOPT),  # IP_OPTIONS
    ("setsockopt", (3, 0, 1), ALLOW),
    ("setsockopt", (3, 1, 4), ALLOW),
    *(("fcntl", (3, order, 1), EPERM) for order in (8, 15)),  # F_SETOWN, F_SETOWN_EX
    *(("fcntl", (3, order, 1), ALLOW) for order in (0, 1, 4, 7, 9, 10, 16)),
    *((call, (0,), ALLOW) for call in ABOUT_A_PROCESS),
    *((call, (pid,), EPERM) for call in ABOUT_A_PROCESS for pid in (1, 4711, 0xFFFFFFFF)),
    *((call, (0, 0), ALLOW) for call in ("setpriority", "getpriority")),
    *(
        (call, words, EPERM)
        for call in ("setpriority", "getpriority")
        for words in ((0, 1), (1, 0), (2, 0), (1, 7))
    ),
    *((call, (1, 0), ALLOW) for call in ("ioprio_set", "ioprio_get")),
    *(
        (call, words, EPERM)
        for call in ("ioprio_set", "ioprio_get")
        for words in ((1, 7), (0, 0), (2, 0), (3, 0))
    ),
    ("prctl", (62,), EPERM),  # PR_SCHED_CORE
    *(("prctl", (option,), ALLOW) for option in (1, 15, 38, 61, 63)),
    *((call, (0,), ALLOW) for call in reading.words("read openat execve shmget sched_getaffinity")),
]
SIGNALS = reading.words("tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_send_signal")


def judge(program: bytes) -> Judge:
    decoded = simulator.decode(program)
    simulator.check(decoded)

    def verdict(call: str, *words: int) -> int:
        number = reading.TABLES[MACHINE][call]
        return simulator.run(decoded, number, words, reading.ARCH[MACHINE]).value

    return verdict


def known(call: str) -> bool:
    return call in reading.TABLES[MACHINE]


@pytest.fixture(scope="module", params=[True, False], ids=["scoped", "unscoped"])
def second(request: pytest.FixtureRequest) -> Judge:
    return judge(filters.second_filter(scopes_signals=request.param))


def test_each_call_that_reaches_the_host_is_refused(second: Judge) -> None:
    wanted = {call: verdict for call, verdict in ALWAYS_REFUSED.items() if known(call)}

    assert wanted == {call: second(call) for call in wanted}


def test_each_condition_holds_on_both_sides(second: Judge) -> None:
    rows = [(call, words) for call, words, _ in BY_ARGUMENTS if known(call)]
    wanted = {(call, words): verdict for call, words, verdict in BY_ARGUMENTS if known(call)}

    assert wanted == {(call, words): second(call, *words) for call, words in rows}


def test_no_signal_leaves_the_group_where_landlock_does_not_keep_it() -> None:
    scoped, unscoped = (
        judge(filters.second_filter(scopes_signals=scopes)) for scopes in (True, False)
    )

    assert {ALLOW} == {scoped(call, 4711) for call in (*SIGNALS, "kill")}
    assert {EPERM} == {unscoped(call, pid) for call in SIGNALS for pid in (0, 4711)}
    assert [ALLOW, EPERM, EPERM] == [unscoped("kill", pid) for pid in (0, 4711, 0xFFFFFFFF)]


def test_each_kind_of_call_names_what_the_agent_makes() -> None:
    owner, other = (
        sorted(filters.judged_calls(owns_files_outside=owns).values()) for owns in (True, False)
    )
    owners = "chown fchown lchown fchownat utimensat"
    modes = "chmod fchmod fchmodat fchmodat2"

    assert sorted(filter(known, f"{owners} {modes}".split())) == owner
    assert sorted(filter(known, owners.split())) == other
    assert ["bind", "connect", "socket"] == sorted(filters.socket_calls().values())
    assert ["shmat", "shmctl", "shmget"] == sorted(filters.segment_calls().values())
    names = {number: name for name, number in reading.TABLES[MACHINE].items()}
    assert set(filter(known, ("clone", "fork", "vfork"))) == {
        names[each] for each in filters.fork_calls()
    }
    assert reading.words(
        "sched_getparam sched_getscheduler sched_getaffinity sched_getattr sched_rr_get_interval"
    ) == {names[each] for each in filters.scheduling_calls()}
    files = {"openat", "link", "unlink"} if known("unlink") else {"openat", "linkat", "unlinkat"}
    assert files == set(filters.shared_calls().values())


class Installed:
    """Takes the place of the kernel, of which a process can never get rid of a filter again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, has_listener: bool) -> None:
        self.programs: list[bytes] = []
        self._has_listener = has_listener
        monkeypatch.setattr(seccomp, "install_listener", self._listener)
        monkeypatch.setattr(seccomp, "install_filter", self.programs.append)

    def _listener(self, program: bytes) -> int:
        if self._has_listener:
            raise OSError(errno.EBUSY, "a filter above has one")
        self.programs.append(program)
        return 7


def guard() -> int:
    return asking.guard(
        filters.judged_calls(owns_files_outside=True),
        filters.socket_calls(),
        filters.shared_calls(),
        filters.segment_calls(),
        filters.scheduling_calls(),
        filters.fork_calls(),
        KEY,
    )


HALVES = (0, KEY & 0xFFFFFFFF, KEY >> 32 << 32, KEY ^ 1, KEY ^ 1 << 63)
BY_FIFTH = ("connect", "bind", "shmget", "shmat", "shmctl")
BY_SIXTH = tuple(
    sorted(
        filter(
            known,
            reading.words(
                "chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utimensat clone fork vfork"
            ),
        )
    )
)
FD_CWD = -100 & 0xFFFFFFFF


def test_each_call_asks_and_only_the_whole_key_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = Installed(monkeypatch, has_listener=False)
    assert 7 == guard()
    (program,) = installed.programs
    first = judge(program)

    for call, at in (*((each, 4) for each in BY_FIFTH), *((each, 5) for each in BY_SIXTH)):
        verdicts = [first(call, *[0] * at, key) for key in (KEY, *HALVES)]
        assert [ALLOW, *[ASK] * 5] == verdicts, call
        elsewhere = 5 if at == 4 else 4  # the key in another argument is no key
        assert ASK == first(call, *[KEY if i == elsewhere else 0 for i in range(6)]), call
    for family, asked in ((1, ALLOW), (2, ASK), (10, ASK), (16, ALLOW)):
        assert asked == first("socket", family, 1), family
        assert ALLOW == first("socket", family, 1, 0, 0, KEY)
    for call in ("sched_getparam", "sched_getscheduler", "sched_getaffinity", "sched_getattr"):
        assert [ALLOW, ASK, ASK] == [first(call, pid) for pid in (0, 1, 0xFFFFFFFF)], call
    assert ALLOW == first("read", 3)


def test_only_the_flags_of_shared_memory_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names in another directory do not: those are the agent's own calls."""
    installed = Installed(monkeypatch, has_listener=False)
    guard()
    first = judge(installed.programs[0])
    asks = [os.O_NOFOLLOW, os.O_NOFOLLOW | os.O_RDWR, os.O_CREAT | os.O_EXCL | os.O_RDWR]
    passes = [0, os.O_RDWR, os.O_CREAT, os.O_EXCL, os.O_NOFOLLOW | os.O_DIRECTORY]

    assert {(os.O_NOFOLLOW, os.O_NOFOLLOW | os.O_DIRECTORY), (os.O_CREAT | os.O_EXCL,) * 2} == {
        *ASKED
    }
    assert {ASK} == {first("openat", FD_CWD, 0, flags) for flags in asks}
    assert {ALLOW} == {first("openat", FD_CWD, 0, flags) for flags in passes}
    assert {ALLOW} == {first("openat", 3, 0, flags) for flags in asks}
    if known("unlink"):
        assert {ASK} == {first(call, 0, 0) for call in ("link", "unlink")}
    else:
        assert {ASK} == {first(call, FD_CWD, 0) for call in ("linkat", "unlinkat")}
        assert {ALLOW} == {first(call, 3, 0) for call in ("linkat", "unlinkat")}


def test_where_nobody_can_be_asked_these_calls_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks are not, nor names of shared memory: the kernel judges those."""
    installed = Installed(monkeypatch, has_listener=True)
    assert -1 == guard()
    (program,) = installed.programs
    first = judge(program)

    for call in (*BY_FIFTH, *BY_SIXTH):
        at = 4 if call in BY_FIFTH else 5
        refused = ALLOW if call in ("clone", "fork", "vfork") else EPERM
        assert [refused, ALLOW] == [first(call), first(call, *[0] * at, KEY)], call
    assert [ALLOW, EPERM, EPERM] == [first("socket", family, 1) for family in (1, 2, 10)]
    assert [ALLOW, EPERM] == [first("sched_getaffinity", pid) for pid in (0, 1)]
    assert ALLOW == first("openat", FD_CWD, 0, os.O_CREAT | os.O_EXCL)
