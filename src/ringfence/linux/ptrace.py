"""Looking at a child that stands still, on x86-64: ptrace(2)."""

from __future__ import annotations

import _struct as struct

from . import cdata
from .libc import declare, raise_errno

# include/uapi/linux/ptrace.h, arch/x86/include/uapi/asm/ptrace-abi.h
_TRACEME, _CONT, _GETREGS, _SETOPTIONS = 0, 7, 12, 0x4200
_EXITKILL = 1 << 20
# struct user_regs_struct of arch/x86/include/asm/user_64.h
_REGISTERS = (
    *("r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx"),
    *("rsi", "rdi", "orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base"),
    *("ds", "es", "fs", "gs"),
)
_FORMAT = f"={len(_REGISTERS)}Q"

_ptrace = declare("ptrace", cdata.c_long, cdata.c_long, cdata.c_void_p, cdata.c_void_p)
_Buffer = cdata.c_uint64 * len(_REGISTERS)


def trace_me() -> None:
    """Let our parent trace us: from the next execve(2) on we stop where it has a say."""
    if _ptrace(_TRACEME, 0, None, None) < 0:
        raise_errno("ptrace PTRACE_TRACEME")


def kill_with_us(pid: int) -> None:
    """A traced child shall not outlive us."""
    if _ptrace(_SETOPTIONS, pid, None, _EXITKILL) < 0:
        raise_errno("ptrace PTRACE_SETOPTIONS", pid)


def go_on(pid: int, signum: int = 0) -> None:
    """Let a stopped child run, with a signal or without one."""
    if _ptrace(_CONT, pid, None, signum) < 0:
        raise_errno("ptrace PTRACE_CONT", pid)


def registers(pid: int) -> dict[str, int]:
    """Read the registers of a stopped child, by name."""
    buffer = _Buffer()
    if _ptrace(_GETREGS, pid, None, cdata.byref(buffer)) < 0:
        raise_errno("ptrace PTRACE_GETREGS", pid)
    return dict(zip(_REGISTERS, struct.unpack(_FORMAT, bytes(buffer)), strict=True))


def packed(values: dict[str, int]) -> bytes:
    """Registers as the kernel has them: struct user_regs_struct."""
    try:
        return struct.pack(_FORMAT, *map(values.__getitem__, _REGISTERS))
    except struct.error:  # type: ignore[attr-defined]  # a negative number
        return struct.pack(_FORMAT, *(values[name] & 0xFFFF_FFFF_FFFF_FFFF for name in _REGISTERS))
