"""Facts from /proc about the processes here and their memory. Used by PID 1 of their namespace."""

from __future__ import annotations

import errno
import posix as os
import resource

from ...linux import libc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

TAG_BASE = 1 << 40  # the tag of the first exec is one below
RLIMIT_RTTIME = (
    15  # include/uapi/asm-generic/resource.h; means nothing without real-time scheduling
)
CROWD = 64  # of more processes than these, only some are looked at closely
_PF_EXITING = 0x4
_SEMAPHORE_BYTES = 64  # ipc/sem.c, struct sem: a cache line each


def send(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        pass  # gone, or another user's, whose own agent looks after it


def pids() -> list[int]:
    ours = ("1", str(os.getpid()))
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name not in ours]


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
    try:
        return resource.prlimit(pid, RLIMIT_RTTIME)[1]
    except OSError:
        return 0


def read(path: str) -> bytes:
    """The first page of a file of /proc; empty when it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, 4096)
    except OSError:
        return b""
    finally:
        os.close(fd)


def _stat_fields(pid: int) -> list[bytes]:
    """/proc/PID/stat from the state on: the name before it may contain anything, even ")"."""
    return read(f"/proc/{pid}/stat").rpartition(b")")[2].split()


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
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
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
    fields = read(f"/proc/{pid}/statm").split()
    return int(fields[1 + shared]) * resource.getpagesize() if len(fields) > 2 else 0


def threads(pid: int) -> int:
    """How many it has, by the links of the directory that has one for each; 0 when it has ended."""
    try:
        return os.stat(f"/proc/{pid}/task").st_nlink - 2
    except OSError:
        return 0


def open_files(pid: int) -> Iterator[os.stat_result]:
    """Of a process; none when it has ended, or lets nobody look."""
    directory = f"/proc/{pid}/fd"
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in names:
        try:
            yield os.stat(f"{directory}/{name}")
        except OSError:
            continue


def own_bytes(pid: int) -> int:
    """Memory that only the process itself accounts for, shared pages divided by their users.

    Files of the host are left out, as the kernel can drop them; those of the sandbox are counted
    apart. A process that forbids this closer look is charged with all its pages.
    """
    wanted = (b"Pss_Anon:", b"Pss_Shmem:")
    found = _sum_kib(read(f"/proc/{pid}/smaps_rollup"), wanted)
    if found is None:
        found = _sum_kib(read(f"/proc/{pid}/status"), (b"RssAnon:", b"RssShmem:"))
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


def file_bytes() -> int:
    usage = os.statvfs("/")
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
