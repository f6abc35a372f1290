"""The program of a process image: an ELF file for x86-64 that restores memory and continues there.

It is a table of system calls and some instructions that make them. Large files that were mapped and
never written to are mapped again; all else is read from the program itself into new memory, in few
pieces: where every page that a program touches first costs a stop, that is most of its start.
"""

from __future__ import annotations

import _struct as struct
import errno

_PAGE = 4096
_GAP = 16 * _PAGE
BASE = 0x200000  # below where programs are linked to, above what no program may map
MOST_BYTES = 0x100000  # of a head
_NONE = (1 << 64) - 1
_BRANCH = _NONE - 1  # no system call: where the last one answered 0, go on at the row that is named
# arch/x86/include/generated/uapi/asm/unistd_64.h, arch/x86/include/uapi/asm/prctl.h, mman.h
_OPEN, _CLOSE, _MMAP, _MPROTECT, _PREAD, _ARCH_PRCTL = 2, 3, 9, 10, 17, 158
_READ, _WRITE_TO, _RECVFROM, _FORK, _EXIT, _PIPE2 = 0, 1, 45, 57, 60, 293
_MSG_PEEK = 2
_ARCH_SET_FS = 0x1002
_O_WRONLY = 1
_O_CLOEXEC = 0o2000000
_WRITE = 2
_MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS = 0x02, 0x10, 0x20
_SELF_FD, _FILE_FD = 3, 4  # what open(2) answers in a new process with three descriptors
GO_FD = 4  # with a copy task: its runner waits until something is written there, or nobody can
TASK_BYTES = 128  # of what there is to write, spaces at its end
_HEAP = "[heap]"

_BEFORE_TABLE = bytes.fromhex("49bf")  # mov r15, table
# Do the row at r15, whose number is in rax; then carry is clear if it failed.
CALL_ROW = (
    "498b7f08"  # mov rdi, [r15 + 8]
    "498b7710"  # mov rsi, [r15 + 16]
    "498b5718"  # mov rdx, [r15 + 24]
    "4d8b5720"  # mov r10, [r15 + 32]
    "4d8b4728"  # mov r8, [r15 + 40]
    "4d8b4f30"  # mov r9, [r15 + 48]
    "0f05"  # syscall
    "483d01f0ffff"  # cmp rax, -4095
)
_CALLS = bytes.fromhex(
    "498b07"  # next: mov rax, [r15]
    "4883f8ff"  # cmp rax, -1
    "743e"  # je done
    "4883f8fe"  # cmp rax, -2
    "742b"  # je branch
    f"{CALL_ROW}"
    "7314"  # jae failed
    "4889c3"  # mov rbx, rax
    "4983c738"  # step: add r15, 56
    "ebc6"  # jmp next
    "4885db"  # branch: test rbx, rbx
    "75f5"  # jne step
    "4d8b7f08"  # mov r15, [r15 + 8]
    "ebbb"  # jmp next
    "0f0b"  # failed: ud2
)  # done:
# mov REGISTER, value; rcx is the kernel's at every system call, and so ours to jump by.
_MOVES = {
    name: bytes.fromhex(move)
    for name, move in (
        *(("rax", "48b8"), ("rbx", "48bb"), ("rdx", "48ba"), ("rsi", "48be"), ("rdi", "48bf")),
        *(("rbp", "48bd"), ("rsp", "48bc"), ("r8", "49b8"), ("r9", "49b9"), ("r10", "49ba")),
        *(("r12", "49bc"), ("r13", "49bd"), ("r14", "49be"), ("r15", "49bf")),
    )
}
_MOVE_RCX, _JUMP_RCX = bytes.fromhex("48b9"), bytes.fromhex("ffe1")
_EHDR, _PHDR = "<16sHHIQQQIHHHHHH", "<IIQQQQQQ"
_BEGIN = struct.calcsize(_EHDR) + 3 * struct.calcsize(_PHDR)
_CALL = "<7Q"
ROW_BYTES = struct.calcsize(_CALL)
_ET_EXEC, _EM_X86_64 = 2, 62  # elf.h
_PT_LOAD, _PT_GNU_STACK = 1, 0x6474E551
_X, _W, _R = 1, 2, 4
_NEVER_WRITTEN = {1, 5}  # PROT_READ, and with PROT_EXEC, as a region's rights


