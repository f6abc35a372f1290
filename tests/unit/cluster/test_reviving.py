"""Sandboxes of drained nodes that are made again: by which node, and once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cluster.nodes_there import SECRET, Scene, form_of, scene_of
from tests.unit.cluster.test_placing import A, B, C, creates, made, refusing

from ringfence.api.access import gateways
from ringfence.api.access.caller import ADMIN, USER, Caller
from ringfence.cluster.bindings import Binding, id_name
from ringfence.cluster.moved import MOVED, Moved
from ringfence.cluster.nodes import Known
from ringfence.cluster.placing import key_name
from ringfence.cluster.reviving import bring_back, revive
from ringfence.errors import ResourceExhausted, SandboxLost, SandboxNotFound

pytestmark = pytest.mark.anyone

ID = f"sbx-0190b5a4-0000-7000-8000-{A}0000"
KEY = f"revived {ID} snap-9"
ANN = Caller("ann", USER)
WHOLE = {
    "id": ID,
    "session_id": "ses-1",
    "owner": "ann",
    "name": "n",
    "snapshot": "snap-9",
    "is_whole": True,
    "timeouts": {"idle_s": 7.0},
    "metadata": {"k": "v"},
    "state": "ready",
    "created_at": 1.0,
}


def restoring(scene: Scene, **loads: float) -> None:
    """Have these nodes restore what was saved, the idlest first."""
    for tag, load in loads.items():
        form = scene.there[tag].form if tag in scene.there else form_of(tag, Path("/nowhere"))
        scene.put({**form, "memory": {"gvisor": "x"}, "beat": "2", "load": load})


def moved(**changes: Any) -> Moved:
    facts: dict[str, Any] = {"owner": "ann", "snapshot": "snap-9", "name": "n"}
    facts |= {"timeouts": {"idle_s": 7.0}, "metadata": {"k": "v"}, "backend": "gvisor"}
    facts |= {"needs": "x", "image": None, "left": A, "at": 1.0, **changes}
    return Moved(**facts)


async def back(scene: Scene, caller: Caller = ANN, **changes: Any) -> Known | None:
    if f"{MOVED}{ID}" not in scene.store.values:
        scene.store.put(f"{MOVED}{ID}", moved(**changes).written())
    return await bring_back(ID, caller, scene.nodes, scene.placer)


def lives_at(scene: Scene) -> str:
    return Moved.read(scene.store.values[f"{MOVED}{ID}"]).node


def bound(scene: Scene) -> dict[str, str]:
    """The nodes that the names of the sandbox are bound to."""
    names = {"id": id_name(ID), "key": key_name("ann", "sandbox", KEY)}
    found = {each: scene.store.get(f"bind/{name}") for each, name in names.items()}
    return {each: Binding.read(value).node for each, value in found.items() if value}


class TestSavedFiles:
    async def test_what_is_made_again_is_all_that_was_saved_and_made_once(
        self, tmp_path: Path
    ) -> None:
        async with scene_of(tmp_path, **{A: made, B: made}) as scene:
            await revive(ID, ANN, scene.nodes, scene.placer)
            assert {A: 0, B: 0} == creates(scene), "its node lives"
            scene.lose(A, WHOLE)
            await revive(ID, Caller("bob", USER), scene.nodes, scene.placer)
            assert {A: 0, B: 0} == creates(scene)

            await revive(ID, Caller("root", ADMIN), scene.nodes, scene.placer)

            [asked] = scene.there[B].asked
            assert KEY == asked.headers["idempotency-key"]
            expected: dict[str, object] = {"id": ID, "snapshot_id": "snap-9", "name": "n"}
            expected |= {"timeouts": {"idle_s": 7.0}, "metadata": {"k": "v"}}
            assert expected == json.loads(asked.body)
            assert {"id": B, "key": B} == bound(scene)
            await revive(ID, ANN, scene.nodes, scene.placer)
            assert {A: 0, B: 1} == creates(scene), "it lives there now"

    async def test_a_refusal_is_told(self, tmp_path: Path) -> None:
        answers = {A: made, B: refusing(503, "resource_exhausted")}
        async with scene_of(tmp_path, **answers) as scene:
            scene.lose(A, WHOLE)
            with pytest.raises(ResourceExhausted):
                await revive(ID, ANN, scene.nodes, scene.placer)


class TestSavedMemory:
    async def test_a_node_that_is_away_or_refuses_is_passed_over(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ringfence.cluster.placing.WAIT_S", 0.02)
        monkeypatch.setattr("ringfence.cluster.placing.AGAIN_S", 0.005)
        away = "0000000f"
        answers = {B: refusing(503, "resource_exhausted"), C: made}
        async with scene_of(tmp_path, **answers) as scene:
            restoring(scene, **{away: 0.0, B: 1.0, C: 2.0})
            found = await back(scene)
            assert found is not None
            assert C == found.tag == lives_at(scene)
            assert {B: 1, C: 1} == creates(scene)
            assert KEY == scene.there[C].asked[0].headers["idempotency-key"]
            assert {"id": C, "key": C} == bound(scene)

    async def test_where_all_are_away_it_is_bound_to_none(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ringfence.cluster.placing.WAIT_S", 0.02)
        monkeypatch.setattr("ringfence.cluster.placing.AGAIN_S", 0.005)
        async with scene_of(tmp_path) as scene:
            restoring(scene, **{B: 0.0})
            with pytest.raises(Exception, match="does not answer"):
                await back(scene)
            assert {} == bound(scene)
            assert "" == lives_at(scene)

    async def test_the_node_that_another_gateway_has_chosen_has_it(self, tmp_path: Path) -> None:
        async with scene_of(tmp_path, **{B: made, C: made}) as scene:
            restoring(scene, **{B: 0.0})
            key = key_name("ann", "sandbox", KEY)
            scene.store.put(f"bind/{key}", Binding(C, 1.0).written())
            found = await back(scene)
            assert found is not None
            assert C == found.tag == lives_at(scene)
            assert {B: 0, C: 1} == creates(scene)

    async def test_one_that_has_gone_on_to_a_third_node_is_found_there(
        self, tmp_path: Path
    ) -> None:
        async with scene_of(tmp_path, **{B: made, C: made}) as scene:
            scene.lose(B, WHOLE)
            scene.store.put(f"bind/{id_name(ID)}", Binding(C, 1.0, ID).written())
            found = await back(scene, node=B)
            assert found is not None
            assert C == found.tag
            assert {B: 0, C: 0} == creates(scene)

    async def test_it_is_brought_back_for_its_owner_and_no_other_client(
        self, tmp_path: Path
    ) -> None:
        async with scene_of(tmp_path, **{B: made}) as scene:
            restoring(scene, **{B: 0.0})
            with pytest.raises(SandboxNotFound):
                await back(scene, Caller("bob", USER))
            assert {B: 0} == creates(scene)
            found = await back(scene, Caller("root", ADMIN))
            assert found is not None
            [asked] = scene.there[B].asked
            whose = gateways.unseal(
                SECRET, asked.headers[gateways.HEADER], "POST", b"/v1/sandboxes"
            )
            assert whose is not None
            assert ("ann", USER) == (whose.client, whose.scope), "it stays its owner's"

    async def test_that_it_went_with_a_later_node_is_told_to_its_owner(
        self, tmp_path: Path
    ) -> None:
        async with scene_of(tmp_path, **{B: made, C: made}) as scene:
            scene.lose(B, WHOLE)
            with pytest.raises(SandboxLost):
                await back(scene, node=B)
            assert await back(scene, Caller("bob", USER), node=B) is None
            assert {B: 0, C: 0} == creates(scene)

    async def test_the_node_that_it_has_left_is_asked_for_it_no_more(self, tmp_path: Path) -> None:
        async with scene_of(tmp_path, **{A: made, B: made}) as scene:
            restoring(scene, **{B: 0.0})
            scene.store.put(f"bind/{id_name(ID)}", Binding(A, 1.0, ID).written())
            found = await back(scene)
            assert found is not None
            assert (B, {A: 0, B: 1}) == (found.tag, creates(scene))
            assert B == bound(scene)["id"]
