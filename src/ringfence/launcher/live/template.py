"""A process that has the memory of a source and runs `steps.CODE` alone: each copy is a clone of it.

Its pages are real private memory, which the kernel shares with the copies until one of them writes. It
has the host's rights, so it is not dumpable, never runs a byte of the source's, and ends with its socket.
"""

from __future__ import annotations

import _signal as signal
import _struct as struct
import fcntl
import posix as os

from ...linux import cdata, libc, mappings, privileges, tracing
from .. import wire
from . import steps
from .sockets import CannotCopy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .source import Mapping, Source
    from .tree import Tree

_PAGE = steps.PAGE
SPAN = 8 << 20  # of memory that neither we nor the source use: code, steps, and the messages
_DATA_AT, _MESSAGE_AT, _KERNEL_AT = 2 * _PAGE, 4 << 20, (8 << 20) - (1 << 18)
MESSAGE_BYTES = 7 << 19  # up to the kernel's own mappings, nearly
# A message begins with what recvmsg(2) needs for the next one; then come pages that hold secrets of a
# copy's sandbox, which it unmaps before it runs on; and its steps.
_HEADER_BYTES, SECRET_BYTES = _PAGE, 16 * _PAGE
_CONTROL_AT, _CONTROL_BYTES, _VECTOR_AT, _TEXT_AT = 128, 1024, 64, 2048
_TASK_END = tracing.TASK_END
# arch/x86/include/generated/uapi/asm/unistd_64.h
_MMAP, _MPROTECT, _MUNMAP, _MREMAP, _MADVISE, _PREAD = 9, 10, 11, 25, 28, 17
_WRITE, _RECVMSG, _WAIT4, _UMASK, _CLONE3, _SIGACTION = 1, 47, 61, 95, 435, 13
CLOSE_RANGE = 436
# include/uapi/asm-generic/mman-common.h
_SHARED, _PRIVATE, _FIXED, _ANONYMOUS, _GROWS_DOWN, _NORESERVE = 1, 2, 0x10, 0x20, 0x100, 0x4000
_MOVE = 1 | 2  # MREMAP_MAYMOVE | MREMAP_FIXED
_HUGE, _WIPE_ON_FORK, _HUGE_BYTES, _TABLE_BYTES = 14, 18, 4 << 20, 2 << 20
_NOBODY = (1 << 64) - 1
_CLONE_VM, _CLONE_VFORK, _WALL = 0x100, 0x4000, 0x40000000
_RSEQ_SIGNATURE = 0x53053053
_READY = b"R"
_LEAST = 63  # as many descriptors may come with one message


