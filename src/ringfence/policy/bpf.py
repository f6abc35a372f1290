"""Classic BPF from a decision graph: equal parts are shared, jumps always fit.

A filter is built bottom-up from two kinds of nodes: `Return` gives the verdict, `Test` compares
one 32-bit word of `struct seccomp_data` and goes on to one of two nodes. Only instructions that
the kernel can evaluate ahead of time are used, so that from Linux 5.11 on a call whose verdict
does not depend on its arguments never runs the program at all (kernel/seccomp.c,
`seccomp_is_const_allow`).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# include/uapi/linux/bpf_common.h
LOAD_WORD = 0x20  # BPF_LD | BPF_W | BPF_ABS
AND = 0x54  # BPF_ALU | BPF_AND | BPF_K
JUMP = 0x05  # BPF_JMP | BPF_JA
JUMP_EQ = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
JUMP_GE = 0x35  # BPF_JMP | BPF_JGE | BPF_K
JUMP_SET = 0x45  # BPF_JMP | BPF_JSET | BPF_K
RETURN = 0x06  # BPF_RET | BPF_K
MAX_INSTRUCTIONS = 4096  # BPF_MAXINSNS, include/uapi/linux/bpf_common.h
FARTHEST_JUMP = 255  # jt and jf are one byte each

# Offsets in struct seccomp_data, include/uapi/linux/seccomp.h; both machines are little-endian.
NUMBER = 0
ARCH = 4

WORD = 0xFFFFFFFF
_CHAIN = 3  # so many single values are compared one after the other before the range is split


def argument(index: int, *, high: bool = False) -> int:
    """The offset of one half of system-call argument `index` (0 to 5)."""
    return 16 + 8 * index + 4 * high


@dataclass(frozen=True, eq=False)
class Return:
    """The end: a SECCOMP_RET_* value."""

    value: int


@dataclass(frozen=True, eq=False)
class Test:
    """Compare the word at `field`, first masked by `mask`, with `value`."""

    field: int
    mask: int
    jump: int  # JUMP_EQ, JUMP_GE or JUMP_SET
    value: int
    yes: Node
    no: Node


Node = Return | Test


class Graph:
    """Makes nodes; equal nodes are the same object, so equality is identity."""

    def __init__(self) -> None:
        self._returns: dict[int, Return] = {}
        self._tests: dict[tuple[int, int, int, int, int, int], Test] = {}

    def give(self, value: int) -> Return:
        return self._returns.setdefault(value, Return(value))

    def test(self, field: int, mask: int, jump: int, value: int, yes: Node, no: Node) -> Node:
        """The node that compares; none is made where both ways are the same."""
        if yes is no:
            return yes
        key = (field, mask, jump, value, id(yes), id(no))
        return self._tests.setdefault(key, Test(field, mask, jump, value, yes, no))

    def member(self, field: int, mask: int, values: Iterable[int], yes: Node, no: Node) -> Node:
        reachable = {value for value in values if value & ~mask == 0}
        if reachable == {0} and mask != WORD:
            return self.test(field, WORD, JUMP_SET, mask, no, yes)
        return self.switch(field, dict.fromkeys(reachable, yes), no, mask=mask)

    def switch(
        self, field: int, points: Mapping[int, Node], other: Node, *, mask: int = WORD
    ) -> Node:
        """Go to the node of the word's value, else to `other`."""
        starts: dict[int, Node] = {0: other}
        for value in sorted(points):
            starts[value] = points[value]
            if value < WORD:
                starts[value + 1] = other
        return self.ranges(field, sorted(starts.items()), mask=mask)

    def ranges(self, field: int, starts: Sequence[tuple[int, Node]], *, mask: int = WORD) -> Node:
        """Go to the node of the range that holds the word.

        Each of `starts` is the first value of a range, ascending, from 0 on, and its node.
        """
        merged: list[tuple[int, Node]] = []
        for start, node in starts:
            if not merged or merged[-1][1] is not node:
                merged.append((start, node))
        return self._search(field, mask, merged, WORD + 1)

    def _search(self, field: int, mask: int, starts: list[tuple[int, Node]], end: int) -> Node:
        """A balanced binary search; a few single values inside one range become a short chain."""
        if len(starts) == 1:
            return starts[0][1]
        chain = self._as_chain(field, mask, starts, end)
        if chain is not None:
            return chain
        middle = len(starts) // 2
        pivot = starts[middle][0]
        low = self._search(field, mask, starts[:middle], pivot)
        high = self._search(field, mask, starts[middle:], end)
        return self.test(field, mask, JUMP_GE, pivot, high, low)

    def _as_chain(
        self, field: int, mask: int, starts: list[tuple[int, Node]], end: int
    ) -> Node | None:
        ends = [start for start, _ in starts[1:]] + [end]
        singles = [(s, node) for (s, node), e in zip(starts, ends, strict=True) if e == s + 1]
        ranges = {node for (s, node), e in zip(starts, ends, strict=True) if e > s + 1}
        if len(ranges) != 1 or len(singles) > _CHAIN:
            return None
        (result,) = ranges
        for value, node in reversed(singles):
            result = self.test(field, mask, JUMP_EQ, value, node, result)
        return result


