"""Stand-in for the memory cgroup where none is delegated: sampled, so reported as degraded."""

from __future__ import annotations

import posix as os
import resource
import time

from .. import wire
from . import processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ..plan import Plan
    from .init import Exec

_EVERY_S = 0.05
_LOOKS_OVER = 10  # until a sandbox of several users is ended


class Watchdog:
    """Ends what takes more memory than there may be.

    Args:
        execs: Those that run, by number.
        kill: Ends one, and says why.
    """

    def __init__(
        self, plan: Plan, execs: Mapping[int, Exec], kill: Callable[[Exec, int], None]
    ) -> None:
        self._plan, self._execs, self._kill = plan, execs, kill
        self._most = plan["memory_watchdog_bytes"]
        self._next_look = 0.0
        # Where ids are mapped and no cgroup counts, what other users have started cannot be killed by
        # us, nor, when root there has become somebody else, by its agent: then all of it must end.
        self._guards_all = bool(plan["id_helpers"] and self._most) and os.getpid() == 1
        self._looks_over = 0
        self._device = -1  # where the kernel keeps files of memfd_create(2); -1: not known yet

    @property
    def is_on(self) -> bool:
        return bool(self._guards_all or (self._most and self._execs))

    def wait_s(self) -> float:
        """How soon to `look`. Precondition: it is on."""
        return max(_EVERY_S, self._next_look - time.monotonic())

    def look(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        resident = {pid: processes.resident_bytes(pid) for pid in processes.pids()}
        held = self._memory_files(resident)
        # Mapped pages of them are resident already; so are files of the host, but as pages of their
        # own.
        mapped = sum(processes.resident_bytes(pid, shared=True) for pid in resident) if held else 0
        apart = processes.ipc_bytes() + max(0, sum(held.values()) - mapped)
        if not self._plan["disk"]:
            apart += processes.file_bytes("/")
        elif self._plan["shared_memory_bytes"]:
            apart += processes.file_bytes("/dev/shm")
        used: dict[int, int] = {}
        if sum(resident.values()) + apart > self._most:
            # That counted shared pages once for each process: 64 idle forks are not a bomb.
            used = processes.look_closer(resident)
        # A closer look costs more: it must not become what the sandbox mostly does.
        self._next_look = now + max(_EVERY_S, 4 * (time.monotonic() - now))
        is_over = sum(used.values()) + apart > self._most
        if self._guards_all:
            self._guard_all(is_over or self._are_too_many(resident))
        if is_over:
            self._kill_largest(used, held)

    def _kill_largest(self, used: dict[int, int], held: dict[int, int]) -> None:
        """The exec that takes most; all, where that is none of ours.

        Args:
            used: Bytes by tag.
            held: Bytes of memory files by pid.
        """
        for pid, size in held.items():
            used[processes.tag_of(pid)] = used.get(processes.tag_of(pid), 0) + size
        largest = max(used, key=lambda tag: used[tag], default=0)
        run = self._execs.get(processes.TAG_BASE - largest)
        for victim in [run] if run else list(self._execs.values()):
            self._kill(victim, wire.KILLED_BY_MEMORY_WATCHDOG)

    def _are_too_many(self, pids: Iterable[int]) -> bool:
        """The kernel counts processes for each user inside, and there are many: together, we do."""
        limits = self._plan["rlimits"]
        most = min(hard for which, _, hard in limits if which == resource.RLIMIT_NPROC)
        return sum(processes.threads(pid) for pid in pids) > most

    def _guard_all(self, is_over: bool) -> None:
        """End the sandbox when it is over its limits for longer than the agents need to see to it."""
        self._looks_over = self._looks_over + 1 if is_over else 0
        if self._looks_over > _LOOKS_OVER:
            os._exit(1)

    def _memory_files(self, pids: Iterable[int]) -> dict[int, int]:
        """Bytes of memfd_create(2), which are in no file system, by the first who has each open."""
        if self._device < 0:
            fd = os.memfd_create("which", os.MFD_CLOEXEC)
            self._device = os.fstat(fd).st_dev
            os.close(fd)
        seen: set[int] = set()
        held: dict[int, int] = {}
        for pid in pids:
            for info in processes.open_files(pid):
                if info.st_dev == self._device and info.st_ino not in seen:
                    seen.add(info.st_ino)
                    held[pid] = held.get(pid, 0) + info.st_blocks * 512
        return held
