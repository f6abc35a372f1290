"""Limits that gVisor does not enforce itself, or not exactly: sampled, below the host's cgroup limit."""

from __future__ import annotations

import _signal as signal
import os
import time

from ..launcher import wire
from ..launcher.pid1 import processes
from . import looking
from .execs import LOOK_S, Exec, Execs, send

_EVERY_S = 0.05
_LOOKS = 20

# gVisor frees the memory of ended processes in the background, on a busy host seconds later.
_FREED_S = 5.0  # without any progress
_PROGRESS_BYTES = 1 << 20
_SLACK_BYTES = 32 << 20  # what others may use meanwhile: the host's limit has room for it


class Watchdog:
    """Ends what is more than there may be.

    Args:
        memory_bytes: Of processes, and of files in the root; 0: nothing is watched.
        owns_root: The root is the sandbox's own, and in memory.
    """

    def __init__(
        self, execs: Execs, *, pids: int, memory_bytes: int, owns_root: bool = True
    ) -> None:
        self._execs, self._pids, self._memory_bytes = execs, pids, memory_bytes
        self._owns_root = owns_root
        self._next_look = 0.0
        self._freed_by, self._least, self._most = 0.0, 0, 0  # while memory is being freed
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
        if not self._is_on:
            self._most = 0
            return
        if (now := time.monotonic()) < self._next_look:
            return
        self._bound_processes()
        self._bound_memory()
        is_soon = self._is_half_full or self._most
        pause_s = LOOK_S if is_soon else _EVERY_S
        if not self._owns_root:  # a closer look must not become what the sandbox mostly does
            pause_s = max(pause_s, 4 * (time.monotonic() - now))
        self._next_look, self._execs.unseen_s = now + pause_s, 0.0

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
        if used > self._memory_bytes:
            used = self._execs.groups.own_bytes() + self.file_bytes()
        if used <= self._memory_bytes:
            self._most = 0
            return
        killed = {run.number for run in self._execs.running.values() if run.killed_by}
        sizes = {
            number: self._size_of(self._execs.groups.members(number))
            for number in self._execs.numbers()
            if number not in killed
        }
        living = sum(sizes.values()) + looking.resident(os.getpid()) + self.file_bytes()
        if sizes and (living > self._memory_bytes or not self._is_freeing(used)):
            self._most = 0
            largest = max(sizes, key=sizes.__getitem__)
            self._execs.kill(largest, wire.KILLED_BY_MEMORY_WATCHDOG)

    def _size_of(self, pids: list[int]) -> int:
        """Add up their memory; on the host's kernel without what forked processes share."""
        resident = {pid: looking.resident(pid) for pid in pids}
        if self._owns_root:
            return sum(resident.values())
        return sum(processes.look_closer(resident).values())

    def _is_freeing(self, used: int) -> bool:
        """Return whether the excess may be of ended processes: living ones alone are below the limit."""
        now = time.monotonic()
        if not self._most or used < self._least - _PROGRESS_BYTES:
            self._freed_by, self._least = now + _FREED_S, used
            self._most = self._most or used + _SLACK_BYTES
        return used <= self._most and now < self._freed_by

    def used_bytes(self) -> int:
        """Add up the memory of processes, and of files in the root."""
        return self._execs.groups.memory_bytes() + self.file_bytes()

    def file_bytes(self) -> int:
        """Read how much files in the root take."""
        if not self._owns_root:
            return 0
        usage = os.statvfs("/")
        return (usage.f_blocks - usage.f_bfree) * usage.f_frsize
