"""Cgroups of the guest's own kernel: which process belongs to which exec, and how many there may be.

gVisor's cgroups are version 1, in its memory only. They are mounted for a moment and then reached
by descriptor alone. Root of a guest that has gVisor's capabilities can find them.
"""

from __future__ import annotations

import errno
import os
import resource

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
        names = ("cpuacct.usage_user", "cpuacct.usage_sys")
        self._usage = [_open(trees, f"{_KEPT}/{name}") for name in names]
        self._count = _open(trees, f"{_KEPT}/pids.current")
        self.members = _open(trees, f"{_KEPT}/cgroup.procs", os.O_RDWR)
        self.number = 0  # of the exec that has it; 0: none
        self._before = 0, 0

    def used(self) -> tuple[int, int]:
        """Return the exec's processor time (user, system), in ns."""
        user, system = self._all_used()
        return user - self._before[0], system - self._before[1]

    def count(self) -> int:
        return int(os.pread(self._count, _WORD, 0))

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
    """Cgroup hierarchy that separates execs and bounds the processes of each.

    It is a single one because gVisor charges a new process to one of its parent's cgroups,
    whichever comes first in a map (`chargeLocked` of pkg/sentry/kernel/task_cgroup.go): with a
    second hierarchy without `pids`, every other fork passed the limit, and gVisor ended with the
    sandbox when the host refused it threads. Groups below do not inherit limits either;
    RLIMIT_NPROC bounds all execs together.

    Args:
        place: An empty directory that only we can reach.
        pids: Most processes, ours not counted.
    """

    is_alone = True  # every process that it may signal is the guest's
    controllers = "cpuacct,memory,pids"

    def __init__(self, place: str, pids: int) -> None:
        self._me = b"%d" % os.getpid()
        self._pids = pids
        self._trees = _hierarchy(place, self.controllers)
        self._home = self._at_home = -1
        self._kept: _Kept | None = None
        self._others: set[int] = set()  # numbers of execs with a group of their own

    def keep(self) -> None:
        """Let nobody else in: everybody may open the descriptors of gVisor's PID 1, by its /proc.

        Precondition: we have become who we stay, the guest's root. What was made before is the guest's own
        until then.
        """
        os.fchown(self._trees, 0, 0)
        os.fchmod(self._trees, 0o700)

    def count(self) -> int:
        """How many processes there are now, without us."""
        found = int(os.pread(self._at_home, _WORD, 0)) - 1
        if self._kept is not None:
            found += self._kept.count()
        return found + sum(int(self._read(self._trees, f"{n}/pids.current")) for n in self._others)

    def most(self) -> int:
        """How many there may be, without us."""
        return min(self._pids, resource.getrlimit(resource.RLIMIT_NPROC)[1])

    def memory_bytes(self) -> int:
        """Read the memory use of all execs together, files in the guest's memory included."""
        return int(self._read(self._trees, "memory.usage_in_bytes"))

    def own_bytes(self) -> int:
        """Return the same: nothing that is shared counts twice here."""
        return self.memory_bytes()

    def prepare(self) -> None:
        """Prepare before the first exec.

        Precondition: that of `keep`. Any program may try to open a file that we hold open, so none
        of them is in the hierarchy's root, whose files are the guest's own.
        """
        os.mkdir(_HOME, dir_fd=self._trees)
        self._home = _open(self._trees, f"{_HOME}/cgroup.procs", os.O_RDWR)
        self._at_home = _open(self._trees, f"{_HOME}/pids.current")
        self.leave()
        self._kept = _Kept(self._trees)
        self._bound(_KEPT)

    def enter(self, number: int) -> None:
        """Move to the group of one exec: what we start next is born in it.

        Raises:
            BlockingIOError: There are as many processes as there may be, of other execs.
        """
        is_kept_free = self._kept is not None and not self._kept.number
        if (self._others or not is_kept_free) and self.count() >= self._pids:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        if self._kept is not None and is_kept_free:
            self._kept.number = number
            os.pwrite(self._kept.members, self._me, 0)
            return
        if number not in self._others:
            os.mkdir(str(number), dir_fd=self._trees)
            self._others.add(number)
            self._bound(str(number))
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
        """Return False: gVisor's kernel kills no process for memory."""
        del number
        return False

    def remove(self, number: int) -> bool:
        """Forget an exec; false while it has members."""
        if self._kept is not None and self._kept.number == number:
            return self._kept.release()
        try:
            os.rmdir(str(number), dir_fd=self._trees)
        except FileNotFoundError:
            pass
        except OSError:
            return False
        self._others.discard(number)
        return True

    def _bound(self, group: str) -> None:
        """Let a group have so many processes; two, where that is one: we are in it while we start the first."""
        self._write(self._trees, f"{group}/pids.max", max(self._pids, 2))

    def _name(self, number: int) -> str:
        return _KEPT if self._kept is not None and self._kept.number == number else str(number)

    def _read(self, base: int, name: str) -> bytes:
        fd = _open(base, name)
        try:
            pieces = []
            while piece := os.read(fd, _PIECE):
                pieces.append(piece)
            return b"".join(pieces)
        finally:
            os.close(fd)

    def _write(self, base: int, name: str, value: int | bytes) -> None:
        fd = _open(base, name, os.O_WRONLY)
        try:
            os.write(fd, value if isinstance(value, bytes) else b"%d" % value)
        finally:
            os.close(fd)


