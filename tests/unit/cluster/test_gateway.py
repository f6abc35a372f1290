"""A gateway in front of nodes: which node a request goes to, and what no node gets."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.cluster.nodes_there import Asked, Reply, Scene, scene_of

from ringfence.api.access import gateways, permissions
from ringfence.api.access.caller import ADMIN, USER, Caller
from ringfence.cluster import gateway as module
from ringfence.cluster.bindings import Binding, id_name
from ringfence.cluster.directory import Directory
from ringfence.cluster.gateway import Behind, Gateway, GatewayService, need_of
from ringfence.cluster.moved import MOVED, Moved
from ringfence.cluster.nodes import KEYS_S, STALE_S
from ringfence.cluster.placing import key_name
from ringfence.errors import (
    InvalidRequest,
    LifecycleError,
    SandboxLost,
    ServerUnreachable,
    Unsupported,
)
from ringfence.model.spec import SandboxSpec

pytestmark = pytest.mark.anyone
A, B = "0000000a", "0000000b"
PATIENCE_S = 30.0


def id_at(tag: str, prefix: str = "native") -> str:
    return f"{prefix}-0190b5a4-0000-7000-8000-{tag}0000"


def made(asked: Asked) -> Reply:
    if asked.method == "GET" and asked.target.startswith("/v1/templates"):
        return 404, {}, {"code": "not_found", "message": "none"}
    return 201, {gateways.MADE: "native-1"}, {"id": "native-1"}


def having_template(tag: str) -> Callable[[Asked], Reply]:
    """Answer as a node that has the template `tools`."""
    form = {"id": id_at(tag, "tpl"), "name": "tools", "build_id": "", "tags": {}, "owner": "ann"}

    def answer(asked: Asked) -> Reply:
        if asked.method == "GET" and asked.target == "/v1/templates/tools":
            return 200, {}, {**form, "is_ready": True, "updated_at": 1}
        return made(asked)

    return answer


class Front:
    """A gateway, and the requests that its own routes got."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.own: list[str] = []
        service = cast("GatewayService", SimpleNamespace())
        store = cast("Directory", scene.store)
        self.behind = Behind(service, store, scene.nodes, scene.proxy)
        self.gateway = Gateway(self._app, self.behind)

    async def _app(self, scope: Any, _receive: Any, send: Any) -> None:
        self.own.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def call(
        self,
        method: str,
        path: str,
        form: object = None,
        caller: Caller | None = None,
        **headers: str,
    ) -> int:
        """Send a request with a form; return the status."""
        body = b"" if form is None else json.dumps(form).encode()
        fields = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
        fields.append((b"content-length", str(len(body)).encode()))
        found = permissions.find("GET" if method == "HEAD" else method, path)
        state = {"caller": caller or Caller("ann", USER), "request_id": "r", "found": found}
        scope: dict[str, Any] = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
        }
        scope |= {"query_string": b"", "headers": fields, "state": state}
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if not messages:
                await asyncio.Event().wait()
            return messages.pop(0)

        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await asyncio.wait_for(self.gateway(scope, receive, send), PATIENCE_S)
        return int(sent[0]["status"])

    def asked(self, tag: str) -> list[str]:
        """List what a node was asked, but for templates."""
        every = [f"{each.method} {each.target}" for each in self.scene.there[tag].asked]
        return [each for each in every if not each.startswith("GET /v1/templates")]


