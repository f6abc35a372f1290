"""Cgroups of the guest's own kernel: which process belongs to which exec, and how many there may be.

gVisor's cgroups are version 1, in its memory only. They are mounted for a moment and then reached
by descriptor alone. Root of a guest that has gVisor's capabilities can find them.
"""

from __future__ import annotations

import os

from ..linux import mounts

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_ALL = "all"


class Groups:
    """Two hierarchies: one bounds the number of processes, the other tells execs apart.

    Args:
        place: An empty directory that only we can reach.
        pids: How many processes there may be, ours not counted.
    """

    controllers = "cpuacct,memory"

    def __init__(self, place: str, pids: int) -> None:
        self._bound = _hierarchy(place, "pids")
        # Limits are not handed on to groups below in gVisor: so one holds everybody, and us.
        os.mkdir(_ALL, dir_fd=self._bound)
        self._write(self._bound, f"{_ALL}/pids.max", pids + 1)
        self._write(self._bound, f"{_ALL}/cgroup.procs", os.getpid())
        self._trees = _hierarchy(place, self.controllers)

    def keep(self) -> None:
        """Let nobody else in: everybody may open the descriptors of gVisor's PID 1, by its /proc.

        Precondition: we have become who we stay. What was made before is the guest's own until then.
        """
        for fd in (self._bound, self._trees):
            os.fchown(fd, os.getuid(), os.getgid())
            os.fchmod(fd, 0o700)

    def count(self) -> int:
        """How many processes there are now, without us."""
        return int(self._read(self._bound, f"{_ALL}/pids.current")) - 1

    def most(self) -> int:
        """How many there may be, without us."""
        return int(self._read(self._bound, f"{_ALL}/pids.max")) - 1

    def memory_bytes(self) -> int:
        """What all of them use together, files in the guest's memory included."""
        return int(self._read(self._trees, "memory.usage_in_bytes"))

    def enter(self, number: int) -> None:
        """Move to the group of one exec: what we start next is born in it."""
        try:
            os.mkdir(str(number), dir_fd=self._trees)
        except FileExistsError:
            pass
        self._write(self._trees, f"{number}/cgroup.procs", os.getpid())

    def leave(self) -> None:
        """Move back to where no exec is."""
        self._write(self._trees, "cgroup.procs", os.getpid())

    def members(self, number: int) -> list[int]:
        """The processes of one exec that have not ended."""
        try:
            return [int(pid) for pid in self._read(self._trees, f"{number}/cgroup.procs").split()]
        except FileNotFoundError:
            return []

    def cpu_ns(self, number: int) -> tuple[int, int]:
        """Time that one exec's processes, living and ended, have used: in user mode, in the kernel."""
        user = self._read(self._trees, f"{number}/cpuacct.usage_user")
        return int(user), int(self._read(self._trees, f"{number}/cpuacct.usage_sys"))

    def lacked_memory(self, number: int) -> bool:
        """Whether one exec's processes were killed for it: gVisor's kernel kills none."""
        del number
        return False

    def remove(self, number: int) -> bool:
        """Forget an exec; false while it has members."""
        try:
            os.rmdir(str(number), dir_fd=self._trees)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def _read(self, base: int, name: str) -> bytes:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=base)
        try:
            pieces = []
            while piece := os.read(fd, 1 << 16):
                pieces.append(piece)
            return b"".join(pieces)
        finally:
            os.close(fd)

    def _write(self, base: int, name: str, value: int | bytes) -> None:
        fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=base)
        try:
            os.write(fd, value if isinstance(value, bytes) else b"%d" % value)
        finally:
            os.close(fd)


class MachineGroups(Groups):
    """The same of a Linux of the guest's own, where a limit on memory holds, and holds for all together."""

    controllers = "cpuacct,memory,freezer"

    def __init__(self, place: str) -> None:
        super().__init__(place, 0)
        os.mkdir(_ALL, dir_fd=self._trees)
        self._top = self._trees
        self._trees = os.open(_ALL, _DIRECTORY, dir_fd=self._top)

    def limit(self, pids: int, memory_bytes: int) -> None:
        """From now on there are so many processes, ours not counted, and they have so much memory.

        Args:
            memory_bytes: What all execs may use together, files in the guest's root included.
        """
        self._write(self._bound, f"{_ALL}/pids.max", pids + 1)
        self._write(self._trees, "memory.limit_in_bytes", memory_bytes)

    def leave(self) -> None:
        """Move back to where no exec is, and no limit."""
        self._write(self._top, "cgroup.procs", os.getpid())

    def freeze(self, frozen: bool) -> None:
        """Let all that execs have started stand still, or go on; returns when it does."""
        wanted = b"FROZEN" if frozen else b"THAWED"
        while self._read(self._trees, "freezer.state").strip() != wanted:
            self._write(self._trees, "freezer.state", wanted)

    def lacked_memory(self, number: int) -> bool:
        """Whether the guest's kernel, which alone knows, killed a process of one exec for it."""
        try:
            lines = self._read(self._trees, f"{number}/memory.oom_control").splitlines()
        except FileNotFoundError:
            return False
        return any(line.startswith(b"oom_kill ") and int(line.split()[1]) for line in lines)


def _hierarchy(place: str, controllers: str) -> int:
    """Mount a hierarchy, take hold of it, and let its name go."""
    mounts.mount("none", place, "cgroup", 0, controllers)
    fd = os.open(place, _DIRECTORY)
    mounts.umount2(place, mounts.MNT_DETACH)
    return fd