class Template:
    """A template, seen from who made it.

    Attributes:
        socket: Where it takes messages; closing it ends the template.
        first: Lowest descriptor that no copy has for its own use.
        shared: A page that the processes of one copy share.
        end: Of the span that no process uses.
        objects: Where the content of all shared memory and removed files is.
        places: By process but the first: where its mappings are until it moves them, the last end there.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.first = (
            max([_LEAST, *(max(each.descriptors, default=0) for each in tree.processes)]) + 1
        )
        self.places: dict[Source, tuple[list[int], int]] = {}
        size = SPAN
        for source in tree.processes[1:]:
            size = self._place(source, size)
        self.objects, size = size, size + tree.objects.size
        taken = [each for source in tree.processes for each in source.mappings]
        self.base = _hole([*_own_mappings(), *((each.start, each.end) for each in taken)], size)
        for source in tree.processes:
            source.look_at_copy()
        for source, (places, end) in self.places.items():
            self.places[source] = [self.base + each for each in places], self.base + end
        self.objects += self.base
        self.shared, self.end = self.base + _PAGE, self.base + size
        self.message = self.base + _MESSAGE_AT
        self.secrets = self.message + _HEADER_BYTES
        self.program = self.secrets + SECRET_BYTES
        self.socket, self.pid = self._start()

    def _place(self, source: Source, at: int) -> int:
        """Lay its memory out from `at` on, page tables like where it was, and its stack's way to grow."""
        places = []
        for mapping in source.mappings:
            if not mapping.is_of_kernel:
                at += (mapping.start - at) % _TABLE_BYTES
                places.append(at)
                at += mapping.end - mapping.start
        self.places[source] = places, at
        return at

    def close(self) -> None:
        self.socket.close()
        os.waitpid(self.pid, 0)

    def send(self, secrets: bytes, program: bytes, fds: list[int]) -> None:
        """Have it make a copy, whose steps report on a socket among `fds`.

        Args:
            fds: Numbered from 1 in the copy's first steps.
        """
        content = self._header().ljust(_HEADER_BYTES, b"\0") + secrets.ljust(SECRET_BYTES, b"\0")
        if len(secrets) > SECRET_BYTES or len(content) + len(program) > MESSAGE_BYTES:
            raise CannotCopy("it has too many files, threads or mappings")
        memfd = os.memfd_create("copy", os.MFD_CLOEXEC)
        try:
            with open(memfd, "wb", closefd=False) as file:
                file.write(content)
                file.write(program)
            wire.send_raw(self.socket, b"C", [memfd, *fds])
        finally:
            os.close(memfd)

    def _header(self) -> bytes:
        """struct msghdr, its vector, and room for descriptors: recvmsg(2) changes the first each time."""
        at = self.message
        header = struct.pack(
            "=QQQQQQQ", 0, 0, at + _VECTOR_AT, 1, at + _CONTROL_AT, _CONTROL_BYTES, 0
        )
        return header.ljust(_VECTOR_AT, b"\0") + struct.pack("=QQ", at + _TEXT_AT, 16)

    # -- making it ------------------------------------------------------------------------------

    def _start(self) -> tuple[wire.Socket, int]:
        program = self._program()
        ours, theirs = wire.socketpair()
        memories = [
            os.open(f"/proc/{each.child}/mem", os.O_RDONLY | os.O_CLOEXEC)
            for each in self.tree.processes
        ]
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                self._become(program, theirs.fileno(), memories)
            finally:
                os._exit(96)
        theirs.close()
        for fd in memories:
            os.close(fd)
        answer = ours.recv(steps.STEP_BYTES)
        if answer != _READY:
            ours.close()
            os.waitpid(pid, 0)
            if len(answer) == steps.STEP_BYTES:
                raise steps.failure(answer)
            raise OSError(12, "the template ended")
        return ours, pid

    def _become(self, program: bytes, control: int, memories: list[int]) -> None:
        """In the template: put descriptors in place, and let go of all that is ours. Never returns."""
        privileges.die_with_parent(signal.SIGKILL)
        libc.block_every_signal()
        objects = self.tree.objects
        wanted = [control, *memories, *self._files(), *[objects.content] * bool(objects.size)]
        # First out of the way: a number that is to be filled may be one of those still to be moved.
        above = self.first + len(wanted)
        parked = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in wanted]
        for place, fd in enumerate(parked, self.first):
            os.dup2(fd, place, False)
        _unregister_sequence()
        code = mappings.map_at(self.base, _PAGE, steps.CODE, executable=True)
        mappings.map_at(self.base + _DATA_AT, _whole(len(program)), program)
        mappings.map_at(self.message, MESSAGE_BYTES, self._header())
        # From here on nobody inside, who may have our uid, looks into it or one of its copies.
        privileges.prctl(privileges.PR_SET_DUMPABLE, 0)
        enter = cdata.function_at(code, cdata.c_long, cdata.c_ulong, cdata.c_ulong)
        enter(self.base + _DATA_AT, self.first)

    def _files(self) -> list[int]:
        found = {each.file for source in self.tree.processes for each in source.mappings}
        return sorted(fd for fd in found if fd >= 0)

    def _program(self) -> bytes:
        """Steps of the template: first the memory, then one message after the other."""
        control, memory, root = self.first, self.first + 1, self.tree.root
        first_file = memory + len(self.tree.processes)
        files = {fd: first_file + i for i, fd in enumerate(self._files())}
        program = steps.Steps(self.base + _DATA_AT)
        program.begin("memory")
        self._move_kernels_own(program)
        for number, source in enumerate(self.tree.processes, memory):
            pages = _Pages(source.runs)
            mappings = [each for each in source.mappings if not each.is_of_kernel]
            places = self.places[source][0] if source in self.places else None
            for i, mapping in enumerate(mappings):
                place = places[i] if places else mapping.start
                if not mapping.is_object:
                    _map(program, mapping, place, pages, files, number)
        if size := self.tree.objects.size:
            flags, number = _PRIVATE | _FIXED | _ANONYMOUS, first_file + len(files)
            program.exactly(self.objects, _MMAP, self.objects, size, 3, flags, _NOBODY, 0)
            program.exactly(size, _PREAD, number, self.objects, size, 0)
        set_actions(program, root)
        program.exactly(1, _WRITE, control, program.put(_READY), 1)
        program.add(CLOSE_RANGE, 0, control - 1)
        program.add(CLOSE_RANGE, control + 1, 0xFFFFFFFF)
        program.add(steps.JUMP, steps.Label("messages"))
        program.begin("messages")
        program.add(_RECVMSG, control, self.message, wire.MSG_CMSG_CLOEXEC, expect=steps.SOME)
        program.add(_PREAD, 0, self.message, MESSAGE_BYTES, 0, expect=steps.SOME)
        clone = program.put(struct.pack("=11Q", _CLONE_VM | _CLONE_VFORK, *[0] * 10))
        program.add(_CLONE3, clone, 88, expect=steps.BRANCH, value=self.program)
        program.add(_WAIT4, _NOBODY, 0, _WALL, 0, expect=steps.ANYTHING)
        program.add(CLOSE_RANGE, 0, control - 1)
        program.add(steps.JUMP, steps.Label("messages"))
        content = program.content()
        if len(content) > _MESSAGE_AT - _DATA_AT:
            raise CannotCopy("it has too many mappings")
        return content

    def _move_kernels_own(self, program: steps.Steps) -> None:
        """Unmap everything, and move vvar and vdso to where the source has them."""
        ours = kernels_own(_read_own())
        last = ours[-1]
        content = libc.bytes_at(last.start, last.size)
        for source in self.tree.processes:
            theirs = kernels_own(source.mappings)
            sizes = [each.size for each in theirs]
            if [each.size for each in ours] != sizes or content != source.vdso:
                raise CannotCopy("its vdso is another one than ours")
        move_kernels_own(
            program,
            self.base,
            ours,
            kernels_own(self.tree.root.mappings),
            (self.base, self.base + SPAN),
        )


