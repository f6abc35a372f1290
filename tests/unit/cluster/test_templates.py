"""Templates behind a gateway: the home where a client builds, and the node whose a template is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cluster.nodes_there import SECRET, Asked, Reply, Scene, scene_of

from ringfence.api.access import gateways
from ringfence.api.access.caller import ADMIN, USER, Caller
from ringfence.cluster.bindings import Binding
from ringfence.cluster.placement import rendezvous
from ringfence.cluster.templates import Templates, _home_key
from ringfence.errors import ResourceExhausted
from ringfence.model.spec import SandboxSpec
from ringfence.model.template import TemplateRequest, TemplateStep

pytestmark = pytest.mark.anyone
A, B = "0000000a", "0000000b"


def saying(form: object, status: int = 200) -> Any:
    return lambda _asked: (status, {}, form)


class TestTemplates:
    def scene_templates(self, scene: Scene) -> Templates:
        store: Any = scene.store
        return Templates(store, scene.nodes, scene.scatter)

    async def test_a_home_stays_until_it_drains_or_is_lost(self, tmp_path: Path) -> None:
        async with scene_of(tmp_path, **{A: saying({}), B: saying({})}) as scene:
            templates = self.scene_templates(scene)
            first = (await templates.home("ann")).tag
            assert first == (await self.scene_templates(scene).home("ann")).tag
            scene.put({**scene.there[first].form, "is_draining": True, "beat": "2"})
            second = (await templates.home("ann")).tag
            assert {A, B} == {first, second}
            scene.put({**scene.there[first].form, "beat": "3"})
            assert second == (await templates.home("ann")).tag, "it does not go back"
            scene.lose(second)
            assert first == (await templates.home("ann")).tag

    async def test_where_all_drain_a_home_is_kept(self, tmp_path: Path) -> None:
        async with scene_of(tmp_path, **{A: saying({}), B: saying({})}) as scene:
            for tag in (A, B):
                scene.put({**scene.there[tag].form, "is_draining": True, "beat": "2"})
            assert (await self.scene_templates(scene).home("ann")).tag in (A, B)

    async def test_a_home_is_where_a_backend_works(self, tmp_path: Path) -> None:
        first, second = rendezvous("ann", (A, B), 2)
        async with scene_of(tmp_path, **{A: saying({}), B: saying({})}) as scene:
            scene.put({**scene.there[first].form, "backends": [], "beat": "2"})
            assert second == (await self.scene_templates(scene).home("ann")).tag

    async def test_a_home_is_the_one_that_the_first_gateway_chose(self, tmp_path: Path) -> None:
        first, second = rendezvous("ann", (A, B), 2)
        async with scene_of(tmp_path, **{A: saying({}), B: saying({})}) as scene:
            put_first = scene.store.put_first

            def late(key: str, value: bytes) -> bytes:
                assert first == Binding.read(value).node
                put_first(key, Binding(second, 1.0).written())
                return put_first(key, value)

            scene.store.put_first = late  # type: ignore[method-assign]
            for _ in range(2):
                assert second == (await self.scene_templates(scene).home("ann")).tag

    async def test_a_node_that_has_no_room_to_answer_says_so(self, tmp_path: Path) -> None:
        full = saying({"code": "resource_exhausted", "message": "full"}, 503)
        async with scene_of(tmp_path, **{A: self.answering(), B: full}) as scene:
            with pytest.raises(ResourceExhausted, match="full"):
                await self.scene_templates(scene).source("web", Caller("ann", USER))

    @pytest.mark.parametrize("present", [True, False])
    async def test_only_an_upload_that_is_at_home_is_copied(
        self, present: bool, tmp_path: Path
    ) -> None:
        def at_home(asked: Asked) -> Reply:
            if "uploads" in asked.target:
                is_tar = "tar" in asked.headers.get("accept", "")
                return 200, {}, b"content" if is_tar else {"present": present}
            answer: Reply = self.answering()(asked)
            return answer

        def elsewhere(asked: Asked) -> Reply:
            if "uploads" in asked.target:
                return 200, {}, {"present": False}
            answer: Reply = self.answering(self.form(B))(asked)
            return answer

        async with scene_of(tmp_path, **{A: at_home, B: elsewhere}) as scene:
            scene.store.put(_home_key("ann"), Binding(A, time.time()).written())
            steps = (TemplateStep(copy="0" * 64, to="/x"),)
            request = TemplateRequest("mine", steps, SandboxSpec(template="web"))
            copied: list[Any] = []

            async def copy(*parts: Any) -> None:
                copied.append(parts[3])

            scene.scatter.copy = copy  # type: ignore[method-assign, assignment]
            site = await self.scene_templates(scene).site(request, Caller("ann", USER))
            assert B == site.tag
            assert ([b"/v1/uploads/" + b"0" * 64] if present else []) == copied

    def form(self, tag: str, **changes: Any) -> dict[str, Any]:
        form: dict[str, Any] = {
            "id": f"tpl-0190b5a4-0000-7000-8000-{tag}0000",
            "name": "web",
            "build_id": "b",
        }
        form |= {"tags": {}, "owner": "ann", "is_ready": True, "updated_at": 1.0}
        return {**form, **changes}

    def answering(self, *forms: dict[str, Any]) -> Any:
        def answer(asked: Asked) -> Reply:
            name = asked.target.rpartition("/")[2]
            found = [each for each in forms if name in (each["name"], each["id"])]
            if name == "templates":
                return 200, {}, {"items": list(forms)}
            return (
                (200, {}, {"items": found})
                if found
                else (404, {}, {"code": "not_found", "message": "none"})
            )

        return answer

    @pytest.mark.parametrize(
        ("ready", "shares", "expected"), [(True, False, B), (True, True, ""), (False, True, B)]
    )
    async def test_a_template_is_used_on_its_node_unless_it_is_shared(
        self, ready: bool, shares: bool, expected: str, tmp_path: Path
    ) -> None:
        config = {"snapshot_store": "s3://x"} if shares else {}
        answers = {A: self.answering(), B: self.answering(self.form(B, is_ready=ready))}
        async with scene_of(tmp_path, config, **answers) as scene:
            templates = self.scene_templates(scene)
            assert expected == await templates.source("web", Caller("ann", USER))
            assert await templates.source("none", Caller("ann", USER)) is None
            assert await templates.source("default", Caller("ann", USER)) is None
            assert await templates.source("No Name", Caller("ann", USER)) is None
            assert B == (await templates.at("web", Caller("ann", USER))).tag

    async def test_ones_own_come_before_public_ones_and_ready_before_newer(
        self, tmp_path: Path
    ) -> None:
        public = self.form(A, owner="bob", updated_at=9.0)
        old, new = self.form(B, updated_at=2.0), self.form(B, updated_at=3.0, is_ready=False)
        new["id"] = f"tpl-0190b5a4-0000-7000-8001-{B}0000"
        answers = {A: self.answering(public), B: self.answering(new, old)}
        async with scene_of(tmp_path, **answers) as scene:
            templates = self.scene_templates(scene)
            found = await templates._forms("web", Caller("ann", USER), "")
            assert [old["id"], new["id"]] == [each["id"] for each in found]
            theirs = await templates._forms("web", Caller("root", ADMIN), "bob")
            assert [public["id"]] == [each["id"] for each in theirs]
            asked = scene.there[A].asked[-1]
            whose = gateways.unseal(
                SECRET, asked.headers[gateways.HEADER], "GET", b"/v1/templates/web"
            )
            assert whose is not None
            assert ("bob", USER) == (whose.client, whose.scope)

    async def test_a_template_of_a_lost_node_is_lost(self, tmp_path: Path) -> None:
        from ringfence.errors import SandboxLost

        async with scene_of(tmp_path, **{A: self.answering(), B: self.answering()}) as scene:
            templates = self.scene_templates(scene)
            name = self.form(B)["id"]
            assert B == (await templates.at(name, Caller("ann", USER))).tag
            scene.lose(B)
            with pytest.raises(SandboxLost):
                await templates.at(name, Caller("ann", USER))
