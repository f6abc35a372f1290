"""Steps that give the processes of a copy their open files."""

from __future__ import annotations

import _struct as struct
import fcntl
import posix as os

from . import steps
from .descriptors import VOLATILE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .descriptors import Descriptor, Lock, Timer
    from .sockets import Server
    from .source import Source
    from .tree import Tree

# arch/x86/include/generated/uapi/asm/unistd_64.h
_WRITE, _OPEN, _CLOSE, _LSEEK, _FCNTL, _DUP3, _PIPE2 = 1, 2, 3, 8, 72, 292, 293
_SOCKET, _BIND, _LISTEN, _SOCKETPAIR, _SETSOCKOPT = 41, 49, 50, 53, 54
_MMAP, _EPOLL_CTL, _EVENTFD, _EPOLL_CREATE, _MEMFD_CREATE = 9, 233, 290, 291, 319
_SHARED_FIXED = 1 | 0x10  # mmap(2)
_IOCTL, _FLOCK, _TIMERFD_CREATE, _TIMERFD_SETTIME = 16, 73, 283, 286
_F_SETFL = 4
_SET_TICKS = 0x40085400  # include/uapi/linux/timerfd.h, TFD_IOC_SET_TICKS
_CLOEXEC, _STATUS = os.O_CLOEXEC, os.O_APPEND | os.O_NONBLOCK
_NEVER_AGAIN = os.O_CREAT | os.O_EXCL | os.O_TRUNC | os.O_NOCTTY | os.O_CLOEXEC


