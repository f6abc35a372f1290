"""Registers of a thread, as a copy of it begins with them."""

from __future__ import annotations

import _struct as struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ...linux.tracing import Thread
    from .source import State

# fs/signal: what a system call that a signal interrupted has in rax, to begin again.
_RESTARTS = (-512, -513, -514, -516)
# struct sigcontext: 18 registers in this order, then segments, and what the kernel does not read back.
_ORDER = (
    *("r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "rdi", "rsi", "rbp", "rbx", "rdx"),
    *("rax", "rcx", "rsp", "rip", "eflags"),
)
_TRAP = 0x100  # EFLAGS.TF: single step
_USER_CODE, _USER_DATA = 0x33, 0x2B
_SOFTWARE_AT, _FEATURES_AT = 464, 464
_MAGIC, _END_MAGIC = 0x46505853, 0x46505845
_IN_USE_AT = 512  # XSTATE_BV of the header of XSAVE
_CONTEXT_FLAGS = 1 | 2 | 4  # UC_FP_XSTATE, UC_SIGCONTEXT_SS, UC_STRICT_RESTORE_SS
# AMX: the data of tiles, which no other component of XSAVE lies behind. Source: Intel SDM, volume 1, 13.5.
TILES, _TILES_BYTES = 1 << 18, 8192


def uses_tiles(thread: Thread) -> bool:
    """Tell whether there is data in its tile registers, for which a thread has room once it has used them."""
    extended = thread.extended
    return len(extended) >= _IN_USE_AT + 8 and bool(
        struct.unpack_from("=Q", extended, _IN_USE_AT)[0] & TILES
    )


def resumed(state: State) -> dict[str, int]:
    """The registers that a copy of a thread begins with: an interrupted system call begins again."""
    registers = dict(state.registers)
    signed = registers["rax"] - (1 << 64) if registers["rax"] >> 63 else registers["rax"]
    if not registers["orig_rax"] >> 63 and signed in _RESTARTS:
        registers["rax"] = registers["orig_rax"]
        registers["rip"] -= 2
    return registers


def signal_frame(state: State, at: int) -> tuple[bytes, int]:
    """Frame that rt_sigreturn(2) restores a thread from, for memory at `at`, and the address it reads from.

    Of a frame with room for more than the thread has, the kernel restores the registers of SSE only, and says
    nothing. What ptrace(2) tells has room for every feature of the processor: that for tiles is left out.

    Source: arch/x86/include/uapi/asm/sigcontext.h, ucontext.h; arch/x86/kernel/fpu/signal.c.
    """
    registers = resumed(state)
    extended = bytearray(state.thread.extended)
    (features,) = struct.unpack_from("=Q", extended, _FEATURES_AT)
    if features & TILES:
        features &= ~TILES
        del extended[-_TILES_BYTES:]
    size = len(extended)
    struct.pack_into("=IIQI28x", extended, _SOFTWARE_AT, _MAGIC, size + 4, features, size)
    extended += struct.pack("=I", _END_MAGIC)
    extended += bytes(-len(extended) % 64)
    registers["eflags"] &= ~_TRAP
    values: list[Any] = [registers[name] for name in _ORDER]
    context = struct.pack("=QQ", _CONTEXT_FLAGS, 0) + state.alternate_stack
    context += struct.pack("=18Q", *values)
    context += struct.pack("=4H", _USER_CODE, 0, 0, _USER_DATA)
    context += struct.pack("=4QQ64x", 0, 0, 0, 0, at) + struct.pack("=Q", state.thread.mask)
    return bytes(extended) + context, at + len(extended)