class Region:
    """A piece of a process's memory.

    Args:
        rights: Of PROT_*, as mmap(2) has them.
        name: As proc_pid_maps(5) has it: a path, or what it is for.
        offset: In that file.

    Attributes:
        is_own: Whether there is more in it than in that file.
        content: What is in it, zeros at its end left out; of what is its own alone.
        pieces: Of what is kept of that: where there, the address, and bytes.
        room: Bytes that it may grow to, downwards.
        parts: (start, end, rights) of those that it was joined of, where they are not its own.
    """

    def __init__(self, start: int, end: int, rights: int, name: str, offset: int) -> None:
        self.start, self.end, self.rights = start, end, rights
        self.name, self.offset = name, offset
        self.is_own = False
        self.content, self.room = b"", end - start
        self.pieces: list[tuple[int, int, int]] = []
        self.parts: list[tuple[int, int, int]] = []

    def joins(self, after: Region) -> bool:
        """Return whether both can be filled in one piece: each that cannot costs two calls more."""
        both = self.is_own and after.is_own and _HEAP not in (self.name, after.name)
        return both and self.end == after.start and after.room == after.end - after.start

    def join(self, after: Region) -> None:
        self.parts = self.parts or [(self.start, self.end, self.rights)]
        self.parts.append((after.start, after.end, after.rights))
        if after.content:
            self.content = self.content.ljust(self.end - self.start, b"\0") + after.content
        self.end, self.rights = after.end, self.rights | after.rights
        self.room = self.end - self.start


def joined(regions: list[Region]) -> list[Region]:
    found: list[Region] = []
    for region in regions:
        if found and found[-1].joins(region):
            found[-1].join(region)
        else:
            found.append(region)
    return found


def in_use(content: bytes) -> list[tuple[int, int]]:
    """Start and end of what is more than zeros, in whole pages.

    New memory is zeros already. A gap of less than `_GAP` costs less to read than another call.
    """
    found: list[tuple[int, int]] = []
    for at in range(0, len(content), _PAGE):
        if not any(content[at : at + _PAGE]):
            continue
        if found and at - found[-1][1] < _GAP:
            found[-1] = found[-1][0], at + _PAGE
        else:
            found.append((at, at + _PAGE))
    return found


class CopyTask:
    """Task of a child forked by the process image's program, while there is little memory to copy.

    On a message at `GO_FD` it writes `TASK_BYTES` of one file, read before, into others.
    """

    def __init__(self, source: str, targets: list[str]) -> None:
        self.source, self.targets = source, targets


def head(
    regions: list[Region],
    registers: dict[str, int],
    place: str,
    copy_task: CopyTask | None = None,
    *,
    waits: bool = False,
) -> bytes:
    """Build the pages before the saved memory.

    Args:
        place: Path of the program itself.
        waits: Read none of that memory before there is a message in standard input, a socket; the message
            stays there. So the program may start while its file is still being written.
    """
    heap = next((region for region in regions if region.name == _HEAP), None)
    texts = {place: 0}
    if copy_task:
        texts |= dict.fromkeys((copy_task.source, *copy_task.targets), 0)
    for region in regions:
        if region.name.startswith("/") and not region.is_own:
            texts[region.name] = 0
    size, file_fd = 0, GO_FD + 1 if copy_task else _FILE_FD
    wait: list[tuple[int, ...]] = [(_RECVFROM, 0, _room(heap), 1, _MSG_PEEK)] if waits else []
    # The first pass finds the length, the second uses it for the addresses.
    for _ in range(2):
        calls = _calls(regions, texts, place, size, registers["fs_base"], file_fd, wait)
        table_at = _BEGIN + len(code(0, registers))
        if copy_task:
            calls = _with_copy_task(calls, copy_task, texts, _room(heap), BASE + table_at)
        table = rows_of(calls)
        texts_at = table_at + len(table)
        for text in texts:
            texts[text] = BASE + texts_at
            texts_at += len(_text(text))
        size = whole_pages(texts_at)
    if size > MOST_BYTES or min(region.start for region in regions) < BASE + MOST_BYTES:
        raise OSError(errno.ENOSYS, "the program lies where a process image begins")
    whole = _elf(BASE + _BEGIN, size, heap) + code(BASE + table_at, registers) + table
    return (whole + b"".join(map(_text, texts))).ljust(size, b"\0")


