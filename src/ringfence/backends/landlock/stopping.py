"""Programs of a sandbox without namespaces that stand still by SIGSTOP, where no cgroup freezes them."""

from __future__ import annotations

import _signal as signal
import os
import time
from contextlib import suppress

from ...errors import IsolationError
from ...guest.without_namespaces.landlocked import members, signal_members

_PATIENCE_S = 10.0
_PAUSE_S = 0.001
_STILL = frozenset("TtZX")


def begin(base: int, agent: int) -> set[int]:
    """Send SIGSTOP to the programs that run; returns these. The frozen ones stop when they are thawed."""
    return _tell(base, agent)[0]


def stop(base: int, agent: int) -> set[int]:
    """Have all programs of a sandbox stand still; returns those that ran.

    Raises:
        IsolationError: They do not in ten seconds; those that do are let go on.
    """
    stopped: set[int] = set()
    deadline = time.monotonic() + _PATIENCE_S
    while True:  # a pending signal aborts fork(2), so that each round finds fewer
        told, running = _tell(base, agent)
        stopped |= told
        if not running:
            return stopped
        if time.monotonic() > deadline:
            go_on(base, stopped)
            raise IsolationError(f"{len(running)} programs inside do not stop for SIGSTOP")
        time.sleep(_PAUSE_S)


def _tell(base: int, agent: int) -> tuple[set[int], set[int]]:
    """Send SIGSTOP to what runs; returns these, and those of them that do not stand still yet.

    A process in state D is told as well: most wait for a disk or a lock, and go on. The parent of a vfork(2)
    waits in it for its child, and stands still if that does.
    """
    found = {pid: _look(pid) for pid in members(base) if pid != agent}
    told = {pid for pid, (states, _) in found.items() if states - _STILL}
    signal_members(told, base, signal.SIGSTOP)
    parents = {found[pid][1] for pid in found.keys() - told}
    waiting = {pid for pid in told & parents if found[pid][0] <= _STILL | {"D"}}
    return told, told - waiting


def go_on(base: int, stopped: set[int]) -> None:
    """Let those that `stop` returned go on."""
    signal_members(stopped, base, signal.SIGCONT)


def _look(pid: int) -> tuple[set[str], int]:
    """Return the states of a process's threads, and its parent; proc_pid_stat(5)."""
    states, parent = set[str](), 0
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            # Of a thread that has ended the others are no stiller.
            with suppress(FileNotFoundError, ProcessLookupError):
                state, parent = _state(f"/proc/{pid}/task/{task}")
                states.add(state)
    except (FileNotFoundError, ProcessLookupError):
        pass  # the process has ended
    return states, parent


def _state(place: str) -> tuple[str, int]:
    with open(f"{place}/stat", "rb") as file:
        state, parent = file.read().rpartition(b")")[2].split(None, 2)[:2]
    return state.decode(), int(parent)
