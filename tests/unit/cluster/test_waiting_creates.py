"""Creates that wait, are asked again or are refused: what is counted, kept and given back meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from tests.unit.cluster.nodes_there import SECRET, Asked, NodeThere, Reply, Scene, form_of, scene_of
from tests.unit.cluster.test_placing import (
    PATIENCE_S,
    A,
    B,
    creates,
    made,
    place,
    refusing,
    snapshot_at,
)

from ringfence.api.access import gateways
from ringfence.api.access.caller import TOKEN, USER, Caller
from ringfence.cluster import placing as module
from ringfence.cluster.bindings import Binding
from ringfence.cluster.nodes import NoNodes
from ringfence.cluster.placement import Need
from ringfence.cluster.placing import Placing, read_whole
from ringfence.cluster.upstream import NotSent
from ringfence.errors import ResourceExhausted

pytestmark = pytest.mark.anyone

GROWS = {"scaling": {"min_nodes": 1, "max_nodes": 2, "wait_s": 100.0}}


class Client:
    """A client that stays: how often a part of the gateway listens for its leaving now."""

    def __init__(self) -> None:
        self.listeners = 0

    async def receive(self) -> Any:
        self.listeners += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.listeners -= 1


class Later:
    """Answer `first` so many times, and make what is asked for then; note how many waited at each."""

    def __init__(self, scene: Callable[[], Scene], first: Reply, times: int) -> None:
        self._scene, self._first, self._left = scene, first, times
        self.waiting: list[int] = []
        self.bounds: list[int | None] = []
        self.active = [3, 1, 0, 0]

    def __call__(self, asked: Asked) -> Reply:
        if asked.target == "/v1/stats":
            return 200, {}, {"active_sandboxes": self.active.pop(0)}
        self.waiting.append(self._scene().nodes.waiting)
        caller = gateways.unseal(
            SECRET, asked.headers[gateways.HEADER], asked.method, asked.target.encode()
        )
        assert caller is not None
        self.bounds.append(caller.max_sandboxes)
        self._left -= 1
        return self._first if self._left >= 0 else made(asked)


async def eventually(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


async def let_cancelled_tasks_end() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.005)
    monkeypatch.setattr(module, "AGAIN_S", 0.005)


@pytest.mark.parametrize("code", ["resource_exhausted", 503])
async def test_one_that_waits_counts_once_until_it_is_made(code: object, tmp_path: Path) -> None:
    """It asks the same node at each look, and nothing listens to its client any more once it is answered."""
    full: Reply = (503, {}, {"code": code, "message": "no"})
    answer = Later(lambda: scene, full, 3)
    async with scene_of(tmp_path, GROWS, **{A: answer}) as scene:
        scene.nodes.may_grow = True
        client = Client()
        inbound = scene.inbound()
        inbound.receive = client.receive
        found = await asyncio.wait_for(
            scene.placer.place(Placing(inbound, Need(), ["name"])), PATIENCE_S
        )
        assert found is not None
        assert 201 == found[0]
        assert [0, 1, 1, 1] == answer.waiting
        assert 0 == scene.nodes.waiting
        await let_cancelled_tasks_end()
        assert 0 == client.listeners


@pytest.mark.parametrize(
    ("status", "code"),
    [(422, "resource_exhausted"), (503, "image_not_found"), (503, "backend_unavailable")],
)
async def test_only_want_of_room_is_waited_for(status: int, code: str, tmp_path: Path) -> None:
    async with scene_of(tmp_path, GROWS, **{A: refusing(status, code)}) as scene:
        scene.nodes.may_grow = True
        assert status == (await place(scene))[0]
        assert {A: 1} == creates(scene)


async def test_a_bounded_client_is_counted_anew_at_each_try(tmp_path: Path) -> None:
    """Its sandboxes on other nodes may have ended while it waited; a token's bound is that of its client."""
    full: Reply = (503, {}, {"code": "resource_exhausted", "message": "no"})
    answer, elsewhere = Later(lambda: scene, full, 1), Later(lambda: scene, full, 0)
    answer.active = [0, 0]
    async with scene_of(tmp_path, GROWS, **{A: answer, B: elsewhere}) as scene:
        scene.put({**scene.there[B].form, "is_draining": True, "beat": "2"})
        scene.nodes.may_grow = True
        caller = Caller("ann", TOKEN, sandbox="sbx-1", max_sandboxes=5)
        assert 201 == (await place(scene, caller=caller))[0]
        assert [5 - 3, 5 - 1] == answer.bounds
        counts = [each for each in scene.there[B].asked if each.target == "/v1/stats"]
        for each in counts:
            whose = gateways.unseal(SECRET, each.headers[gateways.HEADER], "GET", b"/v1/stats")
            assert whose is not None
            assert (USER, "") == (whose.scope, whose.sandbox), "a token sees its sandbox alone"


async def test_the_bound_of_every_client_is_that_of_its_creates(tmp_path: Path) -> None:
    answer = Later(lambda: scene, made(Asked("", "", {}, b"")), 0)
    async with scene_of(tmp_path, {"manager": {"max_of_client": 5}}, **{A: answer}) as scene:
        assert 201 == (await place(scene))[0]
        assert [5 - 0] == answer.bounds


async def test_without_a_node_it_waits_for_the_first_one(tmp_path: Path) -> None:
    async with scene_of(tmp_path, GROWS, **{A: made}) as scene:
        gone = scene.nodes._known.pop(A)
        scene.nodes._rank()
        scene.nodes.may_grow = True
        task = asyncio.ensure_future(place(scene))
        await eventually(lambda: scene.nodes.waiting or task.done())
        assert not task.done()
        scene.put(gone.form)
        assert 201 == (await asyncio.wait_for(task, PATIENCE_S))[0]
        assert 0 == scene.nodes.waiting


