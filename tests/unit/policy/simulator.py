"""A classic BPF machine for seccomp programs, written from the kernel's rules."""

from __future__ import annotations

import struct
from dataclasses import dataclass

MASK = 0xFFFFFFFF
_LOAD, _AND, _JA, _JEQ, _JGT, _JGE, _JSET, _RET = 0x20, 0x54, 0x05, 0x15, 0x25, 0x35, 0x45, 0x06
_JUMPS = {_JEQ, _JGT, _JGE, _JSET}
_SIZE_OF_SECCOMP_DATA = 64

Instruction = tuple[int, int, int, int]


@dataclass(frozen=True)
class Outcome:
    value: int
    steps: int


def decode(program: bytes) -> list[Instruction]:
    assert 0 == len(program) % 8
    return list(struct.iter_unpack("<HBBI", program))


def check(instructions: list[Instruction]) -> None:
    """What the kernel checks: bpf_check_basics_ok, bpf_check_classic, seccomp_check_filter."""
    assert 0 < len(instructions) <= 4096
    assert instructions[-1][0] == _RET
    for here, (code, yes, no, k) in enumerate(instructions):
        left = len(instructions) - here - 1
        if code == _LOAD:
            assert 0 == k % 4
            assert k < _SIZE_OF_SECCOMP_DATA
        elif code == _JA:
            assert k < left
        elif code in _JUMPS:
            assert yes < left
            assert no < left
        else:
            assert code in {_AND, _RET}


def unreachable(instructions: list[Instruction]) -> set[int]:
    """Instructions that no input can lead to."""
    reached: set[int] = set()
    todo = [0]
    while todo:
        here = todo.pop()
        if here in reached:
            continue
        reached.add(here)
        code, yes, no, k = instructions[here]
        if code == _JA:
            todo.append(here + 1 + k)
        elif code in _JUMPS:
            todo += [here + 1 + yes, here + 1 + no]
        elif code != _RET:
            todo.append(here + 1)
    return set(range(len(instructions))) - reached


def run(instructions: list[Instruction], number: int, args: tuple[int, ...], arch: int) -> Outcome:
    """Judge one system call. `args` are 64-bit words; missing ones are 0."""
    words = [*args, *[0] * (6 - len(args))]
    data = struct.pack("<IIQ6Q", number & MASK, arch, 0x7F0000001234, *words)
    accumulator, here, steps = 0, 0, 0
    while True:
        code, yes, no, k = instructions[here]
        here += 1
        steps += 1
        if code == _LOAD:
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif code == _AND:
            accumulator &= k
        elif code == _JA:
            here += k
        elif code == _RET:
            return Outcome(k, steps)
        else:
            taken = {
                _JEQ: accumulator == k,
                _JGT: accumulator > k,
                _JGE: accumulator >= k,
                _JSET: accumulator & k != 0,
            }[code]
            here += yes if taken else no
