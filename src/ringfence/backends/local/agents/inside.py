"""Finding a sandbox's PID 1 among the processes that a launcher started."""

from __future__ import annotations

import os

from ..host.mountinfo import read_text

NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts")


def status_of(pid: int) -> dict[str, str]:
    """proc_pid_status(5) of one process."""
    lines = read_text(f"/proc/{pid}/status").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def first_inside(launcher: int, *, below: int = 1) -> int | None:
    """The PID 1, in a namespace so far below ours, of what a process started; None: there is none."""
    depth = len(status_of(os.getpid())["NSpid"].split()) + below
    for pid in (launcher, *descendants(launcher)):
        try:
            numbers = status_of(pid)["NSpid"].split()
        except (OSError, KeyError):
            continue  # it has just ended
        if len(numbers) == depth and numbers[-1] == "1":
            return pid
    return None


def descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = read_text(f"/proc/{name}/stat").rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    waiting = list(children.get(root, ()))
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children.get(pid, ())
    return found
