"""The program of a hibernating PID 1: an ELF file for x86-64 of one page and a memory image.

It waits until there is something to do. Then it maps that memory, of a PID 1 that has just started
and waits as well, and goes on there: privately, so that whoever sleeps has none of it, and those who
are awake share what they have not written to.
"""

from __future__ import annotations

import _struct as struct
import errno

from ...linux import privileges
from . import process_image_elf

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .process_image_elf import Region

# include/uapi/asm-generic/unistd.h's of x86-64, prctl.h, mman.h, asm-generic/poll.h
_POLL, _MMAP, _PREAD, _PRCTL, _ARCH_PRCTL, _EXIT_GROUP = 7, 9, 17, 157, 158, 231
_PR_SET_DUMPABLE, _PR_SET_NAME, _ARCH_SET_FS = 4, 15, 0x1002
_MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS = 0x02, 0x10, 0x20
_POLLIN, _FOR_EVER, _NO_FD = 1, (1 << 64) - 1, (1 << 64) - 1
_POLLFD = "<ihh"


def head(
    regions: list[Region], registers: dict[str, int], program: int, name: bytes, waits: list[int]
) -> bytes:
    """Build the pages before the memory image.

    Args:
        regions: Each with its pieces: offset in the image, address and size, in whole pages.
        program: The descriptor of the program itself.
        name: Of the process.
        waits: The descriptors to poll for input. Exit on POLLHUP of the first without restoring the
            interpreter: waking 1,000 at once takes seconds.
    """
    polled = [(fd, _POLLIN, 0) for fd in waits] + [(waits[0], 0, 0)]
    data = b"".join(struct.pack(_POLLFD, *each) for each in polled) + name + b"\0"
    size = 0
    # The first pass finds the length, the second uses it for the addresses.
    for _ in range(2):
        room = process_image_elf.BASE + size  # the page behind, which may be written to
        closed = room + struct.calcsize(_POLLFD) * len(waits)
        table_at = process_image_elf.code_at() + len(process_image_elf.code(0, registers))
        calls: list[tuple[int, ...]] = [(_PREAD, program, room, len(data), 0)]
        calls.append((_PRCTL, _PR_SET_NAME, closed + struct.calcsize(_POLLFD)))
        calls.append((_PRCTL, _PR_SET_DUMPABLE, 0, privileges.REALLY))
        calls.append((_POLL, room, len(waits), _FOR_EVER))
        calls.append((_POLL, closed, 1, 0))
        behind = len(calls) + 2
        calls.append(process_image_elf.branch(process_image_elf.BASE + table_at, behind))
        calls.append((_EXIT_GROUP, 0))
        for region in regions:
            calls += _mappings(region, program, size)
        calls.append((_ARCH_PRCTL, _ARCH_SET_FS, registers["fs_base"]))
        data_at = table_at + len(process_image_elf.rows_of(calls))
        calls[0] = (_PREAD, program, room, len(data), data_at)
        size = process_image_elf.whole_pages(data_at + len(data))
    least = min(region.start for region in regions)
    if (
        size > process_image_elf.MOST_BYTES
        or least < process_image_elf.BASE + process_image_elf.MOST_BYTES
    ):
        raise OSError(errno.ENOSYS, "the program lies where the one that sleeps is")
    table = process_image_elf.rows_of(calls)
    whole = process_image_elf.elf(size) + process_image_elf.code(
        process_image_elf.BASE + table_at, registers
    )
    return (whole + table + data).ljust(size, b"\0")


def _mappings(region: Region, program: int, size: int) -> list[tuple[int, ...]]:
    """Zeros, and over them what is kept of it. The stack of this program may lie there: nobody needs it."""
    flags, length = _MAP_PRIVATE | _MAP_FIXED, region.end - region.start
    calls: list[tuple[int, ...]] = []
    if [(start, bytes_) for _, start, bytes_ in region.pieces] != [(region.start, length)]:
        start = region.end - max(region.room, length)
        zeros = flags | _MAP_ANONYMOUS
        calls.append((_MMAP, start, region.end - start, region.rights, zeros, _NO_FD, 0))
    for at, start, bytes_ in region.pieces:
        calls.append((_MMAP, start, bytes_, region.rights, flags, program, size + at))
    return calls
