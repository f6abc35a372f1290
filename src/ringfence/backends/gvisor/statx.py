"""A library of one function, for guests of an old gVisor: statx(2) without a flag that it refuses.

Before March 2023 gVisor said EINVAL to AT_NO_AUTOMOUNT, which means nothing in it, and which `ls` and
`stat` of coreutils always give. The C library's own way out is refused too, so the flag has to go
before the call is made. `/etc/ld.so.preload` puts this in front of the C library's: ld.so(8).
"""

from __future__ import annotations

import os
import struct

PRELOAD, LIBRARY = "/etc/ld.so.preload", "/etc/gvisor-statx.so"
_FIXED = 20230301

# int statx(int dirfd, const char *path, int flags, unsigned mask, struct statx *buffer)
_BEFORE_CALL = bytes.fromhex(
    "81e2fff7ffff"  # and edx, ~AT_NO_AUTOMOUNT
    "4989ca"  # mov r10, rcx
    "b84c010000"  # mov eax, SYS_statx
    "0f05"  # syscall
    "483d01f0ffff"  # cmp rax, -4095
    "7301"  # jae failed
    "c3"  # ret
    "f7d8"  # failed: neg eax
    "50"  # push rax
    "ff15"  # call [rip + ...], which is __errno_location
)
_AFTER_CALL = bytes.fromhex(
    "5a"  # pop rdx
    "8910"  # mov [rax], edx
    "83c8ff"  # or eax, -1
    "c3"  # ret
)
_PAGE = 0x1000
_EHDR, _PHDR = "<16sHHIQQQIHHHHHH", "<IIQQQQQQ"
_SYMBOL, _RELOCATION, _DYNAMIC = "<IBBHQQ", "<QQq", "<QQ"
# elf.h
_ET_DYN, _EM_X86_64 = 3, 62
_PT_LOAD, _PT_DYNAMIC, _PT_GNU_STACK = 1, 2, 0x6474E551
_X, _W, _R = 1, 2, 4
_DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_RELA, _DT_RELASZ, _DT_RELAENT = 4, 5, 6, 7, 8, 9
_DT_STRSZ, _DT_SYMENT = 10, 11
_GLOBAL_FUNCTION, _R_X86_64_GLOB_DAT = 0x12, 6


def is_needed(released: int) -> bool:
    """Return whether the gVisor released on that day (YYYYMMDD, 0 for unknown) refuses the flag here."""
    return 0 < released < _FIXED and os.uname().machine == "x86_64"


def library() -> bytes:
    """An ELF shared object with `statx` in it: one page of code and tables, one of data.

    Source: elf(5), and the System V ABI for x86-64.
    """
    names = b"\0statx\0__errno_location\0"
    head = struct.calcsize(_EHDR) + 4 * struct.calcsize(_PHDR)
    symbols_at = head
    names_at = symbols_at + 3 * struct.calcsize(_SYMBOL)
    hash_at = -(-(names_at + len(names)) // 8) * 8
    # A single bucket, leading to the only defined symbol of three.
    table = struct.pack("<6I", 1, 3, 1, 0, 0, 0)
    relocation_at = hash_at + len(table)
    code_at = relocation_at + struct.calcsize(_RELOCATION)
    pointer_at, dynamic_at = _PAGE, _PAGE + 16
    called_from = code_at + len(_BEFORE_CALL) + 4
    code = _BEFORE_CALL + struct.pack("<i", pointer_at - called_from) + _AFTER_CALL
    symbols = bytes(struct.calcsize(_SYMBOL))
    symbols += struct.pack(_SYMBOL, 1, _GLOBAL_FUNCTION, 0, 1, code_at, len(code))
    symbols += struct.pack(_SYMBOL, 7, _GLOBAL_FUNCTION, 0, 0, 0, 0)
    relocation = struct.pack(_RELOCATION, pointer_at, 2 << 32 | _R_X86_64_GLOB_DAT, 0)
    entries = {
        _DT_HASH: hash_at,
        _DT_STRTAB: names_at,
        _DT_SYMTAB: symbols_at,
        _DT_STRSZ: len(names),
        _DT_SYMENT: struct.calcsize(_SYMBOL),
        _DT_RELA: relocation_at,
        _DT_RELASZ: len(relocation),
        _DT_RELAENT: len(relocation),
        0: 0,
    }
    dynamic = b"".join(struct.pack(_DYNAMIC, *entry) for entry in entries.items())
    size = code_at + len(code)
    first = _head(size, dynamic_at, len(dynamic)) + symbols + names.ljust(hash_at - names_at, b"\0")
    return (first + table + relocation + code).ljust(_PAGE, b"\0") + bytes(16) + dynamic


def _head(size: int, dynamic_at: int, dynamic_size: int) -> bytes:
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    sizes = struct.calcsize(_EHDR), struct.calcsize(_PHDR), 4, 0, 0, 0
    header = struct.pack(_EHDR, ident, _ET_DYN, _EM_X86_64, 1, 0, sizes[0], 0, 0, *sizes)
    data = 16 + dynamic_size
    segments = [
        (_PT_LOAD, _R | _X, 0, 0, 0, size, size, _PAGE),
        (_PT_LOAD, _R | _W, _PAGE, _PAGE, _PAGE, data, data, _PAGE),
        (_PT_DYNAMIC, _R | _W, dynamic_at, dynamic_at, dynamic_at, dynamic_size, dynamic_size, 8),
        (_PT_GNU_STACK, _R | _W, 0, 0, 0, 0, 0, 16),
    ]
    return header + b"".join(struct.pack(_PHDR, *segment) for segment in segments)
