"""Creates of one name at a gateway, and of one bounded client at all of them, are made one after the other."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.unit.cluster.stored import Stored

from ringfence.api.access.caller import USER, Caller
from ringfence.cluster import turns as module
from ringfence.cluster.nodes import Nodes
from ringfence.cluster.turns import Turns

pytestmark = pytest.mark.anyone

PATIENCE_S = 30.0
BOUNDED = Caller("ann", USER, max_sandboxes=1)


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


class _Beating(Stored):
    """A store in which the beat of one gateway goes on at each look, until it stands still."""

    def __init__(self) -> None:
        super().__init__(**{"gateway/other": b"1 0"})
        self.looks, self.is_alive = 0, True

    def get(self, key: str) -> bytes | None:
        if key == "gateway/other":
            self.looks += 1
            self.values[key] = b"%d 0" % (self.looks if self.is_alive else 0)
        return super().get(key)


async def _while(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while is_so():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


def _key_of(client: str, number: int) -> str:
    return f"turn/{hashlib.sha256(client.encode()).hexdigest()[:32]}/{number:012d}"


async def test_the_turn_of_a_gateway_is_over_once_its_beat_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_DEAD_S", 0.1)
    monkeypatch.setattr(module, "_POLL_S", 0.002)
    directory = _Beating()
    directory.put(_key_of("ann", 7), b"other 1234")
    began = time.monotonic()
    block = Block(_gateway(directory).of(BOUNDED, []))
    await _while(lambda: time.monotonic() - began < 0.3 or directory.looks < 20)
    assert not block.is_inside.is_set(), "it lives"

    directory.is_alive = False
    await block.inside()
    assert [_key_of("ann", 8)] == directory.list("turn/")
    await block.end()


async def test_the_turn_of_ones_own_gateway_lasts_however_long_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_DEAD_S", 0.02)
    monkeypatch.setattr(module, "_POLL_S", 0.002)
    directory: Any = Stored()
    nodes = Nodes(directory, lambda _: None)
    first = Block(Turns(directory, nodes).of(BOUNDED, []))
    await first.inside()
    mine = directory.get(_key_of("ann", 1))
    began = time.monotonic()
    second = Block(Turns(directory, nodes).of(BOUNDED, []))
    await _while(lambda: time.monotonic() - began < 0.1)
    assert not second.is_inside.is_set()
    await first.end()
    await second.inside()
    assert mine != directory.get(_key_of("ann", 2)), "each create is known by itself"
    await second.end()


@pytest.mark.parametrize("kind", [ValueError, asyncio.CancelledError])
async def test_a_create_that_fails_ends_its_turn(kind: type[BaseException]) -> None:
    directory = Stored()
    with pytest.raises(kind):
        async with _gateway(directory).of(BOUNDED, []):
            raise kind
    assert [b""] == [*directory.many("turn/").values()]


async def test_a_create_that_is_cancelled_while_its_turn_ends_ends_it_all_the_same() -> None:
    directory = Stored()
    goes_on = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        asyncio.get_running_loop().set_default_executor(pool)
        block = Block(_gateway(directory).of(BOUNDED, []))
        await block.inside()
        busy = pool.submit(goes_on.wait, PATIENCE_S)
        block.goes_on.set()
        await _let_others_run()  # it waits for the thread
        block.task.cancel()
        await _let_others_run()
        goes_on.set()
        assert busy.result(PATIENCE_S)
        with pytest.raises(asyncio.CancelledError):
            await block.task
        await _while(lambda: [b""] != [*directory.many("turn/").values()])


async def test_of_two_that_want_one_number_the_first_has_it_and_none_has_an_old_one() -> None:
    directory = Stored()
    turns = _gateway(directory)
    assert await turns._is_taken("turn/x/", "turn/x/000000000002", b"one 1")
    assert not await turns._is_taken("turn/x/", "turn/x/000000000002", b"two 2")
    assert {"turn/x/000000000002": b"one 1"} == directory.values
    assert not await turns._is_taken("turn/x/", "turn/x/000000000001", b"two 2")
    assert {"turn/x/000000000002": b"one 1"} == directory.values, "what was over long ago is gone"


async def test_all_older_turns_are_forgotten() -> None:
    directory = Stored()
    for number in (3, 4, 5):
        directory.put(_key_of("ann", number), b"")
    directory.put(_key_of("bob", 1), b"")
    async with _gateway(directory).of(BOUNDED, []):
        assert {_key_of("ann", 6), _key_of("bob", 1)} == {*directory.list("turn/")}
