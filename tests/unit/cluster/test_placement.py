"""Where sandboxes are placed, and who waits: properties over arbitrary nodes, needs and owners."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.cluster import placement
from ringfence.cluster.placement import PACK, SPREAD, Fleet, Need, NodeState, rendezvous
from ringfence.errors import (
    BackendUnavailable,
    ImageNotFound,
    ResourceExhausted,
    RingfenceError,
)

pytestmark = pytest.mark.anyone

_WORDS = st.sampled_from(["a", "b", "c"])
_SOME = st.frozensets(_WORDS)
_BYTES = st.integers(0, 3)
_STATES = st.builds(
    NodeState,
    node_id=st.sampled_from([f"node{number}" for number in range(12)]),
    address=st.just("127.0.0.1:1"),
    tiers=_SOME,
    backends=_SOME,
    free_memory_bytes=_BYTES,
    cpus=st.sampled_from([1.0, 2.0]),
    load=st.floats(0, 4),
    warm=st.dictionaries(_WORDS, st.integers(0, 2)),
    images=_SOME,
    labels=st.dictionaries(_WORDS, _WORDS),
    is_draining=st.booleans(),
    sampled_at=st.sampled_from([0.0, 100.0]),
    room=st.sampled_from([None, 0, 1]),
    groups=_SOME,
)
_NEEDS = st.builds(
    Need,
    tier=st.sampled_from(["", "a"]),
    backend=st.sampled_from(["", "b"]),
    image=st.sampled_from([None, "c"]),
    labels=st.dictionaries(_WORDS, _WORDS, max_size=1),
    memory_bytes=_BYTES,
    pool_key=st.sampled_from(["", "a"]),
    anti_affinity=st.sampled_from(["", "b"]),
    strategy=st.sampled_from([SPREAD, PACK]),
    pulls_image=st.booleans(),
    avoid=st.frozensets(st.sampled_from(["node1", "node2"])),
)


@settings(deadline=None, max_examples=100)
@given(st.lists(_STATES, max_size=30), _NEEDS, st.randoms(use_true_random=False))
def test_a_node_is_found_if_and_only_if_one_meets_every_need(
    states: list[NodeState], need: Need, random: Random
) -> None:
    """Also after states were replaced and nodes removed."""
    fleet = Fleet(states)
    fleet.remove("node3")
    last = {state.node_id: state for state in states if state.node_id != "node3"}
    hard = placement._hard_needs(need)
    able = [state for state in last.values() if all(each.meets(state) for each in hard)]

    assert len(last) == len(fleet)
    if able:
        chosen = fleet.choose(need, random)
        assert chosen in able
        assert fleet.get(chosen.node_id) == chosen
    else:
        with pytest.raises((BackendUnavailable, ImageNotFound, ResourceExhausted)):
            fleet.choose(need, random)


def _node(number: int, **more: object) -> NodeState:
    state = NodeState(f"n{number}", "", ("light",), ("native",), 1 << 30, 8.0)
    return replace(state, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("need", "error", "text"),
    [
        (Need(tier="vm"), BackendUnavailable, "tier: none of 3 nodes offers tier 'vm'"),
        (
            Need(tier="strong", backend="x"),
            BackendUnavailable,
            "none of 2 suitable nodes has backend",
        ),
        (Need(labels={"gpu": "h100"}), BackendUnavailable, "labels: none of 3 nodes has gpu=h100"),
        (Need(image="py"), ImageNotFound, "image: none of 3 nodes has image 'py'"),
        (Need(anti_affinity="db"), ResourceExhausted, "3 nodes is without a sandbox of group 'db'"),
        (
            Need(memory_bytes=2 << 30),
            ResourceExhausted,
            "memory_bytes: none of 2 suitable nodes has 2,147,",
        ),
        (Need(tier="strong", memory_bytes=1 << 30), ResourceExhausted, "none of 2 suitable nodes"),
        (
            Need(labels={"old": "1"}),
            ResourceExhausted,
            "none of 1 suitable nodes takes new sandboxes",
        ),
        (Need(avoid=frozenset({"n0", "n1"})), ResourceExhausted, "left beside the 2 that refused"),
    ],
)
def test_a_refusal_names_the_need_and_how_many_nodes_lack_it(
    need: Need, error: type[Exception], text: str
) -> None:
    strong = {"tiers": ("light", "strong"), "free_memory_bytes": 1 << 29}
    nodes = [_node(number, groups=frozenset({"db"}), **strong) for number in range(2)]
    nodes.append(_node(2, groups=frozenset({"db"}), labels={"old": "1"}, is_draining=True))

    with pytest.raises(error, match=r"ringfence nodes|add nodes") as caught:
        Fleet(nodes).choose(need, Random(0))

    assert text in str(caught.value)


def test_warm_nodes_and_images_are_preferred_until_they_are_busy() -> None:
    plain = [_node(number) for number in range(20)]
    warm = _node(20, warm={"k": 1}, images=frozenset({"py"}))
    need = Need(pool_key="k", image="py", pulls_image=True)

    for load, counts in ((0.0, {"n20": 50}), (7.9, {"n20": 0})):
        fleet = Fleet([*plain, replace(warm, load=load)])
        random = Random(7)
        chosen = Counter(fleet.choose(need, random).node_id for _ in range(50))
        assert counts["n20"] == chosen["n20"]


def test_packing_fills_nodes_one_after_the_other_and_spreading_all_alike() -> None:
    used = {}
    for strategy in (PACK, SPREAD):
        fleet, random = Fleet(_node(number) for number in range(10)), Random(7)
        for _ in range(40):
            state = fleet.choose(Need(strategy=strategy), random)
            fleet.put(replace(state, load=state.load + 1))
        states = [fleet.get(f"n{number}") for number in range(10)]
        used[strategy] = sorted(state.load for state in states if state and state.load)

    assert [8.0] * 5 == used[PACK]
    assert 10 == len(used[SPREAD])
    assert max(used[SPREAD]) <= 7


def test_stale_samples_are_the_second_choice() -> None:
    stale = _node(0, sampled_at=10.0)
    busy = _node(1, load=20.0, sampled_at=10.0 + placement.STALE_S + 0.1)

    assert "n1" == Fleet([stale, busy]).choose(Need(), Random(0)).node_id
    both = Fleet([stale, replace(busy, sampled_at=11.0)])
    assert "n0" == both.choose(Need(), Random(0)).node_id


@settings(deadline=None, max_examples=50)
@given(st.sets(st.text(max_size=5), min_size=1, max_size=9), st.sets(st.text(), max_size=20))
def test_a_lost_node_moves_only_its_own_keys(nodes: set[str], keys: set[str]) -> None:
    lost = sorted(nodes)[0]
    for key in keys:
        order = rendezvous(key, sorted(nodes, reverse=True), len(nodes))
        assert set(order) == nodes
        assert order[:2] == rendezvous(key, nodes, 2)
        left = [node for node in order if node != lost]
        assert left == rendezvous(key, nodes - {lost}, len(nodes))


def test_keys_are_divided_evenly() -> None:
    owners = Counter(rendezvous(f"name-{number}", "abcd")[0] for number in range(4000))

    assert set("abcd") == set(owners)
    assert 900 < min(owners.values())


def test_an_older_sample_that_comes_late_makes_no_other_one_fresh() -> None:
    stale, late = _node(0, sampled_at=10.0), _node(2, load=30.0, sampled_at=9.0)
    busy = _node(1, load=20.0, sampled_at=10.0 + placement.STALE_S + 0.1)
    fleet = Fleet([stale, busy])
    fleet.put(late)
    need = Need(avoid=frozenset(["n2"]))
    assert {"n1"} == {fleet.choose(need, Random(seed)).node_id for seed in range(10)}


def test_a_node_is_found_by_what_it_has_now() -> None:
    """By an image or a warm sandbox that came since the first sample, and not by one that is gone."""
    nodes = [_node(number) for number in range(40)]
    fleet = Fleet(nodes)
    for need, having, without in (
        (Need(pool_key="k"), {"warm": {"k": 1}}, {"warm": {"k": 0}}),
        (Need(image="i", pulls_image=True), {"images": frozenset(["i"])}, {"images": frozenset()}),
    ):

        def chosen(need: Need = need) -> set[str]:
            return {fleet.choose(need, Random(seed)).node_id for seed in range(20)}

        assert 1 < len(chosen())
        fleet.put(replace(nodes[7], **having))
        assert {"n7"} == chosen()
        fleet.put(replace(nodes[7], **without))
        assert 1 < len(chosen())
        fleet.put(replace(nodes[7], **having))
        fleet.remove("n7")
        assert "n7" not in chosen()
        assert [] == [each for each in fleet._by_pressure if each[1] == "n7"]
        fleet.put(nodes[7])


@pytest.mark.parametrize(
    ("need", "having"),
    [
        (Need(tier="strong"), {"tiers": ("light", "strong")}),
        (Need(backend="gvisor"), {"backends": ("gvisor",)}),
        (Need(image="i"), {"images": frozenset(["i"])}),
        (Need(labels={"zone": "a"}), {"labels": {"zone": "a"}}),
    ],
)
def test_what_a_node_has_since_is_found_and_what_it_has_no_more_is_not(
    need: Need, having: dict[str, Any]
) -> None:
    plain = _node(7, tiers=(), backends=(), images=frozenset(), labels={})
    fleet = Fleet([replace(plain, node_id="n1"), plain])
    fleet.put(replace(plain, **having))
    assert "n7" == fleet.choose(need, Random(1)).node_id
    fleet.put(plain)
    with pytest.raises(RingfenceError):
        fleet.choose(need, Random(1))
    assert {} == fleet._having
