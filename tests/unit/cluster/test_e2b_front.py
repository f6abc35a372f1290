"""E2B's API at a gateway: which node is asked, as whom, and how the answers of several are made one."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.cluster.nodes_there import SECRET, Asked, Reply, Scene, form_of, scene_of

from ringfence.api.access import gateways
from ringfence.api.access.caller import ADMIN, READ_ONLY, TOKEN, USER, Caller
from ringfence.api.bounds import Bounds
from ringfence.api.service import Settings
from ringfence.cluster import e2b as module
from ringfence.cluster.bindings import Binding
from ringfence.cluster.directory import Directory
from ringfence.cluster.e2b import Front
from ringfence.cluster.gateway import Behind, GatewayService
from ringfence.cluster.nodes import STALE_S
from ringfence.cluster.placing import key_name
from ringfence.e2b.entrance import GRANT
from ringfence.e2b.lists import ORDER
from ringfence.e2b.settings import E2BSettings
from ringfence.model.spec import SandboxSpec
from ringfence.store.store import Store

pytestmark = pytest.mark.anyone
A, B = "0000000a", "0000000b"
PATIENCE_S = 30.0
Answers = Callable[[Asked], Reply]


def id_at(tag: str, prefix: str = "sbx", number: int = 0) -> str:
    return f"{prefix}-0190b5a4-0000-7000-8000-{tag}{number:04d}"


class Entry:
    """The front, the keys of its gateway, and what clients got."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.store = Store(None)
        manager = SimpleNamespace(store=self.store)
        settings = Settings(bounds=Bounds(body_bytes=1000))
        self.service = GatewayService(cast("Any", manager), settings)
        self.behind = Behind(self.service, cast("Directory", scene.store), scene.nodes, scene.proxy)
        self.front = Front(self._app, self.behind, E2BSettings(templates={"own": SandboxSpec()}))
        self.headers: dict[str, str] = {}
        _, self.key = self.service.authenticator.make(owner="ann", scope=USER, expires_at=None)

    async def _app(self, _scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 299, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def call(
        self, method: str, path: str, form: object = None, key: str | None = None, **more: str
    ) -> tuple[int, Any]:
        """Send a request with a key; the status and the form of the answer."""
        body = b"" if form is None else json.dumps(form).encode()
        key = self.key if key is None else key
        given = {"host": "localhost", "content-length": str(len(body)), **more}
        given |= {"x_api_key": key} if key else {}
        fields = [(k.replace("_", "-").encode(), v.encode()) for k, v in given.items()]
        path, _, query = path.partition("?")
        scope: dict[str, Any] = {"type": "http", "method": method, "path": path}
        scope |= {"raw_path": path.encode(), "query_string": query.encode(), "headers": fields}
        scope |= {"client": ("127.0.0.1", 1), "scheme": "https"}
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if not messages:
                await asyncio.Event().wait()
            return messages.pop(0)

        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await asyncio.wait_for(self.front(scope, receive, send), PATIENCE_S)
        self.headers = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
        content = b"".join(each.get("body", b"") for each in sent[1:])
        return int(sent[0]["status"]), json.loads(content or b"null")

    def asked(self, tag: str, method: str = "") -> list[str]:
        """List what a node was asked."""
        every = self.scene.there[tag].asked
        return [f"{each.method} {each.target}" for each in every if method in each.method]

    def caller(self, tag: str) -> Caller:
        """As whom a node was asked last."""
        last = self.scene.there[tag].asked[-1]
        seal = last.headers[gateways.HEADER]
        found = gateways.unseal(SECRET, seal, last.method, last.target.encode())
        assert found is not None
        return found


@asynccontextmanager
async def entry_of(place: Path, config: Any = None, **answers: Any) -> AsyncIterator[Entry]:
    async with scene_of(place, config, **answers) as scene:
        entry = Entry(scene)
        try:
            yield entry
        finally:
            entry.service.thread_pools.close()
            entry.store.close()


def saying(form: object, status: int = 200, **fields: str) -> Answers:
    return lambda _asked: (status, {k.replace("_", "-"): v for k, v in fields.items()}, form)


class TestAnswers:
    async def test_a_node_gets_the_caller_and_no_key_and_the_client_no_inner_field(
        self, tmp_path: Path
    ) -> None:
        made = saying({}, x_ringfence_made="x", x_ringfence_order="y", x_kept="z")
        async with entry_of(tmp_path, **{A: saying({}), B: made}) as entry:
            path = f"/sandboxes/{id_at(B)}?x=1"
            forged = {gateways.HEADER.replace("-", "_"): "forged", "authorization": "Bearer x"}
            status, _ = await entry.call("GET", path, x_of_client="1", **forged)
            assert (200, [], [f"GET {path}"]) == (status, entry.asked(A), entry.asked(B))
            got = entry.scene.there[B].asked[0].headers
            assert "1" == got["x-of-client"]
            assert not {"x-api-key", "authorization"} & got.keys()
            assert ("ann", USER) == (entry.caller(B).client, entry.caller(B).scope)
            assert "z" == entry.headers["x-kept"]
            assert not {"x-ringfence-made", "x-ringfence-order"} & entry.headers.keys()

    async def test_only_good_keys_come_in_and_readers_change_nothing(self, tmp_path: Path) -> None:
        async with entry_of(tmp_path, **{A: saying([])}) as entry:
            keys = entry.service.authenticator
            _, reader = keys.make(owner="ann", scope=READ_ONLY, expires_at=None)
            _, token = keys.make(owner="ann", scope=ADMIN, expires_at=time.time() + 100)
            path = f"/sandboxes/{id_at(A)}"
            assert 401 == (await entry.call("GET", path, key="rf_none.x"))[0]
            assert 401 == (await entry.call("GET", path, key=""))[0]
            assert 403 == (await entry.call("DELETE", path, key=reader))[0]
            assert [] == entry.asked(A)
            for method, key in (("GET", reader), ("DELETE", token)):
                assert 200 == (await entry.call(method, path, key=key))[0]

    async def test_a_gateway_that_is_cut_off_takes_no_keys(self, tmp_path: Path) -> None:
        grant = saying({"client": "ann", "sandbox": id_at(A), "key": ""})
        async with entry_of(tmp_path, **{A: grant}) as entry:
            for late_s, expected in ((STALE_S - 5, 200), (STALE_S + 1, 502)):
                entry.scene.nodes._looked_at = time.monotonic() - late_s
                there = len(entry.asked(A))
                status, _ = await entry.call("GET", f"/sandboxes/{id_at(A)}")
                inside, _ = await entry.call("GET", "/x", e2b_sandbox_id=id_at(A))
                assert (expected < 300) == (status < 300) == (inside < 300)
            assert {f"GET {GRANT}"} >= {*entry.asked(A)[there:]}

    async def test_a_key_that_ends_cuts_what_reads_and_lets_what_changes_finish(
        self, tmp_path: Path
    ) -> None:
        async with entry_of(tmp_path, **{A: saying({})}) as entry:
            keys = entry.service.authenticator

            def ending(_asked: Asked) -> Reply:
                entry.store.remove_key(entry.store.every_key()[-1].id)
                keys.read()
                entry.service.open_requests.look()
                return 200, {}, {}

            entry.scene.there[A].answer = ending
            for method, expected in (("GET", 401), ("DELETE", 200)):
                _, key = keys.make(owner="ann", scope=USER, expires_at=None)
                status, _ = await entry.call(method, f"/sandboxes/{id_at(A)}", key=key)
                assert expected == status, method
            assert 0 == entry.service.admission.now

    async def test_bodies_of_the_api_have_a_bound_and_those_of_what_is_inside_have_none(
        self, tmp_path: Path
    ) -> None:
        grant = saying({"client": "ann", "sandbox": id_at(A), "key": ""})
        async with entry_of(tmp_path, **{A: grant}) as entry:
            for size, expected in ((8, 200), (2000, 413)):
                status, _ = await entry.call("PUT", f"/sandboxes/{id_at(A)}", "x" * size)
                assert expected == status
                inside, _ = await entry.call("PUT", "/x", "x" * size, e2b_sandbox_id=id_at(A))
                assert 200 == inside

    async def test_pages_of_elsewhere_are_refused(self, tmp_path: Path) -> None:
        async with entry_of(tmp_path, **{A: saying([])}) as entry:
            path = f"/sandboxes/{id_at(A)}"
            assert 403 == (await entry.call("GET", path, origin="https://evil.test"))[0]
            assert 403 == (await entry.call("GET", path, host="evil.test"))[0]
            assert [] == entry.asked(A)
            assert 200 == (await entry.call("GET", path))[0]

    async def test_what_is_not_e2bs_goes_to_the_application(self, tmp_path: Path) -> None:
        async with entry_of(tmp_path, **{A: saying([])}) as entry:
            assert 299 == (await entry.call("GET", "/v1/sandboxes"))[0]
            assert [] == entry.asked(A)


class TestInside:
    def granting(self, key: str = "", status: int = 200) -> Answers:
        def answer(asked: Asked) -> Reply:
            if asked.target.startswith(GRANT):
                if status != 200:
                    return status, {}, {"code": status, "message": "no such sandbox"}
                return 200, {}, {"client": "ann", "sandbox": id_at(A), "key": key}
            return (404 if asked.target == "/gone" else 200), {}, {}

        return answer

    async def test_a_grant_is_asked_once_and_again_after_a_refusal(self, tmp_path: Path) -> None:
        async with entry_of(tmp_path, **{A: self.granting(), B: self.granting()}) as entry:
            inside = {"e2b_sandbox_id": id_at(A), "authorization": "Basic x", "origin": "https://x"}
            for path in ("/a", "/b", "/gone", "/c"):
                await entry.call("GET", path, key="token", e2b_sandbox_port="8080", **inside)
            grant = f"GET {GRANT}"
            assert [grant, "GET /a", "GET /b", "GET /gone", grant, "GET /c"] == entry.asked(A)
            assert [] == entry.asked(B)
            grants = entry.scene.there[A].asked[0]
            assert id_at(A) == grants.headers["e2b-sandbox-id"]
            found = gateways.unseal(SECRET, grants.headers[gateways.HEADER], "GET", GRANT.encode())
            assert found is not None
            assert ADMIN == found.scope, "a token may ask for no grant"
            got = entry.scene.there[A].asked[1].headers
            assert ("Basic x", "https://x") == (got["authorization"], got["origin"])
            assert "token" == got["x-api-key"], "a server inside has keys of its own"
            caller = entry.caller(A)
            assert ("ann", TOKEN, id_at(A)) == (caller.client, caller.scope, caller.sandbox)

    async def test_a_socket_goes_to_the_node_of_its_sandbox(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        passed: list[tuple[str, str]] = []

        async def pass_socket(address: str, inbound: Any) -> None:
            passed.append((address, inbound.caller.sandbox))

        async with entry_of(tmp_path, **{A: self.granting(), B: self.granting()}) as entry:
            monkeypatch.setattr(entry.scene.proxy, "pass_socket", pass_socket)
            fields = {"host": "localhost", "e2b-sandbox-port": "8080", "e2b-sandbox-id": id_at(A)}
            scope: dict[str, Any] = {"type": "websocket", "path": "/ws", "raw_path": b"/ws"}
            scope |= {"query_string": b"", "client": ("127.0.0.1", 1), "scheme": "wss"}
            scope["headers"] = [(k.encode(), v.encode()) for k, v in fields.items()]

            async def receive() -> Any:
                return {"type": "websocket.connect"}

            async def send(message: Any) -> None:
                raise AssertionError(message)

            monkeypatch.setattr(entry.behind.nodes, "any", lambda: entry.behind.nodes.find(B))
            await entry.front(scope, receive, send)
            assert [(f"unix:{tmp_path / A}", id_at(A))] == passed
            assert ([f"GET {GRANT}"], []) == (entry.asked(A), entry.asked(B))

    async def test_one_that_is_resumed_is_asked_for_its_grant_again(self, tmp_path: Path) -> None:
        async with entry_of(tmp_path, **{A: self.granting()}) as entry:
            for path in ("connect", "resume"):
                entry.front.keep(id_at(A), {"client": "old", "sandbox": id_at(A), "key": ""})
                assert 200 == (await entry.call("POST", f"/sandboxes/{id_at(A)}/{path}", {}))[0]
                assert entry.front.grant(id_at(A)) is None
            entry.front.keep(id_at(A), {"client": "old", "sandbox": id_at(A), "key": ""})
            await entry.call("POST", f"/sandboxes/{id_at(A)}/pause", {})
            assert entry.front.grant(id_at(A)) is not None

    @pytest.mark.parametrize("refusal", [404, 502])
    async def test_without_a_grant_nothing_is_let_in(self, refusal: int, tmp_path: Path) -> None:
        async with entry_of(tmp_path, **{A: self.granting(status=refusal)}) as entry:
            status, form = await entry.call("GET", "/a", e2b_sandbox_id=id_at(A))
            assert (refusal, "no such sandbox") == (status, form["message"])
            assert [f"GET {GRANT}"] == entry.asked(A)
            assert entry.front.grant(id_at(A)) is None

    async def test_a_sandbox_is_open_for_as_long_as_the_key_that_made_it(
        self, tmp_path: Path
    ) -> None:
        async with entry_of(tmp_path, **{A: saying({})}) as entry:
            [known] = entry.store.every_key()
            for key, client, expected in (
                (known.id, "ann", 200),
                (known.id, "bob", 401),
                ("key-gone", "ann", 401),
            ):
                grant = {"client": client, "sandbox": id_at(A), "key": key}
                entry.front.keep(id_at(A), grant)
                assert expected == (await entry.call("GET", "/a", e2b_sandbox_id=id_at(A)))[0]

    @pytest.mark.parametrize(
        ("method", "operation"), [("GET", "read"), ("HEAD", "read"), ("POST", "write")]
    )
    async def test_a_signed_url_is_of_the_node_that_knows_its_signature(
        self, method: str, operation: str, tmp_path: Path
    ) -> None:
        stranger = saying({"code": 401, "message": "no"}, 401)

        def signer(asked: Asked) -> Reply:
            form = {"client": "ann", "sandbox": id_at(B), "key": ""}
            return 200, {}, form if asked.target.startswith(GRANT) else {}

        async with entry_of(tmp_path, **{A: stranger, B: signer}) as entry:
            url = "/files?path=x&signature=v1_y"
            assert 200 == (await entry.call(method, url, key=""))[0]
            grant = f"GET {GRANT}?path=x&signature=v1_y&operation={operation}"
            assert ([grant], [grant, f"{method} {url}"]) == (entry.asked(A), entry.asked(B))
            assert id_at(B) == entry.caller(B).sandbox
            entry.scene.there[B].answer = stranger
            entry.scene.there[B].asked.clear()
            assert 401 == (await entry.call(method, url, key=""))[0]
            assert [grant] == entry.asked(B)

    async def test_so_many_grants_are_kept_and_the_oldest_is_forgotten(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_MOST_GRANTS", 2)
        async with entry_of(tmp_path, **{A: saying({})}) as entry:
            for name in "xyz":
                entry.front.keep(name, {"sandbox": name})
            assert [None, {"sandbox": "y"}, {"sandbox": "z"}] == [*map(entry.front.grant, "xyz")]


class TestLists:
    def page(self, *keys: str, more: bool = False) -> Answers:
        fields = {ORDER: ",".join(keys), **({"x-next-token": "t"} if more else {})}
        return lambda _asked: (200, fields, [{"id": each} for each in keys])

    @pytest.mark.parametrize(
        ("path", "expected", "more"),
        [
            ("/v2/sandboxes", "dcba", False),
            ("/sandboxes?limit=4", "dcba", False),
            ("/v2/sandboxes?limit=3", "dcb", True),
            ("/v2/sandboxes?order=asc&limit=3", "abc", True),
            ("/snapshots?order=asc&limit=3", "dcb", True),
        ],
    )
    async def test_pages_of_all_nodes_are_one(
        self, path: str, expected: str, more: bool, tmp_path: Path
    ) -> None:
        async with entry_of(tmp_path, **{A: self.page("c", "a"), B: self.page("d", "b")}) as entry:
            _, found = await entry.call("GET", path)
            assert expected == "".join(each["id"] for each in found)
            last = base64.urlsafe_b64encode(expected[-1].encode()).decode()
            assert (last if more else None) == entry.headers.get("x-next-token")
            assert [f"GET {path}"] == entry.asked(A) == entry.asked(B)
            assert "ann" == entry.caller(B).client

    async def test_what_one_node_has_left_or_refuses_is_told(self, tmp_path: Path) -> None:
        answers = {A: self.page("d", more=True), B: self.page()}
        async with entry_of(tmp_path, **answers) as entry:
            await entry.call("GET", "/v2/sandboxes")
            assert "x-next-token" in entry.headers
            entry.scene.there[B].answer = saying({"code": 400, "message": "bad limit"}, 400)
            status, form = await entry.call("GET", "/v2/sandboxes?limit=x")
            assert (400, "bad limit") == (status, form["message"])
            entry.scene.there[A].answer = saying([])
            status, form = await entry.call("GET", "/templates")
            assert (400, "bad limit") == (status, form["message"])

    async def test_a_template_is_listed_once_as_its_own_node_does(self, tmp_path: Path) -> None:
        def list_of(tag: str) -> Answers:
            names = (id_at(A, "tpl"), id_at(B, "tpl"), "own")
            return saying([{"templateID": each, "at": tag} for each in names])

        async with entry_of(tmp_path, **{A: list_of(A), B: list_of(B)}) as entry:
            _, found = await entry.call("GET", "/templates")
            shown = {each["templateID"]: each["at"] for each in found}
            assert {id_at(A, "tpl"): A, id_at(B, "tpl"): B, "own": A} == shown
            assert 3 == len(found)


def having(tag: str = "", snapshots: tuple[str, ...] = ()) -> Answers:
    """Answer as a node with a template `web`, where its tag is given, and snapshots by name."""

    def answer(asked: Asked) -> Reply:
        path, _, query = asked.target.partition("?")
        if path.startswith("/v1/templates/"):
            form = {"id": id_at(tag, "tpl"), "name": "web", "build_id": "", "tags": {}}
            form |= {"owner": "ann", "is_ready": True, "updated_at": 1}  # type: ignore[dict-item]
            is_here = tag and path.rpartition("/")[2] in ("web", id_at(tag, "tpl"))
            missing = {"code": "not_found", "message": "none"}
            return (200, {}, {"items": [form]}) if is_here else (404, {}, missing)
        if path == "/snapshots" and asked.method == "GET":
            return 200, {}, [{"id": each} for each in snapshots if query == f"name={each}"]
        return (201 if asked.method == "POST" else 200), {gateways.MADE: "sbx-1"}, {}

    return answer


class TestCreates:
    @pytest.mark.parametrize("path", ["/sandboxes", "/v2/sandboxes"])
    async def test_it_is_made_where_its_template_or_snapshot_is(
        self, path: str, tmp_path: Path
    ) -> None:
        answers = {A: having(), B: having(B, ("saved",))}
        async with entry_of(tmp_path, **answers) as entry:
            entry.scene.put(form_of(A, tmp_path / A, load=-50.0, beat="2"))
            names = ("web", "ann/Web:v1", id_at(B, "tpl"), "saved", id_at(B, "snap"))
            for name in names:
                assert 201 == (await entry.call("POST", path, {"templateID": name}))[0]
            assert ([], 5) == (entry.asked(A, "POST"), len(entry.asked(B, "POST")))
            assert json.dumps({"templateID": names[-1]}).encode() == (
                entry.scene.there[B].asked[-1].body
            )
            # What is configured, or unknown, is made anywhere.
            tiers = {"tiers": [SandboxSpec().tier], "beat": "3"}
            entry.scene.put(form_of(A, tmp_path / A, **tiers))
            entry.scene.put(form_of(B, tmp_path / B, **tiers, is_draining=True))
            for name in ("own", "base", "unknown"):
                await entry.call("POST", path, {"templateID": name})
            assert (3, 5) == (len(entry.asked(A, "POST")), len(entry.asked(B, "POST")))

    async def test_a_request_that_is_sent_again_is_known_by_its_clients_key(
        self, tmp_path: Path
    ) -> None:
        async with entry_of(tmp_path, **{A: having()}) as entry:
            await entry.call("POST", "/sandboxes", {"templateID": "base"}, idempotency_key="k")
            name = f"bind/{key_name('ann', 'e2b', 'k')}"
            assert [name] == entry.scene.store.list("bind/")
            long = "k" * 255
            await entry.call("POST", "/sandboxes", {}, idempotency_key=f"{long}left out")
            assert f"bind/{key_name('ann', 'e2b', long)}" in entry.scene.store.list("bind/")
            assert "sbx-1" == Binding.read(entry.scene.store.values[name]).made

    async def test_a_bounded_client_gets_what_other_nodes_leave_of_its_bound(
        self, tmp_path: Path
    ) -> None:
        def counting(asked: Asked) -> Reply:
            stats = {"active_sandboxes": 2}
            return (200, {}, stats) if asked.target == "/v1/stats" else having()(asked)

        async with entry_of(tmp_path, **{A: counting, B: counting}) as entry:
            keys = entry.service.authenticator
            _, key = keys.make(owner="ann", scope=USER, max_sandboxes=5)
            status, _ = await entry.call("POST", "/sandboxes", {"templateID": "base"}, key=key)
            made_at = A if entry.asked(A, "POST") else B
            assert (201, 3) == (status, entry.caller(made_at).max_sandboxes)


class TestSnapshots:
    async def test_a_new_one_replaces_those_of_its_name_on_other_nodes(
        self, tmp_path: Path
    ) -> None:
        async with entry_of(tmp_path, **{A: having(), B: having()}) as entry:
            path = f"/sandboxes/{id_at(B)}/snapshots"
            status, _ = await entry.call("POST", path, {"name": "team/a b:default"})
            assert (201, [f"POST {path}"]) == (status, entry.asked(B))
            assert ["DELETE /templates/a%20b"] == entry.asked(A)
            assert "ann" == entry.caller(A).client
            entry.scene.there[A].asked.clear()
            await entry.call("POST", path, {})
            entry.scene.there[B].answer = saying({"code": 404, "message": "none"}, 404)
            assert 404 == (await entry.call("POST", path, {"name": "x"}))[0]
            assert [] == entry.asked(A), "without a name, or refused, it replaces nothing"

    async def test_two_of_one_name_take_turns(self, tmp_path: Path) -> None:
        order: list[str] = []

        def noting(tag: str) -> Answers:
            def answer(asked: Asked) -> Reply:
                order.append(f"{asked.method} {tag}")
                return having()(asked)

            return answer

        async with entry_of(tmp_path, **{A: noting(A), B: noting(B)}) as entry:
            paths = [f"/sandboxes/{id_at(tag)}/snapshots" for tag in (A, B)]
            await asyncio.gather(*(entry.call("POST", each, {"name": "x"}) for each in paths))
            first, second = (A, B) if order[0] == f"POST {A}" else (B, A)
            expected = [f"POST {first}", f"DELETE {second}", f"POST {second}", f"DELETE {first}"]
            assert expected == order

    async def test_nobody_waits_for_the_name_of_another_client(self, tmp_path: Path) -> None:
        async with entry_of(tmp_path, **{A: lambda _: None}) as entry:
            _, bobs = entry.service.authenticator.make(owner="bob", scope=USER, expires_at=None)
            path, node = f"/sandboxes/{id_at(A)}/snapshots", entry.scene.there[A]
            slow = asyncio.ensure_future(entry.call("POST", path, {"name": "x"}, key=bobs))
            await asyncio.wait_for(node.is_asked.wait(), PATIENCE_S)
            node.answer = having()
            assert 201 == (await entry.call("POST", path, {"name": "x"}))[0]
            assert not slow.done()
            slow.cancel()
            await asyncio.gather(slow, return_exceptions=True)


class TestTemplates:
    async def test_a_request_goes_where_the_template_is_with_the_gateways_scheme(
        self, tmp_path: Path
    ) -> None:
        async with entry_of(tmp_path, **{A: having(), B: having(B)}) as entry:
            paths = (
                "/templates/web",
                "/templates/aliases/web",
                f"/templates/{id_at(B, 'tpl')}/tags",
            )
            for path in paths:
                await entry.call("GET", path, x_forwarded_proto="gopher")
                assert f"GET {path}" == entry.asked(B)[-1]
                assert "https" == entry.scene.there[B].asked[-1].headers["x-forwarded-proto"]
            for method, name in (("POST", "target"), ("DELETE", "name")):
                form = {name: "web:v1", ("name" if name == "target" else "target"): "else"}
                await entry.call(method, "/templates/tags", form)
                assert f"{method} /templates/tags" == entry.asked(B)[-1]
                assert json.dumps(form).encode() == entry.scene.there[B].asked[-1].body
            assert not [each for each in entry.asked(A) if "/v1/templates/" not in each]

    async def test_a_new_one_is_built_at_its_clients_home(self, tmp_path: Path) -> None:
        async with entry_of(tmp_path, **{A: having(), B: having()}) as entry:
            home = (await entry.behind.templates.home("ann")).tag
            for _ in range(3):
                await entry.call("POST", "/v3/templates", {"name": "new"})
            assert 3 == len(entry.asked(home, "POST"))

    async def test_what_is_deleted_may_be_a_snapshot(self, tmp_path: Path) -> None:
        answers = {A: having(A), B: having(snapshots=("saved",))}
        async with entry_of(tmp_path, **answers) as entry:
            for name, at in (("saved", B), ("web", A)):
                await entry.call("DELETE", f"/templates/{name}")
                assert f"DELETE /templates/{name}" == entry.asked(at, "DELETE")[-1]
            assert (1, 1) == (len(entry.asked(A, "DELETE")), len(entry.asked(B, "DELETE")))
            entry.scene.there[B].answer = having(B)
            await entry.call("DELETE", "/templates/web")
            assert (2, 2) == (len(entry.asked(A, "DELETE")), len(entry.asked(B, "DELETE")))

    async def test_a_tag_that_is_removed_takes_no_template_or_snapshot_along(
        self, tmp_path: Path
    ) -> None:
        answers = {A: having(A, ("saved",)), B: having(B, ("saved",))}
        async with entry_of(tmp_path, **answers) as entry:
            for name in ("web:v1", "saved:v1"):
                await entry.call("DELETE", "/templates/tags", {"name": name, "tags": ["v1"]})
            asked = [*entry.asked(A, "DELETE"), *entry.asked(B, "DELETE")]
            assert ["DELETE /templates/tags"] * 2 == asked
            assert not [each for each in (*entry.asked(A), *entry.asked(B)) if "snapshots" in each]

    async def test_a_build_over_one_that_another_node_alone_has_is_refused(
        self, tmp_path: Path
    ) -> None:
        async with entry_of(tmp_path, **{A: having(A), B: having(B)}) as entry:
            entry.scene.there[B].answer = having()
            for at, base, is_refused in (
                (B, "web", True),
                (A, "web", False),
                (B, "base", False),
                (B, "unknown", False),
                (B, "", False),
            ):
                before = len(entry.asked(at, "POST"))
                path = f"/v2/templates/{id_at(at, 'tpl')}/builds/b"
                status, form = await entry.call("POST", path, {"fromTemplate": base})
                assert is_refused == (400 == status), form
                assert before + (not is_refused) == len(entry.asked(at, "POST"))

    async def test_a_base_that_is_configured_is_on_each_node_whatever_templates_there_are(
        self, tmp_path: Path
    ) -> None:
        def named_own(asked: Asked) -> Reply:
            form = {"id": id_at(A, "tpl"), "name": "own", "build_id": "", "tags": {}}
            whole = {**form, "owner": "ann", "is_ready": True, "updated_at": 1}
            is_look = asked.target == "/v1/templates/own"
            return (200, {}, {"items": [whole]}) if is_look else (202, {}, {})

        async with entry_of(tmp_path, **{A: named_own, B: having()}) as entry:
            path = f"/v2/templates/{id_at(B, 'tpl')}/builds/b"
            assert A == await entry.behind.templates.source("own", Caller("ann", USER))
            assert 201 == (await entry.call("POST", path, {"fromTemplate": "own:v1"}))[0]
            assert [f"POST {path}"] == entry.asked(B, "POST")

    async def test_a_signed_upload_needs_no_key_and_others_do(self, tmp_path: Path) -> None:
        async with entry_of(tmp_path, **{A: having(), B: having(B)}) as entry:
            path = f"/templates/{id_at(B, 'tpl')}/files/{'0' * 64}?signature=x"
            status, _ = await entry.call("PUT", path, {"a": 1}, key="")
            assert (200, f"PUT {path}") == (status, entry.asked(B)[-1])
            caller = entry.caller(B)
            assert ("", TOKEN) == (caller.client, caller.scope)
            assert 401 == (await entry.call("GET", path, key=""))[0]
