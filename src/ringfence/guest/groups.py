"""Cgroups of the guest's own kernel: which process belongs to which exec, and how many there may be.

gVisor's cgroups are version 1, in its memory only. They are mounted for a moment and then reached
by descriptor alone. Root of a guest that has gVisor's capabilities can find them.
"""

from __future__ import annotations

import os

from ..linux import mounts

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_ALL, _HOME, _KEPT = "all", "home", "kept"
_PIECE = 1 << 13  # a larger buffer would be memory that is new each time
_WORD = 64  # enough of a file with one number, and to see whether there is one


class _Kept:
    """A group that execs have one after the other, each once the last has left nobody in it.

    Its files stay open: made, opened, closed and removed for each exec, it took a quarter of the
    agent's system calls.
    """

    def __init__(self, trees: int) -> None:
        os.mkdir(_KEPT, dir_fd=trees)
        names = (f"{_KEPT}/cpuacct.usage_user", f"{_KEPT}/cpuacct.usage_sys")
        self._usage = [os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=trees) for name in names]
        self.members = _procs(trees, _KEPT)
        self.number = 0  # of the exec that has it; 0: none
        self._before = 0, 0

    def used(self) -> tuple[int, int]:
        """What this exec has used of it, in ns."""
        user, system = self._all_used()
        return user - self._before[0], system - self._before[1]

    def release(self) -> bool:
        """Give it to whoever comes next, unless somebody is left in it."""
        if os.pread(self.members, _WORD, 0):
            return False
        self.number, self._before = 0, self._all_used()
        return True

    def _all_used(self) -> tuple[int, int]:
        user, system = (int(os.pread(fd, _WORD, 0)) for fd in self._usage)
        return user, system


class Groups:
    """Two hierarchies: one bounds the number of processes, the other tells execs apart.

    Args:
        place: An empty directory that only we can reach.
        pids: How many processes there may be, ours not counted.
    """

    controllers = "cpuacct,memory"

    def __init__(self, place: str, pids: int) -> None:
        self._me = b"%d" % os.getpid()
        self._bound = _hierarchy(place, "pids")
        # Limits are not handed on to groups below in gVisor: so one holds everybody, and us.
        os.mkdir(_ALL, dir_fd=self._bound)
        self._write(self._bound, f"{_ALL}/pids.max", pids + 1)
        self._write(self._bound, f"{_ALL}/cgroup.procs", self._me)
        self._trees = _hierarchy(place, self.controllers)
        self._home = -1
        self._kept: _Kept | None = None

    def keep(self) -> None:
        """Let nobody else in: everybody may open the descriptors of gVisor's PID 1, by its /proc.

        Precondition: we have become who we stay, the guest's root. What was made before is the guest's own
        until then.
        """
        for fd in (self._bound, self._trees):
            os.fchown(fd, 0, 0)
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

    def prepare(self) -> None:
        """What can be done before there is an exec.

        Precondition: that of `keep`. A file that we hold open is one that everybody may try to open,
        so it is none of the hierarchy's root, which are the guest's own.
        """
        os.mkdir(_HOME, dir_fd=self._trees)
        self._home = _procs(self._trees, _HOME)
        self._kept = _Kept(self._trees)

    def enter(self, number: int) -> None:
        """Move to the group of one exec: what we start next is born in it."""
        if self._kept is not None and not self._kept.number:
            self._kept.number = number
            os.pwrite(self._kept.members, self._me, 0)
            return
        try:
            os.mkdir(str(number), dir_fd=self._trees)
        except FileExistsError:
            pass
        self._write(self._trees, f"{number}/cgroup.procs", self._me)

    def leave(self) -> None:
        """Move back to where no exec is, and no limit."""
        os.pwrite(self._home, self._me, 0)

    def members(self, number: int) -> list[int]:
        """The processes of one exec that have not ended."""
        try:
            found = self._read(self._trees, f"{self._name(number)}/cgroup.procs")
        except FileNotFoundError:
            return []
        return [int(pid) for pid in found.split()]

    def cpu_ns(self, number: int) -> tuple[int, int]:
        """Time that one exec's processes, living and ended, have used: in user mode, in the kernel."""
        if self._kept is not None and self._kept.number == number:
            return self._kept.used()
        user = self._read(self._trees, f"{number}/cpuacct.usage_user")
        return int(user), int(self._read(self._trees, f"{number}/cpuacct.usage_sys"))

    def lacked_memory(self, number: int) -> bool:
        """Whether one exec's processes were killed for it: gVisor's kernel kills none."""
        del number
        return False

    def remove(self, number: int) -> bool:
        """Forget an exec; false while it has members."""
        if self._kept is not None and self._kept.number == number:
            return self._kept.release()
        try:
            os.rmdir(str(number), dir_fd=self._trees)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def _name(self, number: int) -> str:
        return _KEPT if self._kept is not None and self._kept.number == number else str(number)

    def _read(self, base: int, name: str) -> bytes:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=base)
        try:
            pieces = []
            while piece := os.read(fd, _PIECE):
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
    keeps_one = (
        False  # it counts for each whom the kernel has killed; and a call costs next to nothing
    )

    def __init__(self, place: str) -> None:
        super().__init__(place, 0)
        os.mkdir(_ALL, dir_fd=self._trees)
        self._top = self._trees
        self._trees = os.open(_ALL, _DIRECTORY, dir_fd=self._top)

    def prepare(self) -> None:
        """No group is kept: it counts for each whom the kernel has killed, and calls cost little."""
        self._home = _procs(self._top, ".")

    def limit(self, pids: int, memory_bytes: int) -> None:
        """From now on there are so many processes, ours not counted, and they have so much memory.

        Args:
            memory_bytes: What all execs may use together, files in the guest's root included.
        """
        self._write(self._bound, f"{_ALL}/pids.max", pids + 1)
        self._write(self._trees, "memory.limit_in_bytes", memory_bytes)

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


def _procs(trees: int, group: str) -> int:
    """The file by which one reads who is in a group, and joins it."""
    return os.open(f"{group}/cgroup.procs", os.O_RDWR | os.O_CLOEXEC, dir_fd=trees)


def _hierarchy(place: str, controllers: str) -> int:
    """Mount a hierarchy, take hold of it, and let its name go."""
    mounts.mount("none", place, "cgroup", 0, controllers)
    fd = os.open(place, _DIRECTORY)
    mounts.umount2(place, mounts.MNT_DETACH)
    return fd
