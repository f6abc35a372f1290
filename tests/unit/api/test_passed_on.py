"""What a request says reaches what does it: each field of a body, the caller's scope and bound, the key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from tests.unconfined import Unconfined

from ringfence import Limits, SandboxSpec
from ringfence.api.access.ceilings import Ceilings
from ringfence.api.access.permissions import Permissions
from ringfence.api.app import make_app
from ringfence.api.service import Service, Settings
from ringfence.execs.execs import Execs
from ringfence.execution.service import ExecutionService
from ringfence.model import capabilities as can
from ringfence.model.changes import Changes
from ringfence.model.execution.config import ExecutionConfig
from ringfence.model.fork import Merged
from ringfence.model.template import TemplateRequest
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.live import Live
from ringfence.sessions.manager import SessionManager
from ringfence.store.templates import READY
from ringfence.testing.unconfined.sandbox import UnconfinedSandbox

pytestmark = pytest.mark.anyone

_IGNORED = (*can.LIMITED_BY.values(), can.NETWORK_HOSTS, can.NETWORK_CHANGE)


class Backend(Unconfined):
    """Takes limits and policies, which mean nothing here."""

    lacks: ClassVar = {name: why for name, why in Unconfined.lacks.items() if name not in _IGNORED}


class Scene:
    """A server without sockets, over sandboxes that confine nothing."""

    def __init__(self, stack: ExitStack) -> None:
        backend = Backend()
        stack.callback(backend.close)
        config = ManagerConfig(pool=PoolConfig(enabled=False))
        self.manager = stack.enter_context(
            SessionManager(config, backends=[backend], background=False)
        )
        most = Ceilings(Limits(pids=50), ttl_s=5000.0)
        settings = Settings(permissions=Permissions(most=most))
        self.service = Service(self.manager, settings)
        stack.callback(self.service.thread_pools.close)
        execs = stack.enter_context(closing(Execs(self.manager)))
        runner = ExecutionService(self.manager, ExecutionConfig(work_dir="/tmp"), execs=execs)
        self.app = make_app(self.service)
        self.app.state.execs = execs
        self.app.state.executions = stack.enter_context(closing(runner))

    def live(self, any_id: str) -> Live:
        found = self.manager.index.find(any_id)
        assert found is not None
        return found

    def root(self, any_id: str) -> Path:
        """The directory on the host that is the sandbox's own root."""
        inner = self.live(any_id).inner
        assert isinstance(inner, UnconfinedSandbox)
        return Path(inner.root)


class Client:
    """A client with a key of its own."""

    def __init__(self, scene: Scene, owner: str, scope: str = "user", **more: Any) -> None:
        record, key = scene.service.authenticator.make(owner=owner, scope=scope, **more)
        self.scene, self.key_id, self.headers = scene, record.id, {"x-api-key": key}

    async def __call__(
        self, method: str, path: str, form: Any = None, **headers: str
    ) -> httpx.Response:
        body = {} if form is None else {"json": form}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        transport = httpx.ASGITransport(self.scene.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, headers={**self.headers, **named}, **body)

    async def made(self, path: str, form: Any = None, **headers: str) -> Any:
        answered = await self("POST", path, form, **headers)
        assert answered.is_success, answered.text
        return answered.json()

    async def create(self, **form: Any) -> str:
        found: str = (await self.made("/v1/sandboxes", form))["id"]
        return found


@pytest.fixture
def scene() -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(stack)


@pytest.fixture
def ann(scene: Scene) -> Client:
    return Client(scene, "ann")


@pytest.fixture
def bob(scene: Scene) -> Client:
    return Client(scene, "bob")


@pytest.fixture
def admin(scene: Scene) -> Client:
    return Client(scene, "ops", "admin")


def ids(answered: httpx.Response) -> list[str]:
    assert answered.is_success, answered.text
    return [each["id"] for each in answered.json()["items"]]


# -- forks and merges ----------------------------------------------------------------------------


async def test_forks_are_the_owners_and_differ_in_what_was_asked_for(
    scene: Scene, ann: Client, admin: Client
) -> None:
    at = f"/v1/sandboxes/{await ann.create(labels={'a': '1'})}/fork"
    form = {
        "n": 2,
        "limits": {"pids": 60},
        "labels": {"b": "2"},
        "network": {"mode": "limited", "allowed_hosts": ["a.test"]},
    }
    answered = await admin("POST", at, form)
    assert (201, 2) == (answered.status_code, len({*ids(answered)}))
    assert [{}, {}] == answered.json()["execs"]
    for each in ids(answered):
        fork = scene.live(each)
        assert ("ann", 60) == (fork.client_id, fork.spec.limits.pids)
        assert (None, "2") == (fork.spec.labels.get("a"), fork.spec.labels["b"])
        assert ("a.test",) == tuple(
            host.partition(":")[0] for host in fork.spec.network.allowed_hosts
        )
    (plain,) = ids(await ann("POST", at))
    assert "1" == scene.live(plain).spec.labels["a"]
    there = len(scene.manager.index.all())
    for change, field in (
        ({"limits": {"pids": 51}}, "limits.pids"),
        ({"network": {"mode": "limited", "allowed_hosts": ["127.0.0.1:1"]}}, "network."),
        ({"network": {"mode": "unrestricted"}}, "network.mode"),
    ):
        refused = await ann("POST", at, change)
        assert 403 == refused.status_code, refused.text
        assert refused.json()["field"].startswith(field)
    assert there == len(scene.manager.index.all())
    assert 201 == (await ann("POST", at, {"limits": {"pids": 50}})).status_code


