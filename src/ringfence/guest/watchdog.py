"""Limits that gVisor does not enforce itself, or not exactly: sampled, below the host's cgroup
limit.
"""

from __future__ import annotations

import _signal as signal
import os
import time

from ..launcher import wire
from . import looking
from .execs import LOOK_S, Exec, Execs, send

_EVERY_S = 0.05
_FREED_S = 1.0
_LOOKS = 20


class Watchdog:
    """Ends what is more than there may be.

    Args:
        memory_bytes: Of processes, and of files in the root; 0: nothing is watched.
    """

    def __init__(self, execs: Execs, *, pids: int, memory_bytes: int) -> None:
        self._execs, self._pids, self._memory_bytes = execs, pids, memory_bytes
        self._next_look = 0.0
        # gVisor frees the memory of who was killed a moment after: whoever starts then must not die for it.
        self._freed_by, self._at_kill = 0.0, 0
        self._is_half_full = False  # with processes: a bomb is at its limit for moments only

    @property
    def _is_on(self) -> bool:
        return bool(self._memory_bytes and self._execs.numbers())

    def wait_s(self) -> float | None:
        """How soon to `look`; None: not before there is an exec."""
        return max(LOOK_S, self._next_look - time.monotonic()) if self._is_on else None

    def put_off(self, run: Exec) -> None:
        """Whoever has only begun need not be looked at, unless others before them have not been."""
        if self._execs.numbers() == [run.number]:
            self._next_look = run.started_ns / 1e9 + _EVERY_S - self._execs.unseen_s

    def look(self) -> None:
        if not self._is_on or (now := time.monotonic()) < self._next_look:
            return
        self._bound_processes()
        self._next_look, self._execs.unseen_s = (
            now + (LOOK_S if self._is_half_full else _EVERY_S),
            0.0,
        )
        self._bound_memory()

    def settle(self) -> None:
        """Let there be no more processes than there may be, before somebody counts them."""
        for _ in range(_LOOKS):
            if not self._memory_bytes or not self._bound_processes():
                break
            time.sleep(LOOK_S)
            self._execs.reap()

    def _bound_processes(self) -> bool:
        """Let the newest processes die where there are too many; note who has as many as there may be.

        Root of the guest's own, to whom RLIMIT_NPROC does not apply, may have so many in each exec. Forks that
        gVisor's kernel refuses are not counted: that the limit was reached is seen here, or not at all.
        """
        groups = self._execs.groups
        count = groups.count()
        self._is_half_full, excess = count * 2 >= self._pids, count - self._pids
        if excess < 0:
            return False
        numbers = self._execs.numbers()
        everybody = {pid: number for number in numbers for pid in groups.members(number)}
        if not excess:
            for number in set(everybody.values()) & self._execs.running.keys():
                self._execs.running[number].crowded |= wire.FULL
            return False
        for pid in sorted(everybody)[-excess:]:
            run = self._execs.running.get(everybody[pid])
            if send(pid, signal.SIGKILL) and run is not None:
                run.crowded |= wire.CROWDED
        return True

    def _bound_memory(self) -> None:
        used = self.used_bytes()
        is_freed = time.monotonic() < self._freed_by and used <= self._at_kill
        if used > self._memory_bytes and not is_freed:
            self._freed_by, self._at_kill = time.monotonic() + _FREED_S, used
            self._execs.kill(
                max(self._execs.numbers(), key=self._resident), wire.KILLED_BY_MEMORY_WATCHDOG
            )

    def used_bytes(self) -> int:
        """Add up the memory of processes, and of files in the root."""
        usage = os.statvfs("/")
        files = (usage.f_blocks - usage.f_bfree) * usage.f_frsize
        return self._execs.groups.memory_bytes() + files

    def _resident(self, number: int) -> int:
        return sum(map(looking.resident, self._execs.groups.members(number)))
