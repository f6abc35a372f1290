"""Creates at a gateway: which node makes them, what becomes of a refusal, and of names and counts."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from tests.unit.cluster.nodes_there import SECRET, Asked, Reply, Scene, form_of, scene_of

from ringfence.api.access import gateways
from ringfence.api.access.caller import ADMIN, USER, Caller
from ringfence.cluster import placing as module
from ringfence.cluster.bindings import Binding, id_name
from ringfence.cluster.moved import MOVED, Moved
from ringfence.cluster.nodes import NoNodes
from ringfence.cluster.placement import Need
from ringfence.cluster.placing import Placing, key_name
from ringfence.cluster.reviving import bring_back
from ringfence.errors import BackendUnavailable, SandboxLost, SandboxNotFound

pytestmark = pytest.mark.anyone
A, B, C = "0000000a", "0000000b", "0000000c"
PATIENCE_S = 30.0


def made(_asked: Asked) -> Reply:
    return 201, {gateways.MADE: "native-1"}, {"id": "native-1"}


def refusing(status: int, code: object) -> Any:
    return lambda _asked: (status, {}, {"code": code, "message": "no"})


def counting(active: int) -> Any:
    """Answer for counts of a client, and make what is asked for."""
    return lambda asked: (
        (200, {}, {"active_sandboxes": active}) if asked.target == "/v1/stats" else made(asked)
    )


def creates(scene: Scene) -> dict[str, int]:
    """Count the creates that each node has got."""
    return {
        tag: sum(each.method == "POST" for each in node.asked) for tag, node in scene.there.items()
    }


async def place(scene: Scene, *names: str, **how: Any) -> tuple[int, Any]:
    caller = how.pop("caller", None)
    placing = Placing(scene.inbound(caller=caller), Need(), [*names], **how)
    answer = await asyncio.wait_for(scene.placer.place(placing), PATIENCE_S)
    assert answer is not None
    return answer[0], json.loads(answer[2])


async def test_a_create_goes_to_a_node_with_its_caller_and_its_names_are_bound(
    tmp_path: Path,
) -> None:
    async with scene_of(tmp_path, **{A: made}) as scene:
        caller = Caller("ann", USER, key="key-1")
        inbound = scene.inbound(query=b"x=1", body=b'{"a": 1}', caller=caller)
        placing = Placing(inbound, Need(), ["", "name"])
        await scene.placer.place(placing)

        [asked] = scene.there[A].asked
        assert ("POST", "/v1/sandboxes?x=1", b'{"a": 1}') == (
            asked.method,
            asked.target,
            asked.body,
        )
        seal = asked.headers[gateways.HEADER]
        found = gateways.unseal(SECRET, seal, "POST", asked.target.encode())
        assert found is not None
        assert ("ann", USER, "key-1") == (found.client, found.scope, found.gateway_key)
        start, body = scene.sent
        assert 201 == start["status"]
        assert gateways.MADE.encode() not in dict(start["headers"])
        assert {"id": "native-1"} == json.loads(body["body"])
        assert "native-1" == inbound.scope["state"]["made"]
        binding = Binding.read(scene.store.values["bind/name"])
        assert (A, "native-1") == (binding.node, binding.made)
        assert time.time() - 60 < binding.bound_at < time.time() + 1
        assert ["bind/name"] == scene.store.list("bind/")


async def test_what_made_nothing_leaves_a_binding_without_an_id(tmp_path: Path) -> None:
    async with scene_of(tmp_path, **{A: refusing(400, "invalid_request")}) as scene:
        await place(scene, "name")
        assert "" == Binding.read(scene.store.values["bind/name"]).made


@pytest.mark.parametrize(
    ("status", "code", "is_tried_elsewhere"),
    [
        (503, "resource_exhausted", True),
        (503, 503, True),
        (422, "backend_unavailable", True),
        (422, "image_not_found", True),
        (422, "unsupported", True),
        (422, "invalid_request", False),
        (503, "shutting_down", False),
        (409, "resource_exhausted", False),
        (400, "unsupported", False),
    ],
)
async def test_only_what_another_node_may_do_is_asked_of_another(
    status: int, code: object, is_tried_elsewhere: bool, tmp_path: Path
) -> None:
    answers = {A: refusing(status, code), B: made}
    async with scene_of(tmp_path, **answers) as scene:
        scene.store.put("bind/name", Binding(A, time.time()).written())

        found, form = await place(scene, "name")

        assert {A: 1, B: int(is_tried_elsewhere)} == creates(scene)
        assert (201 if is_tried_elsewhere else status) == found
        binding = Binding.read(scene.store.values["bind/name"])
        assert (B if is_tried_elsewhere else A) == binding.node
        assert is_tried_elsewhere == ("id" in form)


async def test_three_nodes_are_asked_at_most_and_the_last_refusal_is_the_answer(
    tmp_path: Path,
) -> None:
    tags = [f"0000000{digit}" for digit in "abcde"]
    answers = {tag: refusing(503, "resource_exhausted") for tag in tags}
    async with scene_of(tmp_path, **answers) as scene:
        status, form = await place(scene)
        assert (503, "resource_exhausted") == (status, form["code"])
        assert 3 == sum(creates(scene).values())
        assert {0, 1} == {*creates(scene).values()}
        assert 0 == scene.nodes.waiting


async def test_two_nodes_that_refuse_are_asked_once_each(tmp_path: Path) -> None:
    answers = {tag: refusing(422, "unsupported") for tag in (A, B)}
    async with scene_of(tmp_path, **answers) as scene:
        assert (422, "unsupported") == ((await place(scene))[0], "unsupported")
        assert {A: 1, B: 1} == creates(scene)


async def test_a_node_that_cannot_be_reached_is_passed_over_and_avoided(tmp_path: Path) -> None:
    async with scene_of(tmp_path, **{B: made}) as scene:
        scene.put(form_of(A, tmp_path / "nothing", load=-50.0))  # it would be chosen first
        assert 201 == (await place(scene))[0]
        assert {A} == scene.nodes.unreached()
        assert 201 == (await place(scene))[0]
        assert {B: 2} == creates(scene)


async def test_a_named_request_goes_where_the_name_is_bound_while_that_node_lives(
    tmp_path: Path,
) -> None:
    async with scene_of(tmp_path, **{A: made, B: made}) as scene:
        for _ in range(5):
            await place(scene, "name")
        assert {0, 5} == {*creates(scene).values()}
        first = max(creates(scene), key=lambda tag: creates(scene)[tag])

        scene.lose(first)
        await place(scene, "name")

        assert {first: 5, ({A, B} - {first}).pop(): 1} == creates(scene)


async def test_of_two_gateways_the_first_to_bind_decides(tmp_path: Path) -> None:
    async with scene_of(tmp_path, **{A: made, B: made}) as scene:
        one, two = scene.nodes.find(A), scene.nodes.find(B)
        assert one is not None
        assert two is not None
        assert one == await scene.placer.bind(["x"], one)
        assert one == await scene.placer.bind(["x", "y"], two), "and its other names follow"
        assert A == await scene.placer.bound("y")
        assert not await scene.placer.unbind(["x"], two)
        assert A == await scene.placer.bound("x")
        assert await scene.placer.unbind(["x", "y"], one)
        assert "" == await scene.placer.bound("x")
        await scene.placer.bind(["x"], one)
        await scene.placer.free("x", B)
        assert A == await scene.placer.bound("x")
        await scene.placer.free("x", A)
        assert "" == await scene.placer.bound("x")


async def test_a_name_of_a_lost_node_is_bound_anew(tmp_path: Path) -> None:
    async with scene_of(tmp_path, **{A: made}) as scene:
        node = scene.nodes.find(A)
        assert node is not None
        scene.store.put("bind/x", Binding(B, 1.0, "over").written())
        assert node == await scene.placer.bind(["x"], node)
        assert A == await scene.placer.bound("x")


async def test_only_names_that_are_bound_to_who_refused_are_freed(tmp_path: Path) -> None:
    async with scene_of(tmp_path, **{A: made, B: made}) as scene:
        for name, tag in (("x", A), ("y", B)):
            scene.store.put(f"bind/{name}", Binding(tag, 1.0).written())
        placing = Placing(scene.inbound(), Need(), ["x", "y"], tried={A}, refused=(503, [], b""))
        await scene.placer._free(placing)
        assert ["bind/y"] == scene.store.list("bind/")
        assert (set(), None) == (placing.tried, placing.refused)


async def test_a_name_that_another_gateway_binds_meanwhile_stays_bound(tmp_path: Path) -> None:
    def refuse(_asked: Asked) -> Reply:
        scene.store.put("bind/x", Binding(B, 1.0).written())
        return 503, {}, {"code": "resource_exhausted", "message": "no"}

    async with scene_of(tmp_path, **{A: refuse, B: made}) as scene:
        scene.store.put("bind/x", Binding(A, 1.0).written())
        assert 503 == (await place(scene, "x"))[0]
        assert {A: 1, B: 0} == creates(scene)
        assert B == await scene.placer.bound("x")


def snapshot_at(tag: str) -> str:
    return f"snap-0190b5a4-0000-7000-8000-{tag}0000"


async def test_what_one_node_alone_has_is_asked_of_no_other(tmp_path: Path) -> None:
    answers = {A: refusing(503, "resource_exhausted"), B: made}
    async with scene_of(tmp_path, **answers) as scene:
        assert 503 == (await place(scene, near=snapshot_at(A)))[0]
        assert 503 == (await place(scene, node=A))[0]
        assert {A: 2, B: 0} == creates(scene)


@pytest.mark.parametrize("shares", [True, False])
async def test_a_snapshot_of_a_lost_node_is_lost_unless_it_is_shared(
    shares: bool, tmp_path: Path
) -> None:
    config = {"snapshot_store": "s3://x"} if shares else {}
    async with scene_of(tmp_path, config, **{A: made, B: made}) as scene:
        scene.lose(A)
        if shares:
            assert 201 == (await place(scene, near=snapshot_at(A)))[0]
            assert scene.nodes.heir(snapshot_at(B), B) is None, "that one lives"
            assert scene.nodes.heir(snapshot_at(A).replace("snap", "sbx"), A) is None
        else:
            with pytest.raises(SandboxLost):
                await place(scene, near=snapshot_at(A))
        assert {A: 0, B: int(shares)} == creates(scene)


@pytest.mark.parametrize(("most", "left"), [(5, 2), (3, 0), (2, 0)])
async def test_a_bounded_client_gets_what_other_nodes_leave_of_its_bound(
    most: int, left: int, tmp_path: Path
) -> None:
    async with scene_of(tmp_path, **{A: counting(3), B: counting(7)}) as scene:
        scene.put({**scene.there[A].form, "is_draining": True, "beat": "2"})
        scene.there[B].answer = counting(7)
        caller = Caller("ann", ADMIN, max_sandboxes=most)
        assert 201 == (await place(scene, caller=caller))[0]

        [create] = [each for each in scene.there[B].asked if each.method == "POST"]
        found = gateways.unseal(SECRET, create.headers[gateways.HEADER], "POST", b"/v1/sandboxes")
        assert found is not None
        assert left == found.max_sandboxes
        [count] = [each for each in scene.there[A].asked if each.target == "/v1/stats"]
        asked = gateways.unseal(SECRET, count.headers[gateways.HEADER], "GET", b"/v1/stats")
        assert asked is not None
        assert USER == asked.scope, "an admin's counts are of everybody"


@pytest.mark.parametrize(
    ("own", "every", "expected"),
    [(None, None, None), (3, None, 3), (None, 4, 4), (3, 4, 3), (5, 4, 4)],
)
async def test_the_lower_of_two_bounds_holds(
    own: int | None, every: int | None, expected: int | None, tmp_path: Path
) -> None:
    config = {"manager": {} if every is None else {"max_of_client": every}}
    async with scene_of(tmp_path, config) as scene:
        caller = Caller("ann", USER, max_sandboxes=own)
        assert expected == scene.nodes.bounded(caller).max_sandboxes


def is_waiting(scene: Scene, placing: Placing, ago_s: float) -> bool:
    return scene.placer._may_wait(placing, time.monotonic() - ago_s)


async def test_a_create_waits_for_a_new_node_only_where_one_may_come(tmp_path: Path) -> None:
    scaling = {"min_nodes": 1, "max_nodes": 2, "wait_s": 100.0}
    async with scene_of(tmp_path, {"scaling": scaling}, **{A: made}) as scene:
        plain = Placing(scene.inbound(), Need())
        assert not is_waiting(scene, plain, 0.0001), "Ray is asked for none"
        scene.nodes.may_grow = True
        assert is_waiting(scene, plain, 1.0)
        assert not is_waiting(scene, plain, 101.0)
        assert not is_waiting(scene, replace(plain, near=snapshot_at(A)), 1.0)
        assert not is_waiting(scene, replace(plain, node=A), 1.0)
        scene.nodes.waiting = module._MOST_WAITING - 1
        assert is_waiting(scene, plain, 1.0)
        scene.nodes.waiting += 1
        assert not is_waiting(scene, plain, 1.0)


async def test_one_that_waits_is_counted_until_its_client_leaves_and_frees_its_names(
    tmp_path: Path,
) -> None:
    scaling = {"min_nodes": 1, "max_nodes": 2, "wait_s": 100.0}
    answers = {A: refusing(503, "resource_exhausted")}
    async with scene_of(tmp_path, {"scaling": scaling}, **answers) as scene:
        scene.nodes.may_grow = True
        inbound = scene.inbound()
        leaves, waits = asyncio.Event(), asyncio.Event()

        async def receive() -> Any:
            if scene.nodes.waiting:
                waits.set()
            await leaves.wait()
            return {"type": "http.disconnect"}

        inbound.receive = receive
        placing = Placing(inbound, Need(), ["name"])
        task = asyncio.ensure_future(scene.placer.place(placing))
        await asyncio.wait_for(waits.wait(), PATIENCE_S)
        assert 1 == scene.nodes.waiting
        assert [] == scene.store.list("bind/")
        leaves.set()

        with pytest.raises(ClientDisconnect):
            await task
        assert 0 == scene.nodes.waiting


async def test_a_client_that_leaves_has_its_create_undone(tmp_path: Path) -> None:
    async with scene_of(tmp_path, **{A: lambda _asked: None}) as scene:
        inbound = scene.inbound()

        async def receive() -> Any:
            await scene.there[A].is_asked.wait()
            return {"type": "http.disconnect"}

        inbound.receive = receive
        with pytest.raises(ClientDisconnect):
            await scene.placer.place(Placing(inbound, Need()))
        await asyncio.wait_for(scene.there[A].has_left.wait(), PATIENCE_S)
        assert [] == scene.sent


async def test_without_a_node_nothing_is_sent(tmp_path: Path) -> None:
    async with scene_of(tmp_path) as scene:
        with pytest.raises(NoNodes):
            await place(scene)
        assert 0 == scene.nodes.waiting


def test_keys_of_clients_and_kinds_are_apart() -> None:
    names = [
        key_name(*each)
        for each in (("a", "k", "x"), ("b", "k", "x"), ("a", "l", "x"), ("a", "k", "y"))
    ]
    assert 4 == len({*names})
    assert "" == key_name("a", "k", "")
    assert "" == id_name("")


class TestBringingBack:
    ID = f"sbx-0190b5a4-0000-7000-8000-{A}0000"

    def moved(self, **changes: Any) -> Moved:
        facts: dict[str, Any] = {"owner": "ann", "snapshot": "snap-9", "name": "n", "timeouts": {}}
        facts |= {"metadata": {"k": "v"}, "backend": "gvisor", "needs": "x", "image": None}
        return Moved(**{**facts, "left": A, "at": 1.0, **changes})

    def put(self, scene: Scene, **changes: Any) -> None:
        scene.store.put(f"{MOVED}{self.ID}", self.moved(**changes).written())

    async def back(self, scene: Scene, caller: Caller) -> Any:
        return await bring_back(self.ID, caller, scene.nodes, scene.placer)

    async def test_an_unknown_one_is_no_bodys(self, tmp_path: Path) -> None:
        async with scene_of(tmp_path, **{B: made}) as scene:
            assert await self.back(scene, Caller("ann", USER)) is None

    @pytest.mark.parametrize("client", ["ann", "root", "bob"])
    async def test_its_owner_or_an_admin_has_it_restored_where_that_can_be(
        self, client: str, tmp_path: Path
    ) -> None:
        async with scene_of(tmp_path, **{A: made, B: made, C: made}) as scene:
            for tag, memory in ((A, {}), (B, {"gvisor": "x"}), (C, {"gvisor": "other"})):
                scene.put({**scene.there[tag].form, "memory": memory, "beat": "2"})
            self.put(scene)
            scene.store.put(f"bind/{id_name(self.ID)}", Binding(A, 1.0, self.ID).written())
            if client == "bob":
                with pytest.raises(SandboxNotFound):
                    await self.back(scene, Caller("bob", USER))
                assert {A: 0, B: 0, C: 0} == creates(scene)
                return

            found = await self.back(scene, Caller(client, ADMIN if client == "root" else USER))

            assert B == found.tag
            assert {A: 0, B: 1, C: 0} == creates(scene)
            form = json.loads(scene.there[B].asked[0].body)
            assert (self.ID, "snap-9", "n") == (form["id"], form["snapshot_id"], form["name"])
            seal = scene.there[B].asked[0].headers[gateways.HEADER]
            whose = gateways.unseal(SECRET, seal, "POST", b"/v1/sandboxes")
            assert whose is not None
            assert ("ann", USER) == (whose.client, whose.scope), "it is its owner's again"
            assert B == Moved.read(scene.store.values[f"{MOVED}{self.ID}"]).node
            assert B == await scene.placer.bound(id_name(self.ID))
            again = await self.back(scene, Caller("ann", USER))
            assert B == again.tag
            assert 1 == creates(scene)[B]

    async def test_what_no_node_restores_says_what_that_takes(self, tmp_path: Path) -> None:
        async with scene_of(tmp_path, **{B: made}) as scene:
            self.put(scene)
            with pytest.raises(BackendUnavailable, match="gvisor by x"):
                await self.back(scene, Caller("ann", USER))

    async def test_a_node_that_refuses_or_is_away_is_unbound_and_its_error_told(
        self, tmp_path: Path
    ) -> None:
        async with scene_of(tmp_path, **{B: refusing(503, "resource_exhausted")}) as scene:
            scene.put({**scene.there[B].form, "memory": {"gvisor": "x"}, "beat": "2"})
            self.put(scene)
            with pytest.raises(Exception, match="no"):
                await self.back(scene, Caller("ann", USER))
            assert [] == scene.store.list("bind/")
            assert "" == Moved.read(scene.store.values[f"{MOVED}{self.ID}"]).node

    async def test_one_whose_node_since_is_gone_is_lost_for_its_owner(self, tmp_path: Path) -> None:
        async with scene_of(tmp_path, **{B: made}) as scene:
            self.put(scene, node=B)
            sandbox = {"id": self.ID, "session_id": "ses-1", "owner": "ann", "name": "n"}
            scene.lose(B, {**sandbox, "state": "ready", "created_at": 1.0})
            with pytest.raises(SandboxLost):
                await self.back(scene, Caller("ann", USER))
            assert await self.back(scene, Caller("bob", USER)) is None
