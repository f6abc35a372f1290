"""A list of system calls that a process works through without a stack, and without memory of its own.

A process that takes on the memory of another one can run none of its own code meanwhile. What it runs is
`CODE`: it goes through steps of 80 bytes, each a system call and what the kernel has to answer.
A step that fails is written to the status descriptor, and the process ends with status 99.
"""

from __future__ import annotations

import _struct as struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PAGE = 4096
STEP_BYTES = 80
# What a step expects: at least 0; anything; just that; at least 0, and a child goes on there; above 0.
SUCCESS, ANYTHING, EXACTLY, BRANCH, SOME = range(5)
# In place of the number of a system call: go on there; tell failures there; wait until as many have come
# as the word there says; and rt_sigreturn(2) to the frame there.
JUMP, STATUS, BARRIER, RETURN = -1, -2, -3, -4
_STEP = struct.Struct("=10Q")  # number, six arguments, expectation, its value, the answer
_ALL = (1 << 64) - 1
_ZEROS = (0,) * 6

CODE = bytes.fromhex(
    "4889fb"  # mov rbx, rdi: the first step
    "4989f4"  # mov r12, rsi: the status descriptor
    "488b03"  # step: mov rax, [rbx]
    "488b7b08"  # mov rdi, [rbx+8]
    "4885c0"  # test rax, rax
    "7853"  # js special
    "488b7310"  # mov rsi, [rbx+16]
    "488b5318"  # mov rdx, [rbx+24]
    "4c8b5320"  # mov r10, [rbx+32]
    "4c8b4328"  # mov r8, [rbx+40]
    "4c8b4b30"  # mov r9, [rbx+48]
    "0f05"  # syscall
    "488b5338"  # mov rdx, [rbx+56]
    "488b4b40"  # mov rcx, [rbx+64]
    "80fa01"  # cmp dl, ANYTHING
    "7419"  # je next
    "80fa02"  # cmp dl, EXACTLY
    "741a"  # je equal
    "4885c0"  # test rax, rax
    "7878"  # js failed
    "80fa03"  # cmp dl, BRANCH
    "7417"  # je branch
    "80fa04"  # cmp dl, SOME
    "7505"  # jne next
    "4885c0"  # test rax, rax
    "7469"  # je failed
    "4883c350"  # next: add rbx, 80
    "ebb2"  # jmp step
    "4839c8"  # equal: cmp rax, rcx
    "74f5"  # je next
    "eb5c"  # jmp failed
    "4885c0"  # branch: test rax, rax
    "75ee"  # jne next
    "4889cb"  # mov rbx, rcx
    "eba1"  # jmp step
    "48ffc0"  # special: inc rax
    "7414"  # jz jump
    "48ffc0"  # inc rax
    "7414"  # jz status
    "48ffc0"  # inc rax
    "7414"  # jz barrier
    "4889fc"  # mov rsp, rdi
    "b80f000000"  # mov eax, SYS_rt_sigreturn
    "0f05"  # syscall
    "4889fb"  # jump: mov rbx, rdi
    "eb83"  # jmp step
    "4989fc"  # status: mov r12, rdi
    "ebc6"  # jmp next
    "f0ff0f"  # barrier: lock dec dword [rdi]
    "7417"  # jz wake
    "8b17"  # wait: mov edx, [rdi]
    "85d2"  # test edx, edx
    "74bb"  # jz next
    "be00000000"  # mov esi, FUTEX_WAIT: several processes may wait
    "4531d2"  # xor r10d, r10d: no timeout
    "b8ca000000"  # mov eax, SYS_futex
    "0f05"  # syscall
    "ebe9"  # jmp wait
    "be01000000"  # wake: mov esi, FUTEX_WAKE
    "baffffff7f"  # mov edx, INT_MAX
    "b8ca000000"  # mov eax, SYS_futex
    "0f05"  # syscall
    "eb97"  # jmp next
    "48894348"  # failed: mov [rbx+72], rax
    "b801000000"  # mov eax, SYS_write
    "4c89e7"  # mov rdi, r12
    "4889de"  # mov rsi, rbx
    "ba50000000"  # mov edx, 80
    "0f05"  # syscall
    "b8e7000000"  # mov eax, SYS_exit_group
    "bf63000000"  # mov edi, 99
    "0f05"  # syscall
    "0f0b"  # ud2
)


class Label:
    """The first step of a list, as the argument or the value of a step of another list."""

    def __init__(self, name: str) -> None:
        self.name = name


class Steps:
    """Lists of steps, and what they point to, for memory that begins at `base`.

    The first list begins at `base` itself.
    """

    def __init__(self, base: int) -> None:
        self.base = base
        self._data = bytearray(STEP_BYTES)  # the jump to the first list
        self._lists: dict[str, list[tuple[Any, ...]]] = {}
        self.current = ""
        self._now: list[tuple[Any, ...]] = []

    def begin(self, name: str) -> None:
        """Go on in another list."""
        self.current = name
        self._now = self._lists.setdefault(name, [])

    def add(self, number: int, *arguments: Any, expect: int = SUCCESS, value: Any = 0) -> None:
        padding = _ZEROS[len(arguments) :]
        self._now.append((number, *arguments, *padding, expect, value, 0))

    def exactly(self, value: int, number: int, *arguments: Any) -> None:
        """Add a step whose answer is known."""
        self.add(number, *arguments, expect=EXACTLY, value=value)

    def put(self, content: bytes, align: int = 16) -> int:
        """Keep some bytes; their address."""
        self._data += bytes(-len(self._data) % align)
        at = self.base + len(self._data)
        self._data += content
        return at

    def text(self, content: str | bytes) -> int:
        data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogateescape")
        return self.put(data + b"\0", 1)

    def next_aligned(self, align: int) -> int:
        """The address that `put` gives next."""
        self._data += bytes(-len(self._data) % align)
        return self.base + len(self._data)

    def content(self) -> bytes:
        places = {
            name: self.put(bytes(STEP_BYTES * len(each))) for name, each in self._lists.items()
        }
        first = next(iter(self._lists))
        self._write(0, (JUMP, places[first], *[0] * 8), places)
        for name, each in self._lists.items():
            for i, step in enumerate(each):
                self._write(places[name] - self.base + STEP_BYTES * i, step, places)
        return bytes(self._data)

    def _write(self, at: int, step: tuple[Any, ...], places: dict[str, int]) -> None:
        try:
            _STEP.pack_into(self._data, at, *step)
        except struct.error:  # type: ignore[attr-defined]  # a label, or a negative number
            words = [places[each.name] if isinstance(each, Label) else each & _ALL for each in step]
            _STEP.pack_into(self._data, at, *words)


def failure(record: bytes) -> OSError:
    """Read what a process told of the step that failed."""
    number, *rest = struct.unpack("=10q", record)
    result = rest[8]
    shown = ", ".join(f"{each & _ALL:#x}" for each in rest[:4])
    code = -result if -4096 < result < 0 else 5
    return OSError(code, f"system call {number}({shown}) answered {result}")
