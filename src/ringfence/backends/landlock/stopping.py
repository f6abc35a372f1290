"""Programs of a sandbox without namespaces that stand still by SIGSTOP, where no cgroup freezes them."""

from __future__ import annotations

import _signal as signal
import os
import time

from ...errors import IsolationError
from ...guest.without_namespaces.landlocked import members, signal_members

_PATIENCE_S = 10.0
_PAUSE_S = 0.001
_STILL = "TtZXD"  # D: it waits for the child of a vfork, which stands still, or for a disk


def begin(base: int, agent: int) -> set[int]:
    """Send SIGSTOP to the programs that run; returns these. The frozen ones stop when they are thawed."""
    running = {pid for pid in members(base) if pid != agent and not _is_still(pid)}
    signal_members(running, base, signal.SIGSTOP)
    return running


def stop(base: int, agent: int) -> set[int]:
    """Have all programs of a sandbox stand still; returns those that ran.

    Raises:
        IsolationError: They do not in ten seconds; those that do are let go on.
    """
    stopped: set[int] = set()
    deadline = time.monotonic() + _PATIENCE_S
    # A pending signal aborts fork(2), so that each round finds fewer.
    while running := begin(base, agent):
        stopped |= running
        if time.monotonic() > deadline:
            go_on(base, stopped)
            raise IsolationError(f"{len(running)} programs inside do not stop for SIGSTOP")
        time.sleep(_PAUSE_S)
    return stopped


def go_on(base: int, stopped: set[int]) -> None:
    """Let those that `stop` returned go on."""
    signal_members(stopped, base, signal.SIGCONT)


def _is_still(pid: int) -> bool:
    """Return whether no thread of a process runs, or it has ended."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
        return all(_state(f"/proc/{pid}/task/{task}") in _STILL for task in tasks)
    except OSError:
        return True


def _state(place: str) -> str:
    with open(f"{place}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split(None, 1)[0].decode()
