"""The size of a cluster, decided from samples: growth, what is kept, what is let go."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from ringfence.cluster.scaling import BY_OPERATOR, BY_SCALING, Policy, Sample, room_of
from ringfence.daemon.membership import Scaling
from ringfence.errors import InvalidRequest

pytestmark = pytest.mark.anyone

CONFIG = Scaling(max_nodes=4, spare=1, idle_s=10.0)
HEAD = Sample("head", is_head=True, room=2, size=2)
FULL_HEAD = replace(HEAD, active=2, room=0)
IDLE = Sample("a", room=2, size=2)
STARTS = Sample("b", is_known=False)


def test_it_asks_for_what_is_missing_and_for_no_more_while_that_starts() -> None:
    policy = Policy(CONFIG)
    assert 0 == policy.decide([HEAD], 0, 0.0).asked
    # Three wait, and one is to be spare: four sandboxes, two for each node.
    assert (3, 3) == _size(policy.decide([FULL_HEAD], 3, 1.0))
    assert (3, 3) == _size(policy.decide([FULL_HEAD, STARTS], 3, 2.0))
    assert (3, 3) == _size(policy.decide([FULL_HEAD, STARTS, replace(STARTS, ray_id="c")], 3, 3.0))
    # Once it is there, its actor keeps it: Ray is asked for nothing.
    busy = replace(IDLE, active=2, room=0)
    assert (3, 0) == _size(policy.decide([FULL_HEAD, busy, replace(IDLE, ray_id="c")], 0, 4.0))


def test_it_asks_for_no_more_than_may_be() -> None:
    policy = Policy(CONFIG)
    assert (4, 4) == _size(policy.decide([FULL_HEAD], 100, 0.0))
    drained = replace(FULL_HEAD, ray_id="d", is_head=False, drain=BY_OPERATOR)
    assert (3, 4) == _size(policy.decide([FULL_HEAD, drained], 100, 0.0))


def test_a_head_without_processors_is_in_no_bundle() -> None:
    """Else Ray would start one node more than is missing."""
    head = replace(FULL_HEAD, fits=False)
    assert (2, 1) == _size(Policy(CONFIG).decide([head], 0, 0.0))


def test_a_node_that_never_starts_is_made_up_for() -> None:
    policy = Policy(CONFIG)
    assert (2, 2) == _size(policy.decide([FULL_HEAD, STARTS], 0, 0.0))
    assert (2, 3) == _size(policy.decide([FULL_HEAD, STARTS], 0, 300.0))


def _size(decision: object) -> tuple[int, int]:
    return decision.wanted, decision.asked  # type: ignore[attr-defined]


def test_an_idle_node_drains_at_once_and_is_released_after_a_while() -> None:
    policy = Policy(CONFIG)
    assert ("a",) == policy.decide([HEAD, IDLE], 0, 0.0).drain
    drains = replace(IDLE, drain=BY_SCALING, is_empty=True)
    assert () == policy.decide([HEAD, drains], 0, 9.0).release
    assert ("a",) == policy.decide([HEAD, drains], 0, 10.0).release
    assert () == policy.decide([HEAD, replace(drains, is_empty=False)], 0, 11.0).release


@pytest.mark.parametrize(
    "why",
    [
        {"active": 1},
        {"waiting": 1},
        {"keeps": True},
        {"is_head": True},
        {"is_fresh": False},
        {"drain": BY_OPERATOR},
    ],
)
def test_a_node_that_is_needed_is_never_drained_or_released(why: dict[str, object]) -> None:
    policy, node = Policy(CONFIG), replace(IDLE, is_empty=True, **why)  # type: ignore[arg-type]
    for now in (0.0, 100.0):
        decision = policy.decide([HEAD, node], 0, now)
        assert () == decision.drain == decision.release


def test_use_in_between_begins_the_wait_anew() -> None:
    policy = Policy(CONFIG)
    idle = replace(IDLE, drain=BY_SCALING, is_empty=True)
    policy.decide([HEAD, idle], 0, 0.0)
    policy.decide([HEAD, replace(IDLE, active=1, room=1)], 0, 9.0)
    assert () == policy.decide([HEAD, idle], 0, 12.0).release
    assert ("a",) == policy.decide([HEAD, idle], 0, 22.0).release


def test_what_drains_or_was_released_is_taken_back_before_ray_is_asked() -> None:
    policy = Policy(CONFIG)
    drains = replace(IDLE, drain=BY_SCALING)
    decision = policy.decide([FULL_HEAD, drains], 1, 0.0)
    assert (("a",), 0) == (decision.undrain, decision.asked)
    decision = policy.decide([FULL_HEAD, replace(IDLE, is_known=False, is_released=True)], 1, 0.0)
    assert (("a",), 0) == (decision.reclaim, decision.asked)


def test_no_history_interrupts_anybody_or_grows_beyond_its_bound() -> None:
    """Random histories: a node with sandboxes is never let go, and the room that is wanted is asked for."""
    for seed in range(300):
        draw, policy = random.Random(seed), Policy(CONFIG)
        for step in range(30):
            samples = [HEAD, *(_any(draw, f"n{i}") for i in range(draw.randrange(4)))]
            waiting = draw.randrange(4)
            decision = policy.decide(samples, waiting, step * 5.0)
            by_id = {each.ray_id: each for each in samples}
            for ray_id in (*decision.drain, *decision.release):
                assert not by_id[ray_id].is_needed
                assert BY_OPERATOR != by_id[ray_id].drain
            assert decision.asked <= max(CONFIG.max_nodes, len(samples))
            room = sum(each.room for each in samples if each.drain != BY_OPERATOR)
            if room < waiting + CONFIG.spare and len(samples) < CONFIG.max_nodes:
                helped = decision.asked or decision.reclaim
                assert helped or any(not each.is_known for each in samples)


def _any(draw: random.Random, ray_id: str) -> Sample:
    active = draw.choice((0, 0, 1, 2))
    return Sample(
        ray_id,
        is_known=draw.random() < 0.9,
        is_fresh=draw.random() < 0.9,
        active=active,
        room=2 - active,
        size=2,
        keeps=draw.random() < 0.1,
        drain=draw.choice(("", "", BY_SCALING, BY_OPERATOR)),
        is_empty=draw.random() < 0.5,
    )


def test_room_is_the_least_of_slots_memory_and_load() -> None:
    form: dict[str, Any] = {
        "active": 2,
        "max_sandboxes": 10,
        "free_memory_bytes": 1 << 30,
        "load": 0.5,
        "cpus": 1,
    }
    form["backends"] = ["native"]
    assert (0, 0) == room_of({**form, "backends": []}, CONFIG)
    assert (4, 4) == room_of(form, CONFIG)
    assert (8, 8) == room_of({**form, "free_memory_bytes": 1 << 40}, CONFIG)
    assert (0, 4) == room_of({**form, "load": 1.5}, CONFIG)
    assert (4, 4) == room_of({**form, "load": 1.5}, replace(CONFIG, load=0.0))


@pytest.mark.parametrize(
    "bad", [{"max_nodes": 0}, {"max_nodes": 1, "min_nodes": 2}, {"max_nodes": 1, "resources": []}]
)
def test_a_configuration_that_cannot_be_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        Scaling.from_json(bad)


def test_nodes_on_which_nothing_fits_or_of_which_there_are_too_many_stop_no_decision() -> None:
    """An operator may have added more than the bound; a node may have no backend that works."""
    none = replace(FULL_HEAD, size=0, active=0, room=0)
    assert (4, 4) == _size(Policy(CONFIG).decide([none], 7, 0.0))
    full = [replace(FULL_HEAD, ray_id=f"n{number}") for number in range(6)]
    assert (6, 0) == _size(Policy(CONFIG).decide(full, 7, 0.0))


def test_nodes_that_start_count_among_the_least() -> None:
    config = Scaling(min_nodes=2, max_nodes=4, spare=0, idle_s=10.0)
    idle = [replace(IDLE, ray_id=each) for each in ("a", "c")]
    assert ("c",) == Policy(config).decide([*idle, STARTS], 0, 0.0).drain
    assert () == Policy(config).decide(idle, 0, 0.0).drain


def test_a_node_is_idle_since_it_is_known() -> None:
    policy = Policy(CONFIG)
    policy.decide([HEAD, replace(IDLE, is_known=False)], 0, 0.0)
    drains = replace(IDLE, drain=BY_SCALING, is_empty=True)
    assert () == policy.decide([HEAD, drains], 0, 9.0).release
    assert () == policy.decide([HEAD, drains], 0, 18.9).release
    assert ("a",) == policy.decide([HEAD, drains], 0, 19.0).release