class OpenFiles:
    """Open files of a copy, and where the first process has those of all.

    Args:
        streams: Descriptors that came with the copy, for those of its exec.
        contents: Address of what is in shared memory and removed files.
        free: The lowest number that no process has for its own use, nor anything that came.
    """

    def __init__(
        self, program: steps.Steps, tree: Tree, streams: list[int], contents: int, free: int
    ) -> None:
        self.steps, self.tree, self.stream, self.free = program, tree, streams, free
        self.contents = contents
        self.objects: dict[tuple[int, int], int] = {}
        self.ends: dict[int, tuple[int, int]] = {}  # of pipes and pairs, by inode
        self.shared: list[int] = []  # numbers of open files that several processes have
        self.used: set[int] = set()

    def connect(self) -> None:
        """Make the pipes and pairs of sockets of all processes, with what is in them."""
        for inode, content in self.tree.pipes.items():
            self.steps.add(_PIPE2, self.steps.put(bytes(8)), 0)
            self.ends[inode] = self._park_two()
            if content:
                at = self.steps.put(content)
                self.steps.exactly(len(content), _WRITE, self.ends[inode][1], at, len(content))
        for key, (place, size) in self.tree.objects.places.items():
            if key in self.tree.objects.paths:
                continue
            self.steps.exactly(0, _MEMFD_CREATE, self.steps.text("shared"), os.MFD_CLOEXEC)
            if size:
                self.steps.exactly(size, _WRITE, 0, self.contents + place, size)
            self.objects[key] = self._park()
        for kind, one, other in self.tree.pairs:
            self.steps.add(_SOCKETPAIR, 1, kind, 0, self.steps.put(bytes(8)))
            self.ends[one] = self._park_two()
            self.ends[other] = self.ends[one][::-1]

    def open_shared(self) -> None:
        """Open what several processes have, or map. Precondition: capabilities are not in effect."""
        objects = self.tree.objects
        for key, path in objects.paths.items():
            place, size = objects.places[key]
            # Another exec that has it too may have been copied before: from the same moment.
            flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if path.startswith(VOLATILE) else 0)
            self.steps.exactly(0, _OPEN, self.steps.text(path), flags, 0o600)
            if size:
                self.steps.exactly(size, _WRITE, 0, self.contents + place, size)
            self.objects[key] = self._park()
        for each in self.tree.shared:
            self._make(0, each)
            self.shared.append(self._park())

    def _park(self) -> int:
        """Move a new descriptor, of the lowest number, out of the way."""
        there = self.free
        self.steps.exactly(there, _DUP3, 0, there, _CLOEXEC)
        self.steps.add(_CLOSE, 0)
        self.free += 1
        return there

    def map_objects(self, source: Source) -> None:
        """Map the shared memory that it has."""
        for each in source.mappings:
            if each.is_object:
                fd, length = self.objects[each.key], each.end - each.start
                words = length, each.rights, _SHARED_FIXED, fd, each.offset
                self.steps.exactly(each.start, _MMAP, each.start, *words)

    def open(self, source: Source) -> None:
        """Under the sandbox's own rules already: a name that leads elsewhere leads a program nowhere."""
        self.used = set()
        for number, each in sorted(source.descriptors.items()):
            self._place(number, each)
            self.used.add(number)
        for number, each in source.descriptors.items():
            is_first = each.shared < 0 or each is self.tree.shared[each.shared]
            for watched, events, data in each.watched if each.same_as < 0 and is_first else ():
                event = self.steps.put(struct.pack("=IQ", events, data))
                self.steps.add(_EPOLL_CTL, number, 1, watched, event)

    def lock(self, source: Source) -> None:
        """Take the locks of the process, which go once it closes any descriptor of the file."""
        for number, each in source.descriptors.items():
            for lock in each.locks if each.same_as < 0 else ():
                if lock.kind == "POSIX":
                    self._lock(number, lock)

    def _park_two(self) -> tuple[int, int]:
        """Move two new descriptors, of the lowest numbers, out of the way."""
        there = self.free, self.free + 1
        for fd, place in zip(self._lowest(2), there, strict=True):
            self.steps.exactly(place, _DUP3, fd, place, _CLOEXEC)
            self.steps.add(_CLOSE, fd)
        self.free += 2
        return there

    def _place(self, number: int, each: Descriptor) -> None:
        on_exec = each.flags & _CLOEXEC
        if each.same_as >= 0 or each.shared >= 0:
            there = each.same_as if each.same_as >= 0 else self.shared[each.shared]
            self.steps.exactly(number, _DUP3, there, number, on_exec)
            return
        if each.kind in ("given", "pipe", "socket"):
            if each.kind == "given":
                there = self.stream[each.given]
            else:  # a socket is open for both
                there = self.ends[each.pipe][(each.flags & 3) == os.O_WRONLY]
            self.steps.exactly(number, _DUP3, there, number, on_exec)
            if status := each.flags & _STATUS:
                self.steps.add(_FCNTL, number, _F_SETFL, status)
            return
        (low,) = self._lowest(1)
        self._make(low, each)
        if low != number:
            self.steps.exactly(number, _DUP3, low, number, on_exec)
            self.steps.add(_CLOSE, low)
        elif on_exec:
            self.steps.add(_FCNTL, number, 2, 1)  # F_SETFD, FD_CLOEXEC

    def _make(self, low: int, each: Descriptor) -> None:
        """Open it anew, under the number that the kernel gives next."""
        status = each.flags & _STATUS
        if each.kind == "event":
            flags = status & os.O_NONBLOCK | each.is_semaphore
            self.steps.exactly(low, _EVENTFD, each.count, flags)
        elif each.server is not None:
            self._listen(low, each.server, status & os.O_NONBLOCK)
        elif each.kind == "epoll":
            self.steps.exactly(low, _EPOLL_CREATE, 0)
        elif each.timer is not None:
            self._start_timer(low, each.timer, status & os.O_NONBLOCK)
        else:
            flags, path = each.flags & ~_NEVER_AGAIN, each.path
            if each.removed is not None:
                path = f"/proc/self/fd/{self.objects[each.removed]}"
            self.steps.exactly(low, _OPEN, self.steps.text(path), flags, 0)
            if each.position:
                self.steps.exactly(each.position, _LSEEK, low, each.position, 0)
            for lock in each.locks:
                if lock.kind != "POSIX":
                    self._lock(low, lock)

    def _lock(self, number: int, lock: Lock) -> None:
        """Take it without waiting: in a directory of the host, the source has it."""
        if lock.kind == "FLOCK":
            kind = fcntl.LOCK_EX if lock.is_exclusive else fcntl.LOCK_SH
            self.steps.add(_FLOCK, number, kind | fcntl.LOCK_NB)
            return
        kind = fcntl.F_WRLCK if lock.is_exclusive else fcntl.F_RDLCK
        words = struct.pack("=hh4xqqi4x", kind, 0, lock.start, lock.length, 0)
        self.steps.add(_FCNTL, number, fcntl.F_SETLK, self.steps.put(words))

    def _start_timer(self, low: int, timer: Timer, flags: int) -> None:
        self.steps.exactly(low, _TIMERFD_CREATE, timer.clock, flags)
        value = timer.value if any(timer.value) or not timer.ticks else (0, 1)
        if any(value):
            words = self.steps.put(struct.pack("=4Q", *timer.interval, *value))
            self.steps.add(_TIMERFD_SETTIME, low, 0, words, 0)
        if timer.ticks and any(timer.interval):
            ticks = self.steps.put(struct.pack("=Q", timer.ticks))
            self.steps.add(_IOCTL, low, _SET_TICKS, ticks, expect=steps.ANYTHING)

    def _listen(self, number: int, server: Server, status: int) -> None:
        self.steps.exactly(number, _SOCKET, server.family, 1 | status, 0)
        for level, name, value in server.options:
            at = self.steps.put(struct.pack("=I", value))
            self.steps.add(_SETSOCKOPT, number, level, name, at, 4)
        address = self.steps.put(server.address)
        self.steps.add(_BIND, number, address, len(server.address))
        self.steps.add(_LISTEN, number, server.backlog)

    def _lowest(self, count: int) -> list[int]:
        """The numbers that the kernel gives next."""
        found = [n for n in range(len(self.used) + count) if n not in self.used]
        return found[:count]