def set_actions(program: steps.Steps, source: Source) -> None:
    """Take the signal handlers and the umask of a source: what its children inherit."""
    default = program.put(bytes(32))
    for number in range(1, 65):
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            action = source.actions.get(number)
            program.add(_SIGACTION, number, program.put(action) if action else default, 0, 8)
    program.add(_UMASK, source.umask)


def move_kernels_own(
    program: steps.Steps,
    base: int,
    ours: list[Mapping],
    theirs: list[Mapping],
    *spared: tuple[int, int],
) -> None:
    """Unmap all but some ranges, and move vvar and vdso from where they are to where another process has them.

    Args:
        spared: In order of address, beginning with the template's own at `base`.
    """
    aside = base + _KERNEL_AT - ours[0].start
    for each in ours:
        place = each.start + aside
        program.exactly(place, _MREMAP, each.start, each.size, each.size, _MOVE, place)
    at = 0x10000
    for start, end in spared:
        if at < start:
            program.add(_MUNMAP, at, start - at)
        at = end
    program.add(_MUNMAP, at, _TASK_END - at)
    for each, there in zip(ours, theirs, strict=True):
        place = each.start + aside
        program.exactly(there.start, _MREMAP, place, each.size, each.size, _MOVE, there.start)


class _Pages:
    """Runs of pages of its own, taken in order of address."""

    def __init__(self, runs: list[tuple[int, int]]) -> None:
        self._runs, self._next = list(runs), 0

    def within(self, mapping: Mapping) -> list[tuple[int, int]]:
        found = []
        while self._next < len(self._runs) and self._runs[self._next][0] < mapping.end:
            start, end = self._runs[self._next]
            if end > mapping.end:
                self._runs[self._next] = (mapping.end, end)
            else:
                self._next += 1
            if end > mapping.start:
                found.append((max(start, mapping.start), min(end, mapping.end)))
        return found


def _map(
    program: steps.Steps,
    mapping: Mapping,
    place: int,
    pages: _Pages,
    files: dict[int, int],
    memory: int,
) -> None:
    runs = pages.within(mapping)
    length = mapping.end - mapping.start
    if mapping.inode and mapping.file < 0 and mapping.rights & 1:
        runs = [(mapping.start, mapping.start + mapping.size)] if mapping.size else []
    rights = mapping.rights | (2 if runs else 0)
    if mapping.file >= 0:
        flags = (_SHARED if mapping.is_shared else _PRIVATE) | _FIXED
        fd, offset = files[mapping.file], mapping.offset
    else:
        flags, fd, offset = _PRIVATE | _FIXED | _ANONYMOUS | _NORESERVE, _NOBODY, 0
        if mapping.name == b"[stack]":
            flags |= _GROWS_DOWN
    program.exactly(place, _MMAP, place, length, rights, flags, fd, offset)
    is_heap = mapping.file < 0 and rights & 2 and mapping.name != b"[stack]"
    if is_heap and sum(end - start for start, end in runs) * 2 > length >= _HUGE_BYTES:
        # Fewer page tables to copy each time.
        program.add(_MADVISE, place, length, _HUGE, expect=steps.ANYTHING)
    for start, end in runs:
        while start < end:
            piece = min(end - start, 1 << 30)
            program.exactly(piece, _PREAD, memory, start + place - mapping.start, piece, start)
            start += piece
    if mapping.is_wiped:
        program.add(_MADVISE, place, length, _WIPE_ON_FORK)
    if rights != mapping.rights:
        program.add(_MPROTECT, place, length, mapping.rights)


def _read_own() -> list[Mapping]:
    from .source import Mapping

    with open("/proc/self/maps", "rb") as file:
        return [Mapping(line) for line in file]


def _own_mappings() -> list[tuple[int, int]]:
    return [(each.start, each.end) for each in _read_own()]


def kernels_own(mappings: list[Mapping]) -> list[Mapping]:
    """Return those of vvar and vdso, in order of address."""
    return [each for each in mappings if each.is_of_kernel and each.name != b"[vsyscall]"]


def _hole(taken: list[tuple[int, int]], size: int) -> int:
    """The start of memory that is free in all processes."""
    at = _TABLE_BYTES
    for start, end in sorted(taken):
        if start - at >= size:
            return at
        at = max(at, (end + _TABLE_BYTES - 1) & -_TABLE_BYTES)
    raise CannotCopy("it has no room for us in its address space")


def _whole(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _unregister_sequence() -> None:
    """The C library's memory, which the kernel would write to, goes away: rseq(2)."""
    try:
        offset, size = libc.word_of("__rseq_offset", 8), libc.word_of("__rseq_size", 4)
    except OSError:
        return  # glibc before 2.35
    if size:
        libc.unregister_sequence(offset, _RSEQ_SIGNATURE)
