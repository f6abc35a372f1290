"""Live processes seen from outside: their tree and their memory."""

from __future__ import annotations

import contextlib
import os
import select
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


class Launched:
    """Processes started by this one: those of sandboxes, and those that serve all of them."""

    def __init__(self) -> None:
        parents = _parents()
        ours = [pid for pid in parents if _descends(pid, os.getpid(), parents)]
        self.sandboxed = [pid for pid in ours if _is_nested(pid)]
        self.serving = [pid for pid in ours if pid not in set(self.sandboxed)]


def end_tree(leader: int) -> None:
    """Kill the leader of a session, its descendants, and whoever else is in its session.

    On return all of them have ended.
    """
    stopped: set[int] = set()
    # Stopped first: the children of a process that is killed are nobody's descendants any more.
    while fresh := _tree(leader) - stopped:
        _signal(fresh, signal.SIGSTOP)
        stopped |= fresh
    pidfds = []
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            pidfds.append(os.pidfd_open(pid))
    _signal(stopped, signal.SIGKILL)
    for pidfd in pidfds:
        poll = select.poll()  # select(2) takes no descriptor above 1,023
        poll.register(pidfd, select.POLLIN)
        poll.poll()
        os.close(pidfd)


def _tree(leader: int) -> set[int]:
    parents = _parents()
    return {pid for pid in parents if _descends(pid, leader, parents) or _session(pid) == leader}


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def pss_bytes(pid: int) -> int:
    """Resident memory, pages shared by n processes counted as 1/n.

    Raises:
        PermissionError: It is somebody else's, or not dumpable, and we are not root.

    Source: proc(5), smaps_rollup.
    """
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def memory_file_bytes(pid: int) -> int:
    """Add up its files of memfd_create(2), mapped or not. Source: stat(2), st_blocks."""
    sizes = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{name}"
        try:
            if os.readlink(path).startswith("/memfd:"):
                info = os.stat(path)
                sizes[info.st_ino] = info.st_blocks * 512
        except FileNotFoundError:
            continue  # closed meanwhile
    return sum(sizes.values())


def cpu_s(pid: int) -> float:
    """Processor time that it has used, in user and system mode: proc(5), stat."""
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def available_bytes() -> int:
    """Read the available memory: proc(5), meminfo, MemAvailable."""
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def _parents() -> dict[int, int]:
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = _read(f"/proc/{name}/stat").rpartition(b")")[2].split()
            if fields and fields[0] not in (b"Z", b"X"):  # dead, and about to be reaped
                found[int(name)] = int(fields[1])
    return found


def _descends(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == ancestor:
            return True
    return False


def _is_nested(pid: int) -> bool:
    """Return whether it is in a PID namespace below ours: NSpid then has several numbers."""
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith(b"NSpid:"):
            return len(line.split()) > 2
    return False


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # it has just ended
        return b""
