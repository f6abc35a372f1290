"""Memory mappings of this process: dropping a file's pages, and code of our own. madvise(2),
mmap(2).
"""

from __future__ import annotations

import posix as os

from . import cdata
from .libc import declare, raise_errno

_MADV_DONTNEED = 4  # include/uapi/asm-generic/mman-common.h
_THERE, _OF_FILE = 0xC0, 0x20  # the highest byte of an entry of pagemap: present or swapped; bit 61
_PAGE = os.sysconf("SC_PAGESIZE")
_PROT_READ, _PROT_WRITE, _PROT_EXEC = 1, 2, 4  # include/uapi/asm-generic/mman-common.h
_MAP_PRIVATE, _MAP_ANONYMOUS, _MAP_FIXED_NOREPLACE = 0x02, 0x20, 0x100000
_FAILED = (1 << 64) - 1

_madvise = declare("madvise", cdata.c_ulong, cdata.c_size_t, cdata.c_int)
_mmap = cdata.function(
    "mmap", cdata.c_ulong, cdata.c_ulong, cdata.c_size_t, *[cdata.c_int] * 3, cdata.c_long
)
_mprotect = cdata.function("mprotect", cdata.c_int, cdata.c_ulong, cdata.c_size_t, cdata.c_int)


def of_files() -> list[tuple[int, int]]:
    """Start and length of each mapping that nothing writes and that has its file's pages alone.

    What the loader has relocated and then made read-only is none of them: that is in no file.

    Source: proc(5), maps and pagemap (which smaps says in more words, and ten times as slowly).
    """
    with open("/proc/self/maps", "rb") as file:
        lines = file.read().splitlines()
    pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        spans = [_span(line) for line in lines]
        return [span for span in spans if span[1] and _is_untouched(pagemap, *span)]
    finally:
        os.close(pagemap)


def _span(line: bytes) -> tuple[int, int]:
    """Of a line of maps; with no length where it is writable, or no file's."""
    place, access, _offset, _device, inode = line.split(None, 5)[:5]
    if access not in (b"r-xp", b"r--p") or inode == b"0":
        return 0, 0
    start, _, end = place.partition(b"-")
    return int(start, 16), int(end, 16) - int(start, 16)


def _is_untouched(pagemap: int, start: int, length: int) -> bool:
    entries = os.pread(pagemap, length // _PAGE * 8, start // _PAGE * 8)
    return all(high & _OF_FILE or not high & _THERE for high in set(entries[7::8]))


def give_back(start: int, length: int) -> None:
    """Let go of the pages of a mapping of `of_files`; whichever is needed comes from the file again.

    Source: madvise(2).
    """
    if _madvise(start, length, _MADV_DONTNEED) < 0:
        raise_errno("madvise")


def map_code(code: bytes) -> int:
    """The address of a copy of machine code, to be run and not to be written to any more; for good.

    Source: mmap(2), mprotect(2).
    """
    size = -(-len(code) // _PAGE) * _PAGE
    start = _mmap(0, size, _PROT_READ | _PROT_WRITE, _MAP_PRIVATE | _MAP_ANONYMOUS, -1, 0)
    if start == _FAILED:
        raise_errno("mmap")
    cdata.memmove(start, code, len(code))
    if _mprotect(start, size, _PROT_READ | _PROT_EXEC) < 0:
        raise_errno("mprotect")
    return start


def map_at(start: int, size: int, content: bytes, *, executable: bool = False) -> int:
    """Map private memory at an address that is free, filled from its beginning; the address.

    Args:
        executable: It is to be run, and not to be written to any more.

    Raises:
        OSError: EEXIST where something is mapped there.

    Source: mmap(2), MAP_FIXED_NOREPLACE, Linux 4.17.
    """
    flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
    if _mmap(start, size, _PROT_READ | _PROT_WRITE, flags, -1, 0) != start:
        raise_errno("mmap")
    cdata.memmove(start, content, len(content))
    if executable and _mprotect(start, size, _PROT_READ | _PROT_EXEC) < 0:
        raise_errno("mprotect")
    return start