async def test_a_fork_takes_processes_along_only_where_that_was_not_declined(
    ann: Client,
) -> None:
    at = f"/v1/sandboxes/{await ann.create()}/fork"
    reasons = [
        (await ann.made(at, {"processes": each}))["report"]["reason"] for each in ("auto", "none")
    ]
    assert [True, False] == list(map(bool, reasons)), "only who asks is told why not"
    required = await ann("POST", at, {"processes": "required"})
    assert "unsupported" == required.json()["code"]


async def test_forks_of_a_key_are_made_once(scene: Scene, ann: Client, bob: Client) -> None:
    mine, his = [f"/v1/sandboxes/{await each.create()}/fork" for each in (ann, bob)]
    first = await ann("POST", mine, {"n": 2}, idempotency_key="k")
    again = await ann("POST", mine, {"n": 2}, idempotency_key="k")
    assert (201, 200) == (first.status_code, again.status_code)
    assert ids(first) == ids(again)
    other = await ann("POST", mine, {"n": 1}, idempotency_key="k")
    assert 422 == other.status_code
    of_bob = await bob("POST", his, {"n": 2}, idempotency_key="k")
    assert 201 == of_bob.status_code
    assert not {*ids(of_bob)} & {*ids(first)}
    assert 6 == len(scene.manager.index.all())


