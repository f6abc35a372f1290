"""A census of what sandboxes could leave on a machine, and its growth.

Runs may share a machine: one as root, others as the users that RINGFENCE_TEST_NEIGHBOURS tells root
of. Each counts what only it can have made: what belongs to the neighbour is the neighbour's, and an
ordinary user makes no mounts and no loop devices, and leaves nothing that belongs to others.
"""

from __future__ import annotations

import glob
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ringfence.snapshots.catalogue import default_directory

Census = frozenset[tuple[str, str]]
"""(kind, description) of everything that could leak, each thing once."""


def take_census() -> Census:
    found = [("process", line) for line in _our_processes()]
    found += [("cgroup", path) for path in cgroups()]
    found += [("path", path) for path in _paths() if _may_be_ours(_owner(path))]
    # A test that opened the directories above its own took /tmp from all users but root, one that
    # gave a server /sys as its state directory that.
    found += [
        ("mode", f"{each} {os.stat(each).st_mode:o}") for each in ("/", "/etc", "/sys", "/tmp")
    ]
    # Of the tests' own process: what later ones make would be everybody's to write.
    found += [("umask", f"{_umask():o}")]
    if 0 == os.geteuid():
        found += [("mount", line) for line in _mounts()]
        found += [("loop device", path) for path in _loop_devices()]
    return frozenset(found)


def _umask() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))


def _may_be_ours(uid: int | None) -> bool:
    """Whether this run can have made what belongs to `uid`; None is what went while we looked."""
    if 0 != os.geteuid():
        return uid == os.geteuid()
    return (
        uid is not None and str(uid) not in os.environ.get("RINGFENCE_TEST_NEIGHBOURS", "").split()
    )


def _owner(path: str) -> int | None:
    try:
        return os.lstat(path).st_uid
    except OSError:
        return None


def wait_for_calm(
    before: Census, *, patience_s: float, take: Callable[[], Census] = take_census
) -> list[tuple[str, str]]:
    """What grew since `before`, once teardown had `patience_s` seconds to finish."""
    deadline = time.monotonic() + patience_s
    while True:
        grown = sorted(take() - before)
        if not grown or time.monotonic() > deadline:
            return grown
        time.sleep(0.05)


def too_deep(top: str, most: int = 500) -> list[str]:
    """Find directories so deep that pytest, which removes by recursion, fails in a later run."""
    found, below = [], [(top, 0)]
    while below:
        path, depth = below.pop()
        if depth == most:
            found.append(path[: len(top) + 80])
            continue
        try:
            with os.scandir(path) as entries:
                inner = [each.path for each in entries if each.is_dir(follow_symlinks=False)]
        except OSError:
            continue  # another user's
        below += [(each, depth + 1) for each in inner]
    return found


def parentage(kind: str, thing: str) -> str:
    """Describe the parent of a process of a census; empty for all else."""
    stat = _stat(int(thing.split()[0])) if "process" == kind else None
    return f" (child of {stat[1]} {_command(int(stat[1]))})" if stat else ""


def descendants() -> list[str]:
    """Processes below this one: `pid command`."""
    return [line for line, is_ours in _processes() if is_ours]


def _our_processes() -> list[str]:
    """Our descendants, and orphans anywhere whose command line names ringfence."""
    return [line for line, _ in _processes()]


def _processes() -> list[tuple[str, bool]]:
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        stat = _stat(pid)
        if stat is None or pid == os.getpid():
            continue  # it ended while we looked
        command = _command(pid) or f"[nameless] {stat[0]}"
        stray = "1" == stat[1] and "ringfence" in command and _may_be_ours(_user(pid))
        if (is_ours := _is_ours(pid)) or stray:
            found.append((f"{pid} {command}", is_ours))
    return found


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The command may hold spaces and brackets: only what follows the last ")" is regular.
    return text.rpartition(")")[2].split() or None  # it may end between opening and reading


def _user(pid: int) -> int | None:
    """The real user id: /proc/PID itself belongs to root where a process cannot be dumped."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return None
    fields = text.partition("\nUid:")[2].split()
    return int(fields[0]) if fields else None


def _command(pid: int) -> str:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return line.replace(b"\0", b" ").decode(errors="replace").strip()


def _is_ours(pid: int) -> bool:
    """Whether `pid` is this process or descends from it."""
    while pid and pid != os.getpid():
        stat = _stat(pid)
        pid = int(stat[1]) if stat else 0
    return 0 != pid


def _mounts() -> list[str]:
    # The ids in front say nothing to a reader, but they make each line one thing.
    return Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()


def cgroups() -> list[str]:
    """The cgroups of sandboxes that are not a neighbour's."""
    found = [
        str(Path(root, name))
        for root, names, _ in os.walk("/sys/fs/cgroup")
        for name in names
        # The run itself may sit in "ringfence-host", below a cgroup that was delegated to it.
        if name.startswith("ringfence.") and not _is_a_neighbours(name)
    ]
    return [path for path in found if _may_be_ours(_owner(path))]


def _is_a_neighbours(name: str) -> bool:
    """Whether `WORD.PID.STARTED.NAMESPACE.ID` belongs to a live process that is not of this run.

    In a PID namespace of its own a run sees no process outside: all that is named after the
    namespace that RINGFENCE_TEST_OUTSIDE tells it of belongs to others.
    """
    _, pid, started, namespace, *_ = [*name.split("."), "", "", ""]
    if namespace and namespace == os.environ.get("RINGFENCE_TEST_OUTSIDE"):
        return True
    stat = _stat(int(pid)) if pid.isdigit() else None
    return stat is not None and started == stat[19] and not _is_ours(int(pid))


def _loop_devices() -> list[str]:
    return glob.glob("/sys/block/loop*/loop/backing_file")


def _paths() -> list[str]:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "/run")
    shared = {tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm", "/run", runtime}
    ours = {f"{runtime}/ringfence", "/run/ringfence", f"/tmp/ringfence-{os.geteuid()}"}
    found = [path for place in shared for path in glob.glob(f"{place}/ringfence*")]
    found += [path for place in ours for path in glob.glob(f"{place}/*")]
    found += glob.glob(f"{default_directory()}/*")
    # Our directories stay, and so do the locks of host id blocks in them: a lock file that is
    # removed while in use locks nothing.
    stays = ours | {f"{place}/ids" for place in ours}
    return [
        path for path in found if path not in stays and not _is_a_neighbours(os.path.basename(path))
    ]
