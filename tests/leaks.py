"""A census of what sandboxes could leave on a machine, and its growth."""

from __future__ import annotations

import glob
import os
import tempfile
import time
from pathlib import Path

Census = frozenset[tuple[str, str]]
"""(kind, description) of everything that could leak, each thing once."""


def take_census() -> Census:
    return frozenset(
        [("process", line) for line in _our_processes()]
        + [("mount", line) for line in _mounts()]
        + [("cgroup", path) for path in _cgroups()]
        + [("loop device", path) for path in _loop_devices()]
        + [("path", path) for path in _paths()]
    )


def wait_for_calm(before: Census, *, patience_s: float) -> list[tuple[str, str]]:
    """What grew since `before`, once teardown had `patience_s` seconds to finish."""
    deadline = time.monotonic() + patience_s
    while True:
        grown = sorted(take_census() - before)
        if not grown or time.monotonic() > deadline:
            return grown
        time.sleep(0.05)


def _our_processes() -> list[str]:
    """Our descendants, and orphans anywhere whose command line names ringfence: `pid command`."""
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_text(errors="replace")
                cmdline = Path("/proc", entry, "cmdline").read_bytes()
            except OSError:
                continue  # it ended while we looked
            # The command may hold spaces and brackets: only what follows the last ")" is regular.
            state, parent = stat.rpartition(")")[2].split()[:2]
            parents[int(entry)] = int(parent)
            text = cmdline.replace(b"\0", b" ").decode(errors="replace").strip()
            commands[int(entry)] = text or f"[{stat[stat.find('(') + 1 : stat.rfind(')')]}] {state}"
    ours = [pid for pid in parents if pid != os.getpid() and _descends(pid, parents)]
    orphans = [
        pid for pid, parent in parents.items() if 1 == parent and "ringfence" in commands[pid]
    ]
    return [f"{pid} {commands[pid]}" for pid in {*ours, *orphans}]


def _descends(pid: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == os.getpid():
            return True
    return False


def _mounts() -> list[str]:
    # The ids in front say nothing to a reader, but they make each line one thing.
    return Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()


def _cgroups() -> list[str]:
    return [
        str(Path(root, name))
        for root, names, _ in os.walk("/sys/fs/cgroup")
        for name in names
        if name.startswith("ringfence")
    ]


def _loop_devices() -> list[str]:
    return glob.glob("/sys/block/loop*/loop/backing_file")


def _paths() -> list[str]:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "/run")
    shared = {tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm", "/run", runtime}
    ours = {f"{runtime}/ringfence", "/run/ringfence", f"/tmp/ringfence-{os.geteuid()}"}
    found = [path for place in shared for path in glob.glob(f"{place}/ringfence*")]
    found += [path for place in ours for path in glob.glob(f"{place}/*")]
    # Our directories stay, and so do the locks of host id blocks in them: a lock file that is
    # removed while in use locks nothing.
    stays = ours | {f"{place}/ids" for place in ours}
    return [path for path in found if path not in stays]