async def test_where_the_only_node_cannot_be_reached_it_waits_for_another_one(
    tmp_path: Path,
) -> None:
    async with scene_of(tmp_path, **{B: refusing(503, "resource_exhausted")}) as scene:
        scene.put({**scene.there[B].form, "is_draining": True, "beat": "2"})
        scene.put(form_of(A, tmp_path / "nothing"))
        with pytest.raises(ResourceExhausted, match="that refused"):  # at once
            await place(scene)
        assert {B: 0} == creates(scene), "it drains"
    async with scene_of(tmp_path, GROWS, **{B: refusing(503, "resource_exhausted")}) as scene:
        scene.put({**scene.there[B].form, "is_draining": True, "beat": "2"})
        scene.put(form_of(A, tmp_path / "nothing"))
        scene.nodes.may_grow = True
        task = asyncio.ensure_future(place(scene))
        await eventually(lambda: scene.nodes.waiting or task.done())
        assert not task.done()
        scene.there[B].answer = made
        scene.put({**scene.there[B].form, "beat": "3"})
        assert 201 == (await asyncio.wait_for(task, PATIENCE_S))[0]


async def test_nodes_that_are_silent_get_nothing_and_those_that_can_do_nothing_say_it(
    tmp_path: Path,
) -> None:
    async with scene_of(tmp_path, **{A: refusing(422, "backend_unavailable")}) as scene:
        scene.put({**scene.there[A].form, "backends": [], "beat": "2"})
        assert 422 == (await place(scene))[0]
        node = scene.nodes.find(A)
        assert node is not None
        node.heard_at -= 100.0
        scene.nodes._rank()
        with pytest.raises(NoNodes):
            await place(scene)
        assert {A: 1} == creates(scene)


async def test_one_that_could_not_be_reached_just_now_is_not_tried_first(tmp_path: Path) -> None:
    async with scene_of(tmp_path, **{A: made, B: made}) as scene:
        scene.put({**scene.there[A].form, "load": -50.0, "beat": "2"})  # it would be chosen
        assert 201 == (await place(scene))[0]
        assert {A: 1, B: 0} == creates(scene)
        node = scene.nodes.find(A)
        assert node is not None
        node.unreached_at = time.monotonic()
        for _ in range(3):
            assert 201 == (await place(scene))[0]
        assert {A: 1, B: 3} == creates(scene)


async def test_a_named_request_waits_for_its_node_to_be_started_again(tmp_path: Path) -> None:
    """Elsewhere it could be made twice."""
    async with scene_of(tmp_path, **{B: made}) as scene:
        scene.put({**scene.there[B].form, "is_draining": True, "beat": "2"})
        scene.put(form_of(A, tmp_path / A))
        task = asyncio.ensure_future(place(scene, "name"))
        await eventually(lambda: scene.nodes.unreached() or task.done())
        assert not task.done()
        node = NodeThere(A, tmp_path / A, made, {})
        node.server = await asyncio.start_unix_server(node.serve, tmp_path / A)
        scene.there[A] = node

        assert 201 == (await asyncio.wait_for(task, PATIENCE_S))[0]
        assert {A: 1, B: 0} == creates(scene)


@pytest.mark.parametrize("how", [{"node": A}, {"near": snapshot_at(A)}])
async def test_a_node_that_alone_will_do_is_not_tried_for_ever(
    how: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAIT_S", 0.05)
    async with scene_of(tmp_path, **{B: made}) as scene:
        scene.put(form_of(A, tmp_path / "nothing"))
        with pytest.raises(NotSent):
            await place(scene, **how)
        assert {B: 0} == creates(scene)


async def test_each_name_has_the_id_of_what_was_made_also_after_a_later_refusal(
    tmp_path: Path,
) -> None:
    """Without it the name would be forgotten while the sandbox lives."""
    async with scene_of(tmp_path, **{A: made}) as scene:
        await place(scene, "one", "two")
        scene.there[A].answer = refusing(400, "invalid_request")
        assert 400 == (await place(scene, "one", "two"))[0]
        for name in ("one", "two"):
            assert "native-1" == Binding.read(scene.store.values[f"bind/{name}"]).made


async def test_two_of_one_name_take_turns(tmp_path: Path) -> None:
    async with scene_of(tmp_path, **{A: made}) as scene:
        turns = scene.placer._turns
        async with turns.here("name"):
            task = asyncio.ensure_future(place(scene, "", "name"))
            await eventually(lambda: [2] == turns._locks["name"][1] or task.done())
            await let_cancelled_tasks_end()
            assert not task.done()
            assert {A: 0} == creates(scene)
        assert 201 == (await asyncio.wait_for(task, PATIENCE_S))[0]


async def test_a_body_is_whole_once_no_more_follows_and_not_when_its_client_leaves() -> None:
    async def read(*messages: dict[str, Any]) -> bytes:
        left = [*messages]

        async def receive() -> dict[str, Any]:
            return left.pop(0)

        return await read_whole(receive)

    first = {"type": "http.request", "body": b"a", "more_body": True}
    assert b"ab" == await read(first, {"type": "http.request", "body": b"b"})
    assert b"a" == await read(first, {"type": "http.request", "more_body": False})
    with pytest.raises(ClientDisconnect):
        await read(first, {"type": "http.disconnect"})
