"""What the host sees of sandboxes: processes, namespaces, cgroups. Nothing here asks a sandbox."""

from __future__ import annotations

import gc
import os
import select
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ringfence import Sandbox

PATIENCE_S = 60.0
"""When a test has failed; never how fast something has to be."""


def new_marker() -> str:
    """A word that no other process on this machine has on its command line."""
    return f"marker-{uuid.uuid4().hex}"


def new_length() -> str:
    """An argument for sleep(1), longer than any test and unlike that of any other process."""
    return f"6{uuid.uuid4().int % 10**17:017d}"


def pids_with(marker: str) -> list[int]:
    """Every process of the host with `marker` as an argument, zombies not counted."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if pid == os.getpid():
            continue
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue  # it ended while we looked
        if marker.encode() in command.split(b"\0"):
            found.append(pid)
    return found


def is_sleep(pid: int) -> bool:
    """Tell whether `pid` runs sleep(1) now."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep\0")
    except OSError:
        return False  # it ended meanwhile


def init_pid(sandbox: Sandbox) -> int:
    """The host's pid of the sandbox's PID 1."""
    pid: int = sandbox._inner.pid  # type: ignore[attr-defined]
    return pid


def children_of(pid: int) -> list[int]:
    """Direct children of `pid`, whichever thread of it made them, those that nobody has reaped among them.

    By what each says of its parent: /proc/PID/task/TID/children leaves some out while others end, and
    one changes from list to list when the thread that made it ends. Source: proc_pid_task(5).
    """
    return [
        each for each in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(each) == pid
    ]


def _parent(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it ended while we looked
    return int(stat.rpartition(")")[2].split()[1])


def descendants_of(pid: int) -> list[int]:
    """Children, their children and so on, found in one pass: a fork bomb leaves little time for more."""
    children: dict[int, list[int]] = {}
    for each in map(int, filter(str.isdigit, os.listdir("/proc"))):
        children.setdefault(_parent(each), []).append(each)
    found = list(children.get(pid, ()))
    for each in found:
        found += children.get(each, ())
    return found


def until(condition: Callable[[], object], patience_s: float = PATIENCE_S) -> bool:
    """Whether `condition` came true within `patience_s`; for what no descriptor can announce."""
    deadline_s = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline_s:
            return bool(condition())
        time.sleep(0.002)
    return True


def pin(pids: Iterable[int]) -> dict[int, int]:
    """pidfds of living processes, by pid: they never name a later process of the same number."""
    pinned = {}
    for pid in pids:
        try:
            pinned[pid] = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
    return pinned


def survivors(pinned: dict[int, int], patience_s: float) -> list[int]:
    """Those of `pin` that have not ended within `patience_s`; closes the pidfds."""
    deadline_s = time.monotonic() + patience_s
    left = []
    for pid, pidfd in pinned.items():
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
            left.append(pid)
        os.close(pidfd)
    return left


def namespaces_of(pids: Iterable[int]) -> set[str]:
    """Names like `net:[4026532281]` of every namespace these processes are in, as far as told."""
    found = set()
    for pid in pids:
        try:
            for name in os.listdir(f"/proc/{pid}/ns"):
                found.add(os.readlink(f"/proc/{pid}/ns/{name}"))
        except OSError:
            continue  # it ended, or is not ours to look into
    return found


def pids_before(moment_s: float) -> list[int]:
    """Processes that were there at `moment_s` of CLOCK_BOOTTIME: the numbers of namespaces that
    have ended are soon given to new ones, which say nothing of the old."""
    ticks = os.sysconf("SC_CLK_TCK")
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            continue
        if int(stat.rpartition(b")")[2].split()[19]) / ticks <= moment_s:
            found.append(pid)
    return found


def cgroups_of(sandbox_id: str) -> list[str]:
    """Directories of this sandbox in every cgroup hierarchy."""
    return [
        os.path.join(root, name)
        for root, names, _files in os.walk("/sys/fs/cgroup")
        for name in names
        if sandbox_id in name
    ]


def open_fds(pid: int | str = "self") -> dict[int, str]:
    """Descriptors of a process, and what each is open on."""
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue  # the directory listing's own
    return found


@contextmanager
def same_descriptors() -> Iterator[None]:
    """Assert that this process has the same descriptors after the block, once threads have closed theirs.

    Without collections meanwhile: one closes what earlier tests have left.
    """
    gc.disable()
    try:
        before = open_fds()
        yield
        until(lambda: before == open_fds(), 5.0)
        assert before == open_fds()
    finally:
        gc.enable()


def status_kib(pid: int | str, field: str) -> int:
    """A `... kB` line of /proc/PID/status, such as VmRSS or VmHWM."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise KeyError(field)


def open_count(pid: int | str = "self") -> int:
    """How many descriptors a process has open, once it has closed what it is about to: for a quarter
    of a second their number has been the same. Of this process, what is garbage is collected first.
    """
    gc.collect()
    since, count, deadline = time.monotonic(), -1, time.monotonic() + 20
    while time.monotonic() < min(since + 0.25, deadline):
        if count != (count := len(os.listdir(f"/proc/{pid}/fd"))):
            since = time.monotonic()
        time.sleep(0.01)
    return count