async def test_a_merge_is_of_one_directory_in_the_way_that_was_asked_for(
    scene: Scene, ann: Client, admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    branch, into = await ann.create(), await ann.create()
    asked: list[tuple[object, ...]] = []

    def merge(*args: object, **more: object) -> Merged:
        asked.append((*args, *(more[name] for name in ("path", "prefer", "dry_run", "client_id"))))
        return Merged()

    monkeypatch.setattr(scene.manager, "merge", merge)
    form = {"into": into, "base": "snap-1"}
    more = {"path": "in", "prefer": "theirs", "dry_run": True}
    for each, body in ((ann, form), (ann, {**form, **more}), (admin, form)):
        await each.made(f"/v1/sandboxes/{branch}/merge", body)
    said = (branch, into, "snap-1")
    assert [
        (*said, ".", None, False, "ann"),
        (*said, "in", "theirs", True, "ann"),
        (*said, ".", None, False, None),
    ] == asked


async def test_changes_are_since_the_snapshot_that_is_named(
    scene: Scene, ann: Client, admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    box, asked = await ann.create(), list[tuple[object, ...]]()

    def changes(*args: object) -> Changes:
        asked.append(args)
        return Changes()

    monkeypatch.setattr(scene.manager, "changes", changes)
    at = f"/v1/sandboxes/{box}/changes"
    for each, query in ((ann, ""), (ann, "?since=snap-1"), (admin, "?since=snap-1")):
        assert 200 == (await each("GET", at + query)).status_code
    assert [(box, None, "ann"), (box, "snap-1", "ann"), (box, "snap-1", None)] == asked


async def test_a_checkpoint_is_none_of_files_alone(scene: Scene, ann: Client) -> None:
    at = f"/v1/sandboxes/{await ann.create()}"
    refused = await ann("POST", f"{at}/checkpoint")
    assert "unsupported" == refused.json()["code"]
    assert [] == list(scene.manager.snapshots()), "not a snapshot in its place"
    made = await ann.made(f"{at}/snapshots", {"metadata": {"a": "b"}})
    assert {"a": "b"} == made["metadata"]


# -- bounds of a key -----------------------------------------------------------------------------


async def test_a_keys_bound_on_sandboxes_counts_whatever_makes_them(scene: Scene) -> None:
    few = Client(scene, "ann", max_sandboxes=1)
    first = await few.create()
    missing = {"create_if_missing": True, "sandbox_id": "not-there", "client_id": "ann"}
    for path, form in (
        ("/v1/sandboxes", {}),
        (f"/v1/sandboxes/{first}/fork", {}),
        ("/v1/sessions", {}),
        ("/v1/sessions/attach", missing),
    ):
        refused = await few("POST", path, form)
        assert (429, "quota_exceeded") == (refused.status_code, refused.json()["code"]), path
    ran = await few.made("/api/v1/sandbox/execute", {"command": "true"})
    assert "quota_exceeded" == ran["error"]["code"]
    assert 1 == len(scene.manager.index.all())
    more = Client(scene, "ann", max_sandboxes=5)
    for path, form in ((f"/v1/sandboxes/{first}/fork", {}), ("/v1/sessions", {})):
        assert 201 == (await more("POST", path, form)).status_code, path
    assert 201 == (await more("POST", "/v1/sessions/attach", missing)).status_code
    ran = await more.made("/api/v1/sandbox/execute", {"command": "true"})
    assert "completed" == ran["status"]


# -- sessions ------------------------------------------------------------------------------------


async def test_a_session_is_for_the_client_that_an_administrator_names(
    scene: Scene, ann: Client, admin: Client
) -> None:
    options = {"metadata": {"m": "n"}}
    form = {"spec": {"labels": {"a": "b"}}, "options": options, "client_id": "ann"}
    made = (await admin.made("/v1/sessions", form))["session"]
    live = scene.live(made["session_id"])
    assert ("ann", {"a": "b"}, {"m": "n"}) == (
        live.client_id,
        dict(live.spec.labels),
        dict(live.metadata),
    )
    there = {"sandbox_id": live.sandbox_id, "client_id": "ann"}
    assert 200 == (await admin("POST", "/v1/sessions/attach", there)).status_code
    assert (
        404 == (await admin("POST", "/v1/sessions/attach", {**there, "client_id": "x"})).status_code
    )
    assert 200 == (await ann("GET", f"/v1/sessions/{live.id}")).status_code


async def test_sessions_are_listed_by_state_and_label(ann: Client) -> None:
    made = [
        (await ann.made("/v1/sessions", {"spec": {"labels": {"n": each}}}))["session"]["session_id"]
        for each in ("1", "2")
    ]
    await ann.made(f"/v1/sessions/{made[1]}/detach")

    async def listed(query: str) -> list[str]:
        found = (await ann("GET", f"/v1/sessions?{query}")).json()["items"]
        return [each["session_id"] for each in found]

    for query, found in (
        ("", made),
        ("state=active", made[:1]),
        ("state=detached", made[1:]),
        ("state=detached&state=active", made),
        ("state=suspended", []),
        ("label=n=1", made[:1]),
        ("label=n=1&state=detached", []),
    ):
        assert found == await listed(query), query


async def test_each_verb_of_a_session_is_that_one(scene: Scene, ann: Client) -> None:
    session = (await ann.made("/v1/sessions", {}))["session"]["session_id"]
    states = [
        (await ann.made(f"/v1/sessions/{session}/{verb}"))["state"]
        for verb in ("detach", "suspend", "resume", "touch")
    ]
    assert ["detached", "suspended", "active", "active"] == states
    ended = await ann.made(f"/v1/sessions/{session}/terminate")
    assert "released" != ended["reason"]
    assert [] == scene.manager.index.all()
    other = (await ann.made("/v1/sessions", {}))["session"]["session_id"]
    for _ in range(2):
        assert "released" == (await ann.made(f"/v1/sessions/{other}/release"))["reason"]


async def test_only_who_keeps_one_warm_orders_another(
    scene: Scene, ann: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordered: list[object] = []
    monkeypatch.setattr(scene.manager.pool, "order", ordered.append)
    monkeypatch.setattr(scene.manager.pool, "profile_for", lambda *_: "profile")
    for form, count in ((None, 0), ({}, 0), ({"keep_alive": False}, 0), ({"keep_alive": True}, 1)):
        session = (await ann.made("/v1/sessions", {}))["session"]["session_id"]
        await ann.made(f"/v1/sessions/{session}/release", form)
        assert count == len(ordered), form


async def test_a_default_sandbox_is_the_callers(ann: Client, bob: Client, admin: Client) -> None:
    box, at = await ann.create(), "/v1/sessions/default"
    put = await ann("PUT", at, {"sandbox_id": box})
    assert box == put.json()["session"]["sandbox_id"]
    for each, has in ((ann, True), (bob, False), (admin, False)):
        assert has == ((await each("GET", at)).json()["session"] is not None)
    assert (await ann("PUT", at, {"sandbox_id": None})).json() == {"session": None}


# -- keys ----------------------------------------------------------------------------------------


async def test_a_keys_bounds_and_end_are_those_that_were_asked_for(
    scene: Scene, admin: Client
) -> None:
    form = {
        "owner": "eve",
        "scope": "read_only",
        "name": "n",
        "expires_in_s": 100,
        "max_sandboxes": 3,
        "max_requests": 4,
    }
    made = await admin.made("/v1/keys", form)
    caller = scene.service.authenticator.caller(made["key"])
    assert caller is not None
    assert ("eve", "read_only", 3, 4) == (
        caller.client,
        caller.scope,
        caller.max_sandboxes,
        caller.max_requests,
    )
    assert "n" == made["name"]
    assert made["created_at"] + 90 < made["expires_at"] <= made["created_at"] + 101
    rotated = await admin.made(f"/v1/keys/{made['id']}/rotate", {"overlap_s": 50})
    opens = scene.service.authenticator.caller
    assert [True, True] == [opens(each["key"]) is not None for each in (made, rotated)]
    at_once = await admin.made(f"/v1/keys/{made['id']}/rotate")
    assert [False, False, True] == [
        opens(each["key"]) is not None for each in (made, rotated, at_once)
    ]
    own = f"/v1/keys/{admin.key_id}"
    assert 409 == (await admin("DELETE", own)).status_code
    assert 204 == (await admin("DELETE", f"/v1/keys/{made['id']}")).status_code
    assert 204 == (await admin("DELETE", f"{own}?this_key=true")).status_code


async def test_a_token_ends_when_it_was_asked_to(scene: Scene, ann: Client) -> None:
    at = f"/v1/sandboxes/{await ann.create()}/tokens"
    short, endless = await ann.made(at, {"ttl_s": 100}), await ann.made(at)
    assert endless["expires_at"] is None
    record = scene.service.authenticator._known[short["id"]]
    assert record.expires_at == short["expires_at"]
    assert 90 < short["expires_at"] - record.created_at <= 101
    assert ann.key_id == record.maker


# -- networks ------------------------------------------------------------------------------------


async def test_a_change_of_the_network_is_told_and_one_that_was_refused_is_none(
    scene: Scene, ann: Client
) -> None:
    box = await ann.create()
    at, last = f"/v1/sandboxes/{box}/network", scene.manager.events.last
    refused = await ann("PUT", at, {"mode": "limited", "allowed_hosts": ["127.0.0.1:1"]})
    assert (403, "allowed_hosts[0]") == (refused.status_code, refused.json()["field"])
    assert [] == scene.manager.events.since(last)[0]
    changed = await ann("PUT", at, {"mode": "limited", "allowed_hosts": ["a.test"]})
    assert 200 == changed.status_code, changed.text
    (event,) = scene.manager.events.since(last)[0]
    assert ("network", box, "ann") == (event.kind, event.sandbox_id, event.client_id)
    assert json.loads(changed.text) == (await ann("GET", at)).json()


# -- what has ended, and what is public ----------------------------------------------------------


async def test_what_has_ended_still_tells_how_many_commands_it_ran(
    ann: Client, bob: Client, admin: Client
) -> None:
    at = f"/v1/sandboxes/{await ann.create()}"
    for _ in range(2):
        await ann.made(f"{at}/execs", {"argv": ["true"], "wait": True})
    assert 200 == (await ann("DELETE", at)).status_code
    for each in (ann, admin):
        stats = (await each("GET", f"{at}/stats")).json()
        assert ("terminated", 2, 0) == (stats["state"], stats["execs"], stats["pids"])
    assert 404 == (await bob("GET", f"{at}/stats")).status_code


async def test_a_log_is_for_the_owner_of_a_template_also_where_that_is_public(
    scene: Scene, ann: Client, bob: Client, admin: Client
) -> None:
    templates, builds = scene.manager.templates, {}
    for name in ("app", "other"):
        template, build = templates.reserve(name, "ann", ["default"])
        request = json.dumps(TemplateRequest(name=name, base=SandboxSpec()).to_json())
        spec = json.dumps(SandboxSpec().to_json())
        changes = {"status": READY, "request": request, "spec": spec, "ended_at": 9.0}
        templates.records.change_build(build.id, **changes)
        templates.tag(template, build.id, ["default"])
        builds[name] = build.id
    at = "/v1/templates/app"
    assert 403 == (await ann("PATCH", at, {"public": True})).status_code
    assert 404 == (await bob("GET", at)).status_code
    assert 200 == (await admin("PATCH", at, {"public": True})).status_code
    assert 200 == (await bob("GET", at)).status_code
    for each, status in ((ann, 200), (bob, 404), (admin, 200)):
        assert status == (await each("GET", f"{at}/logs")).status_code
    for name, status in (("app", 200), ("other", 404)):
        asked = await ann("GET", f"{at}/logs?build_id={builds[name]}")
        assert status == asked.status_code, "a build is of its template"
    assert 404 == (await bob("PATCH", at, {"public": False})).status_code
    assert 404 == (await bob("DELETE", at)).status_code
    assert 200 == (await ann("PATCH", at, {"public": False})).status_code
    assert 404 == (await bob("GET", at)).status_code