def assemble(root: Node) -> bytes:
    """The program, as packed `struct sock_filter`, that decides as `root` does.

    Raises:
        ValueError: It is longer than the kernel accepts.
    """
    program = _Assembler(root).program()
    if len(program) > MAX_INSTRUCTIONS:
        raise ValueError(f"{len(program)} instructions; the kernel accepts {MAX_INSTRUCTIONS}")
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


_FULL, _MASK_ONLY, _LOADED = 0, 1, 2  # where to enter a test: at its load, its mask, its comparison


class _Assembler:
    """Lays the graph out from its last instruction to its first, so every target is known."""

    def __init__(self, root: Node) -> None:
        self._root = root
        self._reversed: list[tuple[int, int, int, int]] = []
        self._places: dict[tuple[int, int], int] = {}  # (node, entry) -> nearest index so far
        self._order = _children_first(root)
        self._entries = self._wanted_entries()

    def program(self) -> list[tuple[int, int, int, int]]:
        for node in self._order:
            if isinstance(node, Test):
                self._emit_test(node)
        if isinstance(self._root, Return):
            self._emit(RETURN, self._root.value)
        return self._reversed[::-1]

    def _emit(self, code: int, value: int, yes: int = 0, no: int = 0) -> None:
        self._reversed.append((code, yes, no, value))

    def _emit_test(self, node: Test) -> None:
        targets = [(child, _entry(node, child)) for child in (node.yes, node.no)]
        for child, entry in targets:
            self._bring_near(child, entry)
        here = len(self._reversed)
        yes, no = (here - self._places[id(child), entry] - 1 for child, entry in targets)
        self._emit(node.jump, node.value, yes, no)
        wanted = self._entries[id(node)]
        self._places[id(node), _LOADED] = here
        if node.mask != WORD and wanted & {_FULL, _MASK_ONLY}:
            self._emit(AND, node.mask)
            self._places[id(node), _MASK_ONLY] = len(self._reversed) - 1
        if _FULL in wanted:
            self._emit(LOAD_WORD, node.field)
            self._places[id(node), _FULL] = len(self._reversed) - 1

    def _bring_near(self, child: Node, entry: int) -> None:
        """Where a target is too far for one byte, put a long jump here, or its return again."""
        place = self._places.get((id(child), entry))
        here = len(self._reversed)
        if place is not None and here - place < FARTHEST_JUMP:  # one more may come between
            return
        if isinstance(child, Return):
            self._emit(RETURN, child.value)
        else:
            assert place is not None  # children come first
            self._emit(JUMP, here - place - 1)
        self._places[id(child), entry] = here

    def _wanted_entries(self) -> dict[int, set[int]]:
        wanted: dict[int, set[int]] = {id(self._root): {_FULL}}
        for node in self._order:
            if isinstance(node, Test):
                for child in (node.yes, node.no):
                    wanted.setdefault(id(child), set()).add(_entry(node, child))
        return wanted


def _entry(node: Test, child: Node) -> int:
    """Where to enter `child` from `node`, which leaves its own masked word in the accumulator."""
    if not isinstance(child, Test) or child.field != node.field:
        return _FULL
    if child.mask == node.mask:
        return _LOADED
    return _MASK_ONLY if node.mask == WORD else _FULL


def _children_first(root: Node) -> list[Node]:
    order: list[Node] = []
    seen: set[int] = set()
    todo: list[tuple[Node, bool]] = [(root, False)]
    while todo:  # not recursive: a profile decides how deep the graph is
        node, children_done = todo.pop()
        if children_done:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            todo.append((node, True))
            if isinstance(node, Test):
                todo += [(node.yes, False), (node.no, False)]
    return order