class MachineGroups(Groups):
    """The same of a Linux of the guest's own, where limits hold for all execs together."""

    controllers = "cpuacct,memory,freezer"

    def __init__(self, place: str) -> None:
        self._bound_all = _hierarchy(place, "pids")
        super().__init__(place, 0)
        for base in (self._bound_all, self._trees):
            os.mkdir(_ALL, dir_fd=base)
        self._write(self._bound_all, f"{_ALL}/cgroup.procs", self._me)
        self._top = self._trees
        self._trees = _open(self._top, _ALL, os.O_DIRECTORY)

    def count(self) -> int:
        return int(self._read(self._bound_all, f"{_ALL}/pids.current")) - 1

    def most(self) -> int:
        return int(self._read(self._bound_all, f"{_ALL}/pids.max")) - 1

    def prepare(self) -> None:
        """No group is kept: it counts for each whom the kernel has killed, and calls cost little."""
        self._home = _open(self._top, "cgroup.procs", os.O_RDWR)

    def enter(self, number: int) -> None:
        try:
            os.mkdir(str(number), dir_fd=self._trees)
        except FileExistsError:
            pass
        self._write(self._trees, f"{number}/cgroup.procs", self._me)

    def limit(self, pids: int, memory_bytes: int) -> None:
        """From now on there are so many processes, ours not counted, and they have so much memory.

        Args:
            memory_bytes: What all execs may use together, files in the guest's root included.
        """
        self._write(self._bound_all, f"{_ALL}/pids.max", pids + 1)
        self._write(self._trees, "memory.limit_in_bytes", memory_bytes)

    def freeze(self, frozen: bool) -> None:
        """Let all that execs have started stand still, or go on; returns when it does."""
        wanted = b"FROZEN" if frozen else b"THAWED"
        while self._read(self._trees, "freezer.state").strip() != wanted:
            self._write(self._trees, "freezer.state", wanted)

    def lacked_memory(self, number: int) -> bool:
        """Return whether the guest's kernel killed a process of the exec for memory."""
        try:
            lines = self._read(self._trees, f"{number}/memory.oom_control").splitlines()
        except FileNotFoundError:
            return False
        return any(line.startswith(b"oom_kill ") and int(line.split()[1]) for line in lines)


def _open(base: int, name: str, flags: int = os.O_RDONLY) -> int:
    return os.open(name, flags | os.O_CLOEXEC, dir_fd=base)


def _hierarchy(place: str, controllers: str) -> int:
    """Mount a hierarchy, take hold of it, and let its name go."""
    mounts.mount("none", place, "cgroup", 0, controllers)
    fd = os.open(place, _DIRECTORY)
    mounts.umount2(place, mounts.MNT_DETACH)
    return fd