class TestRoutes:
    @pytest.mark.parametrize("method", ["GET", "DELETE", "HEAD"])
    async def test_an_id_that_names_its_node_goes_there(self, method: str, tmp_path: Path) -> None:
        async with scene_of(tmp_path, **{A: made, B: made}) as scene:
            front = Front(scene)
            path = f"/v1/sandboxes/{id_at(B)}"
            await front.call(method, path)
            assert ([], [f"{method} {path}"]) == (front.asked(A), front.asked(B))

    async def test_an_id_of_a_client_goes_where_it_is_bound(self, tmp_path: Path) -> None:
        async with scene_of(tmp_path, **{A: made, B: made}) as scene:
            front = Front(scene)
            scene.store.put(f"bind/{id_name('mine')}", Binding(B, 1.0, "mine").written())
            await front.call("GET", "/v1/sandboxes/mine")
            assert ([], ["GET /v1/sandboxes/mine"]) == (front.asked(A), front.asked(B))
            await front.call("GET", "/v1/sandboxes/unknown")
            assert 2 == len(front.asked(A) + front.asked(B)), "some node says that there is none"

    async def test_what_was_lost_is_lost_and_what_is_anothers_unknown(self, tmp_path: Path) -> None:
        async with scene_of(tmp_path, **{A: made, B: made}) as scene:
            front = Front(scene)
            for name in (id_at(B), "mine"):
                scene.store.put(f"bind/{id_name(name)}", Binding(B, 1.0, name).written())
            facts = {"session_id": "s", "owner": "ann", "name": "", "state": "ready"}
            facts |= {"created_at": 1.0}  # type: ignore[dict-item]
            scene.lose(B, {**facts, "id": id_at(B)}, {**facts, "id": "mine", "session_id": "t"})
            for name in (id_at(B), "mine"):
                with pytest.raises(SandboxLost):
                    await front.call("GET", f"/v1/sandboxes/{name}")
                assert not front.asked(A)
                await front.call("GET", f"/v1/sandboxes/{name}", caller=Caller("bob", USER))
                assert front.asked(A)
                scene.there[A].asked.clear()

    async def test_a_node_that_is_started_again_is_waited_for(self, tmp_path: Path) -> None:
        async with scene_of(tmp_path, **{A: made}) as scene:
            front = Front(scene)
            node = scene.there[A]
            hidden = tmp_path / "hidden"
            node.path.rename(hidden)
            asking = asyncio.ensure_future(front.call("GET", f"/v1/sandboxes/{id_at(A)}"))
            async with asyncio.timeout(PATIENCE_S):
                while not scene.nodes.unreached():
                    await asyncio.sleep(0)
            assert [] == front.asked(A)
            hidden.rename(node.path)
            await asking
            assert 1 == len(front.asked(A))

    async def test_a_node_that_stays_away_is_not_waited_for_without_end(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "WAIT_S", 0.0)
        async with scene_of(tmp_path, **{A: made}) as scene:
            front, path = Front(scene), f"/v1/sandboxes/{id_at(A)}"
            os.rename(tmp_path / A, tmp_path / "away")
            with pytest.raises(ServerUnreachable):
                await front.call("GET", path)
            assert {A} == scene.nodes.unreached()
            os.rename(tmp_path / "away", tmp_path / A)
            assert 201 == await front.call("GET", path)

    @pytest.mark.parametrize("method", ["GET", "HEAD"])
    async def test_a_list_is_of_all_nodes_also_where_only_its_head_is_asked_for(
        self, method: str, tmp_path: Path
    ) -> None:
        def page(_asked: Asked) -> Reply:
            return 200, {}, {"items": [], "next_cursor": None}

        async with scene_of(tmp_path, **{A: page, B: page}) as scene:
            front = Front(scene)
            assert 200 == await front.call(method, "/v1/sandboxes")
            assert [["GET /v1/sandboxes"]] * 2 == [front.asked(A), front.asked(B)]

    async def test_keys_and_unknown_paths_are_the_gateways_own(self, tmp_path: Path) -> None:
        async with scene_of(tmp_path, **{A: made}) as scene:
            front = Front(scene)
            admin = Caller("root", ADMIN)
            paths = ["/v1/keys", "/v1/openapi.json", "/no/such/path"]
            for path in paths:
                await front.call("GET", path, caller=admin)
            assert paths == front.own
            assert [] == front.asked(A)

    async def test_one_sandbox_is_never_evicted_by_request(self, tmp_path: Path) -> None:
        async with scene_of(tmp_path, **{A: made}) as scene:
            front = Front(scene)
            with pytest.raises(Unsupported):
                await front.call("POST", f"/v1/sandboxes/{id_at(A)}/evict", {})
            assert [] == front.asked(A)

    @pytest.mark.parametrize(
        ("key", "late_s", "is_refused"),
        [("k", STALE_S + 1, True), ("k", STALE_S - 5, False), ("", STALE_S + 1, False)],
    )
    async def test_a_gateway_that_is_cut_off_takes_no_keys(
        self, key: str, late_s: float, is_refused: bool, tmp_path: Path
    ) -> None:
        async with scene_of(tmp_path, **{A: made}) as scene:
            front = Front(scene)
            scene.nodes._looked_at = time.monotonic() - late_s
            ask = front.call(
                "GET", f"/v1/sandboxes/{id_at(A)}", caller=Caller("ann", USER, key=key)
            )
            if is_refused:
                with pytest.raises(ServerUnreachable, match="cut off"):
                    await ask
            else:
                await ask
            assert is_refused == (not front.asked(A))

    @pytest.mark.parametrize(("status", "is_late"), [(200, True), (201, True), (400, False)])
    async def test_a_changed_key_is_told_once_every_gateway_knows_it(
        self, status: int, is_late: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waits: list[float] = []

        async def sleep(seconds: float) -> None:
            waits.append(seconds)

        monkeypatch.setattr(asyncio, "sleep", sleep)
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        later = module._after(0.25, send)
        await later({"type": "http.response.start", "status": status})
        await later({"type": "http.response.body"})
        assert 2 == len(sent)
        assert ([0.25] if is_late else []) == waits

    async def test_only_what_changes_keys_is_told_late(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        late: list[float] = []

        def after(seconds: float, send: Any) -> Any:
            late.append(seconds)
            return send

        monkeypatch.setattr(module, "_after", after)
        async with scene_of(tmp_path, **{A: made}) as scene:
            front = Front(scene)
            root = Caller("root", ADMIN)
            await front.call("GET", "/v1/keys", caller=root)
            await front.call("GET", f"/v1/sandboxes/{id_at(A)}", caller=root)
            assert [] == late
            await front.call("POST", "/v1/keys", {}, caller=root)
            await front.call("DELETE", "/v1/keys/key-1", caller=root)
            assert [KEYS_S * 2] * 2 == late

    async def test_uploads_go_to_the_home_of_their_client(self, tmp_path: Path) -> None:
        async with scene_of(tmp_path, **{A: made, B: made}) as scene:
            front = Front(scene)
            home = (await front.behind.templates.home("ann")).tag
            for _ in range(3):
                await front.call("GET", f"/v1/uploads/{'0' * 64}")
            assert 3 == len(front.asked(home))

    async def test_a_template_is_deleted_on_every_node_that_has_it(self, tmp_path: Path) -> None:
        def having(tag: str) -> Callable[[Asked], Reply]:
            form = {"id": f"tpl-{tag}", "name": "web", "build_id": "", "tags": {}, "owner": "ann"}
            items = {
                "items": [{**form, "id": id_at(tag, "tpl"), "is_ready": True, "updated_at": 1}]
            }
            return lambda asked: (200, {}, items if asked.method == "GET" else {})

        async with scene_of(tmp_path, **{A: having(A), B: having(B)}) as scene:
            front = Front(scene)
            await front.call("DELETE", "/v1/templates/web")
            assert [["DELETE /v1/templates/web"]] * 2 == [front.asked(A), front.asked(B)]

            def gone(asked: Asked) -> Reply:
                missing = {"code": "not_found", "message": "it was removed there meanwhile"}
                return (404, {}, missing) if asked.method == "DELETE" else having(B)(asked)

            scene.there[B].answer = gone
            assert 200 == await front.call("DELETE", "/v1/templates/web")
            assert [2, 2] == [len(front.asked(A)), len(front.asked(B))]
            await front.call("GET", f"/v1/templates/{id_at(B, 'tpl')}")


class TestCreates:
    async def test_it_is_known_by_its_key_and_its_id(self, tmp_path: Path) -> None:
        async with scene_of(tmp_path, **{A: made}) as scene:
            front = Front(scene)
            form = {"id": "mine"}
            assert 201 == await front.call("POST", "/v1/sandboxes", form, idempotency_key="k")
            names = [key_name("ann", "sandbox", "k"), id_name("mine")]
            assert sorted(f"bind/{each}" for each in names) == scene.store.list("bind/")

    async def test_what_is_no_create_is_refused_by_a_node(self, tmp_path: Path) -> None:
        async with scene_of(tmp_path, **{A: made}) as scene:
            front = Front(scene)
            for path in ("/v1/sandboxes", "/v1/sessions", "/v1/sessions/attach", "/v1/templates"):
                await front.call("POST", path, {"nonsense": 1})
            assert 4 == len(front.asked(A))
            assert [] == scene.store.list("bind/")

    async def test_the_id_of_what_can_be_resumed_is_used(self, tmp_path: Path) -> None:
        async with scene_of(tmp_path, **{A: made, B: made}) as scene:
            front = Front(scene)
            facts = {"id": "mine", "session_id": "s", "owner": "ann", "name": "", "state": "ready"}
            scene.lose(B, {**facts, "created_at": 1.0, "is_whole": True, "snapshot": "snap-1"})
            for path, form in (
                ("/v1/sandboxes", {"id": "mine"}),
                ("/v1/sessions", {"spec": {"id": "mine"}}),
            ):
                with pytest.raises(InvalidRequest, match="already used"):
                    await front.call("POST", path, form, caller=Caller("bob", USER))
            assert [] == front.asked(A)
            await front.call("POST", "/v1/sandboxes", {"id": "other"})

    async def test_the_id_of_an_evicted_one_is_used(self, tmp_path: Path) -> None:
        async with scene_of(tmp_path, **{A: made}) as scene:
            front = Front(scene)
            scene.nodes._moved = frozenset(["mine"])
            with pytest.raises(InvalidRequest, match="already used"):
                await front.call("POST", "/v1/sandboxes", {"id": "mine"})

    async def test_an_id_that_names_a_node_is_made_there_or_refused(self, tmp_path: Path) -> None:
        async with scene_of(tmp_path, **{A: made, B: made}) as scene:
            front = Front(scene)
            form: dict[str, Any] = {"id": id_at(B, "mine")}
            for _ in range(3):
                await front.call("POST", "/v1/sandboxes", form)
            assert ([], 3) == (front.asked(A), len(front.asked(B)))
            with pytest.raises(InvalidRequest, match="names another node"):
                await front.call("POST", "/v1/sandboxes", {**form, "snapshot_id": id_at(A, "snap")})
            await front.call("POST", "/v1/sandboxes", {**form, "snapshot_id": id_at(B, "snap")})
            assert ([], 4) == (front.asked(A), len(front.asked(B)))

    async def test_an_id_that_names_another_node_than_its_template_is_refused(
        self, tmp_path: Path
    ) -> None:
        async with scene_of(tmp_path, **{A: made, B: having_template(B)}) as scene:
            front = Front(scene)
            form = {"id": id_at(A, "mine"), "template": "tools"}
            with pytest.raises(InvalidRequest, match="names another node"):
                await front.call("POST", "/v1/sandboxes", form)
            assert ([], []) == (front.asked(A), front.asked(B))
            await front.call("POST", "/v1/sandboxes", {**form, "id": id_at(B, "mine")})
            assert ([], 1) == (front.asked(A), len(front.asked(B)))

    async def test_a_session_of_a_key_or_a_preferred_id_is_bound(self, tmp_path: Path) -> None:
        async with scene_of(tmp_path, **{A: made}) as scene:
            front = Front(scene)
            form = {"client_id": "bob", "options": {"key": "k", "preferred_id": "mine"}}
            await front.call("POST", "/v1/sessions", form, caller=Caller("root", ADMIN))
            names = [key_name("bob", "session", "k"), id_name("mine")]
            assert sorted(f"bind/{each}" for each in names) == scene.store.list("bind/")

    async def test_a_preferred_id_that_names_a_node_is_of_that_node(self, tmp_path: Path) -> None:
        async with scene_of(tmp_path, **{A: made, B: made}) as scene:
            front = Front(scene)
            options = {"preferred_id": id_at(A, "mine"), "snapshot_id": id_at(B, "snap")}
            with pytest.raises(InvalidRequest, match="names another node"):
                await front.call("POST", "/v1/sessions", {"options": options})
            assert ([], []) == (front.asked(A), front.asked(B))
            options["preferred_id"] = id_at(B, "mine")
            await front.call("POST", "/v1/sessions", {"options": options})
            assert ([], 1) == (front.asked(A), len(front.asked(B)))

    async def test_an_evicted_one_is_its_owners_to_acquire_and_attach(self, tmp_path: Path) -> None:
        """Such a request goes to the node that has it now; a create with a snapshot makes another one."""
        async with scene_of(tmp_path, **{A: made, B: made}) as scene:
            front = Front(scene)
            facts: dict[str, Any] = {
                "owner": "ann",
                "snapshot": "snap-9",
                "name": "",
                "image": None,
            }
            facts |= {"timeouts": {}, "metadata": {}, "backend": "native", "needs": "x"}
            moved = Moved(**facts, left="gone", at=1.0, node=B)
            scene.store.put(f"{MOVED}mine", moved.written())
            scene.nodes.look()
            acquire = {"options": {"preferred_id": "mine"}}
            attach = {"sandbox_id": "mine", "create_if_missing": True}
            await front.call("POST", "/v1/sessions", acquire)
            await front.call("POST", "/v1/sessions/attach", attach)
            await front.call("GET", "/v1/sandboxes/mine")
            assert (0, 3) == (len(front.asked(A)), len(front.asked(B)))
            assert [] == scene.store.list("bind/"), "nothing new is made"
            acquire["options"]["snapshot_id"] = id_at(A, "snap")
            with pytest.raises(InvalidRequest, match="already used"):
                await front.call("POST", "/v1/sessions", acquire)

    async def test_an_execution_with_an_id_goes_to_the_node_that_it_names(
        self, tmp_path: Path
    ) -> None:
        async with scene_of(tmp_path, **{A: made, B: made}) as scene:
            front = Front(scene)
            path = "/api/v1/sandbox/execute"
            for tag in (A, B, B):
                await front.call("POST", path, {"command": "true", "id": id_at(tag, "exec")})
            assert (1, 2) == (len(front.asked(A)), len(front.asked(B)))
            for tag in (A, B):
                scene.there[tag].asked.clear()
                await front.call("GET", f"/api/v1/sandbox/status/{id_at(tag, 'exec')}")
                await front.call("POST", f"/api/v1/sandbox/kill/{id_at(tag, 'exec')}", {})
                assert 2 == len(front.asked(tag))

    async def test_attaching_makes_nothing_unless_it_may(self, tmp_path: Path) -> None:
        async with scene_of(tmp_path, **{A: made}) as scene:
            front = Front(scene)
            for creates in (False, True):
                form = {"sandbox_id": "mine", "create_if_missing": creates}
                await front.call("POST", "/v1/sessions/attach", form)
                assert creates == bool(scene.store.list("bind/"))

    async def test_the_id_of_one_that_can_be_resumed_is_its_owners_to_attach(
        self, tmp_path: Path
    ) -> None:
        async with scene_of(tmp_path, **{A: made, B: made}) as scene:
            front = Front(scene)
            facts = {"id": "mine", "session_id": "s", "owner": "ann", "name": "", "state": "ready"}
            facts |= {"timeouts": {}, "metadata": {}}  # type: ignore[dict-item]
            scene.store.put(f"bind/{id_name('mine')}", Binding(B, 1.0, "mine").written())
            scene.lose(B, {**facts, "created_at": 1.0, "is_whole": True, "snapshot": "snap-1"})
            path, form = "/v1/sessions/attach", {"sandbox_id": "mine", "create_if_missing": False}
            with pytest.raises(InvalidRequest, match="already used"):
                await front.call("POST", path, form, caller=Caller("bob", USER))
            assert [] == front.asked(A)
            await front.call("POST", path, {**form, "create_if_missing": True})
            made_again, attached = scene.there[A].asked
            assert ("/v1/sandboxes", path) == (made_again.target, attached.target)
            assert "snap-1" == json.loads(made_again.body)["snapshot_id"], "it is no empty new one"

    async def test_an_execution_needs_what_it_asks_for(self, tmp_path: Path) -> None:
        async with scene_of(tmp_path, **{A: made, B: made}) as scene:
            front = Front(scene)
            scene.put(
                {
                    **scene.there[A].form,
                    "free_memory_bytes": 300 << 20,
                    "beat": "2",
                    "tiers": ["light"],
                }
            )
            scene.put(
                {
                    **scene.there[B].form,
                    "free_memory_bytes": 100 << 20,
                    "beat": "2",
                    "tiers": ["light"],
                }
            )
            form = {"command": "true", "memory_mb": 256}
            for _ in range(4):
                await front.call("POST", "/api/v1/sandbox/execute", form)
            assert (4, 0) == (len(front.asked(A)), len(front.asked(B)))

    def test_needs_are_those_of_the_spec(self) -> None:
        spec = SandboxSpec.from_json(
            {"tier": "strong", "image": "debian", "limits": {"memory_bytes": 64 << 20}}
        )
        need = need_of(spec, "native")
        assert ("strong", "native", 64 << 20) == (need.tier, need.backend, need.memory_bytes)
        assert "docker.io/library/debian:latest" == need.image
        assert need.pulls_image
        assert "" == need.pool_key, "a pool has no image"
        assert "default" == need_of(SandboxSpec()).pool_key

    async def test_a_template_is_built_where_its_base_is(self, tmp_path: Path) -> None:
        form: dict[str, Any] = {"id": id_at(B, "tpl"), "name": "web", "build_id": "", "tags": {}}
        items = {"items": [{**form, "owner": "ann", "is_ready": True, "updated_at": 1}]}

        def having(asked: Asked) -> Reply:
            return 200, {}, items if asked.method == "GET" else {}

        async with scene_of(tmp_path, **{A: made, B: having}) as scene:
            front = Front(scene)
            value = Binding(A, time.time()).written()
            scene.store.put(f"home/{hashlib.sha256(b'ann').hexdigest()}", value)
            for base, at in (("web", B), ("default", A)):
                before = len(front.asked(at))
                asked = {"name": "new", "base": {"template": base}}
                await front.call("POST", "/v1/templates", asked)
                assert ["POST /v1/templates"] == front.asked(at)[before:]

    async def test_a_socket_goes_to_its_node_and_a_lost_one_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        passed: list[str] = []

        async def pass_socket(address: str, _inbound: Any) -> None:
            passed.append(address)

        async with scene_of(tmp_path, **{A: made, B: made}) as scene:
            front = Front(scene)
            monkeypatch.setattr(scene.proxy, "pass_socket", pass_socket)
            sent: list[Any] = []

            async def receive() -> Any:
                return {"type": "websocket.connect"}

            async def send(message: Any) -> None:
                sent.append(message)

            for tag, lost in ((B, False), (A, True)):
                if lost:
                    scene.lose(A)
                path = f"/v1/sandboxes/{id_at(tag)}/execs/e/attach"
                found = permissions.find(permissions.WEBSOCKET, path)
                assert found is not None
                state = {"caller": Caller("ann", USER), "request_id": "r", "found": found}
                scope: dict[str, Any] = {"type": "websocket", "path": path, "state": state}
                scope |= {"raw_path": path.encode(), "query_string": b"", "headers": []}
                scope["extensions"] = {"websocket.http.response": {}}
                await front.gateway(scope, receive, send)
            assert [f"unix:{tmp_path / B}"] == passed
            assert ("websocket.http.response.start", 410) == (sent[0]["type"], sent[0]["status"])


class TestOwners:
    @pytest.mark.parametrize("state", ["ready", "terminated"])
    async def test_tokens_are_made_for_what_lives(self, state: str, tmp_path: Path) -> None:
        view = {"id": id_at(A), "owner": "ann", "state": state, "reason": "killed"}
        async with scene_of(tmp_path, **{A: lambda _asked: (200, {}, view)}) as scene:
            behind = Front(scene).behind
            ask = behind.owner_of(id_at(A), Caller("ann", USER))
            if state == "ready":
                assert (id_at(A), "ann") == await ask
            else:
                with pytest.raises(LifecycleError, match="killed"):
                    await ask
