"""The assembler: any decision graph becomes a program that decides the same and that fits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.policy import simulator

from ringfence.policy import bpf

pytestmark = pytest.mark.anyone

WORDS = st.one_of(
    st.integers(0, 20), st.integers(0, bpf.WORD), st.sampled_from([bpf.WORD, 1 << 31])
)
FIELDS = st.sampled_from([0, 4, *range(16, 64, 4)])


@st.composite
def graphs(draw: st.DrawFn) -> bpf.Node:
    graph = bpf.Graph()
    nodes: list[bpf.Node] = [graph.give(value) for value in range(draw(st.integers(1, 5)))]
    for _ in range(draw(st.integers(0, 40))):
        pick = st.sampled_from(nodes)
        kind = draw(st.sampled_from(["test", "member", "switch"]))
        field, mask = draw(FIELDS), draw(st.sampled_from([bpf.WORD, 0xF, 0xF0, 0x80000001]))
        if kind == "test":
            jump = draw(st.sampled_from([bpf.JUMP_EQ, bpf.JUMP_GE, bpf.JUMP_SET]))
            node = graph.test(field, mask, jump, draw(WORDS), draw(pick), draw(pick))
        elif kind == "member":
            values = draw(st.sets(WORDS, max_size=12))
            node = graph.member(field, mask, values, draw(pick), draw(pick))
        else:
            points = draw(st.dictionaries(WORDS, pick, max_size=12))
            node = graph.switch(field, points, draw(pick), mask=mask)
        nodes.append(node)
    return nodes[-1]


def decide(node: bpf.Node, words: dict[int, int]) -> int:
    while isinstance(node, bpf.Test):
        word = words[node.field] & node.mask
        holds = {
            bpf.JUMP_EQ: word == node.value,
            bpf.JUMP_GE: word >= node.value,
            bpf.JUMP_SET: word & node.value != 0,
        }[node.jump]
        node = node.yes if holds else node.no
    return node.value


@pytest.mark.full
@settings(max_examples=120, deadline=None)
@given(graphs(), st.lists(st.tuples(*[WORDS] * 14), min_size=1, max_size=20))
def test_the_program_decides_as_the_graph(root: bpf.Node, inputs: list[tuple[int, ...]]) -> None:
    program = simulator.decode(bpf.assemble(root))
    simulator.check(program)
    assert set() == simulator.unreachable(program)

    for number, arch, *halves in inputs:
        args = tuple(low | high << 32 for low, high in zip(halves[::2], halves[1::2], strict=True))
        words = {0: number, 4: arch, **{16 + 4 * i: half for i, half in enumerate(halves)}}
        assert decide(root, words) == simulator.run(program, number, args, arch).value


@given(st.dictionaries(WORDS, st.integers(1, 4), max_size=60), st.lists(WORDS, max_size=30))
def test_a_switch_finds_every_value(points: dict[int, int], others: list[int]) -> None:
    graph = bpf.Graph()
    nodes = {value: graph.give(verdict) for value, verdict in points.items()}
    program = simulator.decode(bpf.assemble(graph.switch(0, nodes, graph.give(0))))

    for value in [*points, *others, *(v + 1 for v in points if v < bpf.WORD)]:
        assert points.get(value, 0) == simulator.run(program, value, (), 0).value


@given(st.sets(WORDS, max_size=20), st.integers(0, bpf.WORD), st.lists(WORDS, max_size=20))
def test_member_compares_masked_words(values: set[int], mask: int, words: list[int]) -> None:
    graph = bpf.Graph()
    root = graph.member(0, mask, values, graph.give(1), graph.give(2))
    program = simulator.decode(bpf.assemble(root))

    for word in [*words, *values]:
        expected = 1 if word & mask in values else 2
        assert expected == simulator.run(program, word, (), 0).value


@pytest.mark.parametrize("count", [80, 126, 127, 128, 129, 254, 255, 256, 257, 700, 1000])
def test_jumps_farther_than_a_byte(count: int) -> None:
    """A switch whose every arm is long code of its own, and one tail shared by all of them."""
    graph = bpf.Graph()
    shared = graph.test(20, bpf.WORD, bpf.JUMP_EQ, 7, graph.give(7), graph.give(8))
    arms = {
        n: graph.test(16, bpf.WORD, bpf.JUMP_EQ, n, graph.give(n), shared) for n in range(count)
    }
    root = graph.switch(0, arms, graph.give(9999))
    program = simulator.decode(bpf.assemble(root))

    simulator.check(program)
    assert set() == simulator.unreachable(program)
    for n in range(count):
        assert n == simulator.run(program, n, (n,), 0).value
        assert 7 == simulator.run(program, n, (count | 7 << 32,), 0).value
        assert 8 == simulator.run(program, n, (count | 6 << 32,), 0).value
    assert 9999 == simulator.run(program, count, (), 0).value


def test_a_graph_without_tests_is_one_instruction() -> None:
    assert bytes.fromhex("06000000 04000000") == bpf.assemble(bpf.Graph().give(4))


def test_both_ways_the_same_is_no_test() -> None:
    graph = bpf.Graph()

    assert graph.test(0, bpf.WORD, bpf.JUMP_EQ, 1, graph.give(1), graph.give(1)) is graph.give(1)


def test_equal_parts_are_one() -> None:
    graph = bpf.Graph()
    first, second = (graph.member(16, 0xF, {1, 2}, graph.give(1), graph.give(0)) for _ in range(2))

    assert first is second


def test_a_word_is_loaded_once_on_the_way() -> None:
    graph = bpf.Graph()
    root = graph.switch(0, {n: graph.give(n) for n in range(40)}, graph.give(99))
    loads = [code for code, *_ in simulator.decode(bpf.assemble(root)) if code == bpf.LOAD_WORD]

    assert 1 == len(loads)


def test_more_than_the_kernel_takes_is_refused() -> None:
    graph = bpf.Graph()
    root = graph.switch(0, {n: graph.give(n) for n in range(4000)}, graph.give(1))

    with pytest.raises(ValueError, match="4096"):
        bpf.assemble(root)


@pytest.mark.full
@pytest.mark.parametrize("length", [bpf.MAX_INSTRUCTIONS, bpf.MAX_INSTRUCTIONS + 1])
def test_a_program_is_as_long_as_the_kernel_takes_it_and_no_longer(length: int) -> None:
    """A chain of tests of two fields in turn: a load and a jump each, and what it ends in."""
    graph = bpf.Graph()
    node: bpf.Node = graph.give(0)
    other = graph.give(1)
    value = 0
    while True:
        value += 1
        node = graph.test(16 + 8 * (value % 2), bpf.WORD, bpf.JUMP_EQ, value, other, node)
        if value < 1000:
            continue
        program = bpf._Assembler(node).program()
        if len(program) >= length - 1:
            break
    while len(bpf._Assembler(node).program()) < length:  # one more at a time
        value += 1
        node = graph.test(16 + 8 * ((value - 1) % 2), bpf.WORD, bpf.JUMP_EQ, value, other, node)
    assert length == len(bpf._Assembler(node).program())
    if length > bpf.MAX_INSTRUCTIONS:
        with pytest.raises(ValueError, match="4097 instructions"):
            bpf.assemble(node)
    else:
        assert 8 * length == len(bpf.assemble(node))


def test_a_value_that_the_mask_hides_is_never_met() -> None:
    graph = bpf.Graph()
    yes, no = graph.give(1), graph.give(0)
    root = graph.member(16, 0xF0, {0x10, 0x21, 0x0F}, yes, no)

    for word in range(0x100):
        assert (word & 0xF0 == 0x10) == bool(decide(root, {16: word}))
    assert no is graph.member(16, 0xF0, {0x01}, yes, no)
