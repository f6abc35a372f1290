"""Facts from /proc about the processes here and their memory. Used by PID 1 of their namespace."""

from __future__ import annotations

import errno
import posix as os
import resource

from ...linux import libc
from .. import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

TAG_BASE = 1 << 40  # the tag of the first exec is one below
RLIMIT_RTTIME = (
    15  # include/uapi/asm-generic/resource.h; means nothing without real-time scheduling
)
CROWD = 64  # of more processes than these, only some are looked at closely
_PF_EXITING = 0x4
_PIDFD_THREAD = os.O_EXCL  # of a thread, not of its process: Linux 6.9
_PAGE, _LONGEST_STATUS = 4096, 1 << 20
_SEMAPHORE_BYTES = 64  # ipc/sem.c, struct sem: a cache line each


def send(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        pass  # gone, or another user's, whose own agent looks after it


def send_to_group(pid: int, signum: int) -> None:
    """Send a signal to a process and its process group.

    A follower may have joined the group of PID 1: then to it alone, since 0 and -1 mean others.
    """
    group = os.getpgid(pid)
    os.kill(pid if group in (0, 1, os.getpgrp()) else -group, signum)


def may_signal(pid: int) -> bool:
    """Return whether the process is there, and we may signal it."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def is_program(pid: int) -> bool:
    """Return whether a process, which may have ended, is the guest's: no agent, no helper from outside."""
    text = read(f"{directory(pid)}/status")
    real = text.partition(b"\nUid:")[2].split(None, 1)[:1]
    return bool(real) and real != [b"%d" % wire.AGENT_UID] and b"\nPPid:\t0\n" not in text


def begin(*, are_others: bool = False) -> None:
    """Find out whether the numbers in /proc are those of our own PID namespace.

    A borrowed /proc, see `build`, has the numbers of a PID namespace above.

    Args:
        are_others: Programs may have other real ids than we, which prlimit(2) compares: see
            `lockdown.become_agent`.
    """
    global _depth, _are_others
    _are_others = are_others
    # Not by our own number: that of an agent can be the same in both, by chance.
    numbers = _numbers("self")
    if not numbers:
        raise OSError(errno.EIO, "the kernel does not tell NSpid", "/proc/self/status")
    _depth = len(numbers) if len(numbers) > 1 else 0


_are_others = False
_depth = 0  # of our PID namespace below that of a borrowed /proc, and one more; 0: it is our own


def pids() -> list[int]:
    ours = (1, os.getpid())
    shown = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    found = map(inner, shown) if _depth else shown
    return [pid for pid in found if pid and pid not in ours]


def inner(number: int) -> int:
    """Translate a number in /proc to ours; 0 for a process of another PID namespace."""
    if not _depth:
        return number
    numbers = _numbers(str(number))
    # Processes of sandboxes beside us have as many numbers: only the way back tells them from ours.
    if len(numbers) != _depth or _shown(pid := int(numbers[-1])) != number:
        return 0
    return pid


def directory(pid: int) -> str:
    """The directory in /proc of a process, or of a thread that the kernel can name; none has 0."""
    return f"/proc/{_shown(pid) if _depth else pid}"


def _shown(pid: int) -> int:
    """The number that a process or thread of our PID namespace has in a borrowed /proc; 0 when it is gone.

    Raises:
        OSError: EINVAL: before Linux 6.9, of a thread that is not the first of its process.

    Source: pidfd_open(2); proc(5), fdinfo.
    """
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return 0
    except OSError as exc:
        # Linux 6.9 says ENOENT, or here EINVAL, of a thread that leads no process.
        if exc.errno not in (errno.EINVAL, errno.ENOENT):
            raise
        fd = os.pidfd_open(pid, _PIDFD_THREAD)
    try:
        number = read(f"/proc/self/fdinfo/{fd}").partition(b"\nPid:")[2].split(None, 1)[0]
    finally:
        os.close(fd)
    return max(0, int(number))  # -1: it has just ended


def _numbers(name: str) -> list[bytes]:
    """The numbers of a process from the PID namespace of /proc down to its own: proc(5), NSpid."""
    path, heading = f"/proc/{name}/status", b"\nNSpid:"
    # Behind its groups, of which there may be 65,536.
    for most in (_PAGE, _LONGEST_STATUS):
        _, found, rest = read(path, most).partition(heading)
        if found and b"\n" in rest:
            return rest.partition(b"\n")[0].split()
    return []


def set_tag(key: int, tag: int) -> None:
    """Give the caller, and so all that it starts next, the tag of one exec.

    The tag is the hard RLIMIT_RTTIME: inherited, never raised again, and under our filter only who
    knows the key in the upper halves of two arguments may change it.

    Args:
        key: Of the filter; 0 where there is none.
    """
    # ctypes takes the lower 64 bits of what it is given, signed or not.
    pid, which = (key >> 32) << 32, (key & 0xFFFFFFFF) << 32 | RLIMIT_RTTIME
    libc.prlimit64(pid, which, tag, tag)


def tag_of(pid: int) -> int:
    if _are_others:
        line = read(f"{directory(pid)}/limits").partition(b"\nMax realtime timeout")[2]
        hard = line.split(None, 2)[1:2]
        return int(hard[0]) if hard and hard[0].isdigit() else 0
    try:
        return resource.prlimit(pid, RLIMIT_RTTIME)[1]
    except OSError:
        return 0


def read(path: str, most: int = _PAGE) -> bytes:
    """The first page of a file of /proc; empty when it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, most)
    except OSError:
        return b""
    finally:
        os.close(fd)


def _stat_fields(pid: int) -> list[bytes]:
    """/proc/PID/stat from the state on: the name before it may contain anything, even ")"."""
    return read(f"{directory(pid)}/stat").rpartition(b")")[2].split()


def state(pid: int) -> str:
    fields = _stat_fields(pid)
    return fields[0].decode() if fields else "X"


def is_zombie(pid: int) -> bool:
    """Return whether all threads of `pid` have ended: the first may end before the others."""
    fields = _stat_fields(pid)
    return not fields or (fields[0] in b"ZX" and int(fields[17]) <= 1)


def is_exiting(pid: int) -> bool:
    """Return whether `pid` has begun to exit, or is gone: before its memory is, and it is a zombie.

    Source: proc(5), stat, flags; PF_EXITING in include/linux/sched.h.
    """
    try:
        fd = os.open(f"{directory(pid)}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as exc:
        return exc.errno == errno.ENOENT
    try:
        fields = os.read(fd, 4096).rpartition(b")")[2].split()
    except OSError as exc:
        return exc.errno == errno.ESRCH
    finally:
        os.close(fd)
    return bool(int(fields[6]) & _PF_EXITING)


def cpu_ticks(pid: int) -> int:
    fields = _stat_fields(pid)
    return int(fields[11]) + int(fields[12]) if len(fields) > 12 else 0


def resident_bytes(pid: int, *, shared: bool = False) -> int:
    """All, or what of it is mapped from files and shared memory: proc(5), statm."""
    fields = read(f"{directory(pid)}/statm").split()
    return int(fields[1 + shared]) * resource.getpagesize() if len(fields) > 2 else 0


def threads(pid: int) -> int:
    """How many it has, by the links of the directory that has one for each; 0 when it has ended."""
    try:
        return os.stat(f"{directory(pid)}/task").st_nlink - 2
    except OSError:
        return 0


def open_files(pid: int) -> Iterator[os.stat_result]:
    """Of a process; none when it has ended, or lets nobody look."""
    place = f"{directory(pid)}/fd"
    try:
        names = os.listdir(place)
    except OSError:
        return
    for name in names:
        try:
            yield os.stat(f"{place}/{name}")
        except OSError:
            continue


def own_bytes(pid: int) -> int:
    """Memory that only the process itself accounts for, shared pages divided by their users.

    Files of the host are left out, as the kernel can drop them; those of the sandbox are counted
    apart. A process that forbids this closer look is charged with all its pages, unless its parent is
    outside: it is a helper of ours, and makes a copy while it shares the memory of another helper.
    """
    wanted, place = (b"Pss_Anon:", b"Pss_Shmem:"), directory(pid)
    found = _sum_kib(read(f"{place}/smaps_rollup"), wanted)
    if found is None:
        text = read(f"{place}/status")
        is_ours = b"\nPPid:\t0\n" in text and pid != 1
        found = 0 if is_ours else _sum_kib(text, (b"RssAnon:", b"RssShmem:"))
    return found or 0


def _sum_kib(text: bytes, names: tuple[bytes, ...]) -> int | None:
    """The sum of the `name: N kB` lines, in bytes; None when there are none."""
    counts = [int(line.split()[1]) for line in text.splitlines() if line.startswith(names)]
    return sum(counts) * 1024 if counts else None


def look_closer(resident: dict[int, int]) -> dict[int, int]:
    """Memory by tag: of a crowd, the largest processes and some of the others that stand for all."""
    largest = sorted(resident, key=lambda pid: resident[pid], reverse=True)
    others = largest[CROWD // 2 :]
    each_for = len(others) // (CROWD // 2) + 1
    used: dict[int, int] = {}
    for pids, stands_for in (
        (largest[: CROWD // 2], 1),
        (others[os.urandom(1)[0] % each_for :: each_for], each_for),
    ):
        for pid in pids:
            tag = tag_of(pid)
            used[tag] = used.get(tag, 0) + own_bytes(pid) * stands_for
    return used


def file_bytes(path: str) -> int:
    """Bytes of the files in the file system at a path."""
    usage = os.statvfs(path)
    return (usage.f_blocks - usage.f_bfree) * usage.f_frsize


def ipc_bytes() -> int:
    """Of System V objects, which belong to no process: proc(5), /proc/sysvipc.

    Shared memory that is attached somewhere is counted there.
    """
    shm = sum(int(words[14]) for words in _ipc_lines("shm") if words[6] == b"0")
    sem = sum(int(words[3]) * _SEMAPHORE_BYTES for words in _ipc_lines("sem"))
    return shm + sem + sum(int(words[3]) for words in _ipc_lines("msg"))


def _ipc_lines(kind: str) -> list[list[bytes]]:
    try:
        with open(f"/proc/sysvipc/{kind}", "rb") as file:
            return [line.split() for line in file.readlines()[1:]]
    except OSError:
        return []  # a kernel without System V IPC
