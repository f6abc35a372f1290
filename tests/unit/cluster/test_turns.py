"""Creates of one name at a gateway, and of one bounded client at all of them, are made one after the other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.cluster.stored import Stored

from ringfence.api.access.caller import USER, Caller
from ringfence.cluster.nodes import Nodes
from ringfence.cluster.turns import Turns

pytestmark = pytest.mark.anyone

PATIENCE_S = 30.0


def _gateway(directory: Any) -> Turns:
    return Turns(directory, Nodes(directory, lambda _: None))


class Block:
    """A turn that is held until it is told to end."""

    def __init__(self, turn: Any) -> None:
        self.is_inside, self.goes_on = asyncio.Event(), asyncio.Event()
        self.task = asyncio.ensure_future(self._hold(turn))

    async def _hold(self, turn: Any) -> None:
        async with turn:
            self.is_inside.set()
            await self.goes_on.wait()

    async def inside(self) -> None:
        await asyncio.wait_for(self.is_inside.wait(), PATIENCE_S)

    async def end(self) -> None:
        self.goes_on.set()
        await asyncio.wait_for(self.task, PATIENCE_S)


async def _let_others_run() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_turn_of_a_name_lasts_for_those_who_came_before_it_ended() -> None:
    """One holds, one waits; a third that comes when the first has gone waits for the second."""
    turns = _gateway(Stored())
    first, second = Block(turns.here("name")), Block(turns.here("name"))
    await first.inside()
    await _let_others_run()
    assert not second.is_inside.is_set()
    await first.end()
    await second.inside()
    third, other, unnamed = (Block(turns.here(each)) for each in ("name", "another", ""))
    await other.inside()
    await unnamed.inside()
    await _let_others_run()

    assert not third.is_inside.is_set()
    await second.end()
    await third.inside()
    for each in (third, other, unnamed):
        await each.end()
    assert {} == turns._locks


async def test_a_bounded_client_has_one_turn_at_all_gateways() -> None:
    directory = Stored()
    one, two = _gateway(directory), _gateway(directory)
    bounded, other = (Caller(each, USER, max_sandboxes=1) for each in ("ann", "bob"))
    first = Block(one.of(bounded, ["a"]))
    await first.inside()
    second = Block(two.of(bounded, ["b"]))
    others = [Block(two.of(other, ["c"])), Block(two.of(Caller("ann", USER), ["d"]))]
    for each in others:
        await each.inside()
        await each.end()

    assert not second.is_inside.is_set()
    await first.end()
    await second.inside()
    await second.end()
    assert {b""} == {*directory.many("turn/").values()}, "nobody has one"
    assert 2 == len(directory.list("turn/")), "of each client the last number alone"