def writing(files: dict[str, bytes]) -> bytes:
    """Another program of the kind: it waits for a byte, or the end, on its standard input, then writes.

    Args:
        files: What to write, in one piece each, into files that are there.
    """
    texts = [_text(path) + content for path, content in files.items()]
    count = 2 + 2 * len(files)
    table_at = _BEGIN + len(_BEFORE_TABLE) + 8 + len(_CALLS)
    at = BASE + table_at + count * ROW_BYTES + 8
    # Data is read to the page after ours: see `_elf`.
    calls: list[tuple[int, ...]] = [(_READ, 0, BASE + _PAGE, 1)]
    for number, (path, content) in enumerate(files.items()):
        calls.append((_OPEN, at, _O_WRONLY))
        at += len(_text(path))
        calls.append((_WRITE_TO, _SELF_FD + number, at, len(content)))
        at += len(content)
    calls.append((_EXIT, 0))
    code = _BEFORE_TABLE + struct.pack("<Q", BASE + table_at) + _CALLS
    program = _elf(BASE + _BEGIN, _PAGE, None) + code + rows_of(calls) + b"".join(texts)
    if len(program) > _PAGE:
        raise OSError(errno.E2BIG, "too much to write")
    return program.ljust(_PAGE, b"\0")


def _text(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape") + b"\0"


def branch(table: int, number: int) -> tuple[int, ...]:
    """No call: where the last one answered 0, go on at the row of that number in the table at an address."""
    return _BRANCH, table + number * ROW_BYTES


def rows_of(calls: list[tuple[int, ...]]) -> bytes:
    """System calls, number first, in `ROW_BYTES` each, and what ends them."""
    rows = (struct.pack(_CALL, *(*call, 0, 0, 0, 0, 0, 0)[:7]) for call in calls)
    return b"".join(rows) + struct.pack("<Q", _NONE)


def code(table: int, registers: dict[str, int]) -> bytes:
    """Make the calls of a table, then go on where a process stood."""
    moves = [move + struct.pack("<Q", registers[name]) for name, move in _MOVES.items()]
    jump = _MOVE_RCX + struct.pack("<Q", registers["rip"]) + _JUMP_RCX
    return _BEFORE_TABLE + struct.pack("<Q", table) + _CALLS + b"".join(moves) + jump


def _room(heap: Region | None) -> int:
    """Where what is read first may lie for a moment: the heap is filled after that."""
    if heap is None or len(heap.content) < 2 * TASK_BYTES:
        raise OSError(errno.ENOSYS, "there is no room to read anything")
    return heap.start


def _with_copy_task(
    calls: list[tuple[int, ...]], copy_task: CopyTask, texts: dict[str, int], room: int, table: int
) -> list[tuple[int, ...]]:
    """Before all else its runner is forked, whose rows lie behind everybody's."""
    read_fd, pipe = _SELF_FD, room + TASK_BYTES
    before: list[tuple[int, ...]] = [
        (_OPEN, texts[copy_task.source], _O_CLOEXEC),
        (_READ, _SELF_FD, room, TASK_BYTES),
        (_CLOSE, _SELF_FD),
        (_PIPE2, pipe, _O_CLOEXEC),
        (_FORK,),
    ]
    runners: list[tuple[int, ...]] = [(_CLOSE, GO_FD), (_READ, read_fd, pipe, 1)]
    for number, target in enumerate(copy_task.targets, GO_FD):
        runners.append((_OPEN, texts[target], _O_WRONLY))
        runners.append((_WRITE_TO, number, room, TASK_BYTES))
    ours: list[tuple[int, ...]] = [(_CLOSE, read_fd), *calls, (_NONE,)]
    runners_at = table + (len(before) + 1 + len(ours)) * ROW_BYTES
    return [*before, (_BRANCH, runners_at), *ours, *runners, (_EXIT, 0)]


def _calls(
    regions: list[Region],
    texts: dict[str, int],
    place: str,
    size: int,
    fs_base: int,
    file_fd: int,
    wait: list[tuple[int, ...]],
) -> list[tuple[int, ...]]:
    calls: list[tuple[int, ...]] = [(_OPEN, texts[place], _O_CLOEXEC)]
    for name in dict.fromkeys(r.name for r in regions if not r.is_own):
        mapped = [r for r in regions if not r.is_own and r.name == name]
        if name not in texts:
            calls += [_mapping(r, r.rights, _MAP_ANONYMOUS, _NONE) for r in mapped]
            continue
        calls.append((_OPEN, texts[name], _O_CLOEXEC))
        calls += [_mapping(r, r.rights, 0, file_fd) for r in mapped]
        calls.append((_CLOSE, file_fd))
    calls += wait
    for region in regions:
        if region.is_own:
            calls += _filling(region, size)
    return [*calls, (_CLOSE, _SELF_FD), (_ARCH_PRCTL, _ARCH_SET_FS, fs_base)]


def _mapping(region: Region, rights: int, flags: int, fd: int) -> tuple[int, ...]:
    start = region.end - max(region.room, region.end - region.start)
    offset = 0 if fd == _NONE else region.offset
    # Nothing is populated: to have pages that are to be filled, or that nobody asks for, costs gVisor
    # more than the stops for those that are found missing: see decision 0116.
    flags |= _MAP_PRIVATE | _MAP_FIXED
    return _MMAP, start, region.end - start, rights, flags, fd, offset


def _filling(region: Region, size: int) -> list[tuple[int, ...]]:
    """New memory with what was in the old one. The heap is there: see `_elf`."""
    calls = []
    if region.name != _HEAP:
        calls.append(_mapping(region, _R | _W, _MAP_ANONYMOUS, _NONE))
    for at, start, length in region.pieces:
        calls.append((_PREAD, _SELF_FD, start, length, size + at))
    for start, end, rights in _spans(region):
        if rights != _R | _W:
            calls.append((_MPROTECT, start, end - start, rights))
    return calls


def _spans(region: Region) -> list[tuple[int, int, int]]:
    """Its parts, those side by side with the same rights as one.

    A library's tables beside its code may be run as that may, which spares a call for each: they are as
    little to be written to, and whoever could have them run could have all the code around them run.
    """
    found: list[tuple[int, int, int]] = []
    for start, end, rights in region.parts or [(region.start, region.end, region.rights)]:
        if found and (found[-1][2] == rights or {found[-1][2], rights} <= _NEVER_WRITTEN):
            found[-1] = found[-1][0], end, found[-1][2] | rights
        else:
            found.append((start, end, rights))
    return found


def code_at() -> int:
    """Where that lies in a program, behind what `elf` says."""
    return _BEGIN


def elf(size: int) -> bytes:
    """Build the header of a program of `size` bytes, with a writable page behind it."""
    return _elf(BASE + _BEGIN, size, None)


def whole_pages(count: int) -> int:
    """So many bytes, and up to the end of their last page."""
    return -(-count // _PAGE) * _PAGE


def _elf(entry: int, size: int, heap: Region | None) -> bytes:
    """The heap is the last of its segments: brk(2) goes on after that, and so where it has been."""
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    sizes = struct.calcsize(_EHDR), struct.calcsize(_PHDR), 3, 0, 0, 0
    last = (heap.start, heap.end - heap.start) if heap else (BASE + size, _PAGE)
    segments = [
        (_PT_LOAD, _R | _X, 0, BASE, BASE, size, size, _PAGE),
        (_PT_LOAD, _R | _W, 0, last[0], last[0], 0, last[1], _PAGE),
        (_PT_GNU_STACK, _R | _W, 0, 0, 0, 0, 0, 16),
    ]
    header = struct.pack(_EHDR, ident, _ET_EXEC, _EM_X86_64, 1, entry, sizes[0], 0, 0, *sizes)
    return header + b"".join(struct.pack(_PHDR, *segment) for segment in segments)
