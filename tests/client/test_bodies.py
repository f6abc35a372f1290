"""What the client's methods ask for, and what they make of the answers: bodies, parameters, forks, ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence import Credential, Limits, NetworkPolicy, NetworkRule, SandboxSpec
from ringfence.client import Client
from ringfence.client._sync.sandbox import RemoteSandbox
from ringfence.errors import InvalidRequest, SandboxNotFound, Unsupported
from ringfence.model.spec import LINEAGE
from tests.client.scripted import Answer, Request, ScriptedServer, as_json, served, without_pauses
from tests.client.test_asked_again import sandbox_view

pytestmark = pytest.mark.anyone

BOX = "/v1/sandboxes/sbx-a"


class Told:
    """Answers by method and path; what is not written down is a sandbox."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.server: ScriptedServer

    def __call__(self, request: Request) -> Answer:
        form = self.answers.get(f"{request.method} {request.path}")
        if isinstance(form, Answer):
            return form
        return as_json(sandbox_view().to_json() if form is None else form)

    @property
    def last(self) -> Request:
        return self.server.requests[-1]


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def client(told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    without_pauses(monkeypatch)
    with served(tmp_path / "s", told) as (made, server):
        told.server = server
        yield made


@pytest.fixture
def box(client: Client) -> RemoteSandbox:
    return client.get("sbx-a")


# -- forks ---------------------------------------------------------------------------------------


def fork_answer(*execs: dict[str, str], **report: Any) -> dict[str, Any]:
    items = [
        sandbox_view(f"sbx-{number}", labels={"n": str(number)}) for number in range(len(execs))
    ]
    return {
        "items": [each.to_json() for each in items],
        "execs": [*execs],
        "report": {"parent": "sbx-a", **report},
    }


def copied(exec_id: str) -> dict[str, Any]:
    return {"exec_id": exec_id, "command": "x", "pid": 7, "is_reseeded": True, "reason": ""}


def test_each_fork_is_told_of_what_goes_on_in_it_by_its_own_ids(
    told: Told, box: RemoteSandbox
) -> None:
    told.answers[f"POST {BOX}/fork"] = fork_answer(
        {"ctx": "ctx-0", "run": "run-0"},
        {"ctx": "ctx-1"},
        {},
        has_processes=True,
        reason="one was left out",
        contexts=["ctx"],
        processes=["run"],
        copies=[copied("ctx"), copied("run")],
    )
    found = box.fork(3)
    assert ["sbx-0", "sbx-1", "sbx-2"] == [each.id for each in found]
    assert [{"n": "0"}, {"n": "1"}, {"n": "2"}] == [dict(each.spec.labels) for each in found]
    reports = [each.fork_report for each in found]
    assert [(("ctx-0",), ("run-0",)), (("ctx-1",), ()), ((), ())] == [
        (each.contexts, each.processes) for each in reports if each is not None
    ]
    assert [["ctx-0", "run-0"], ["ctx-1"], []] == [
        [copy.exec_id for copy in each.copies] for each in reports if each is not None
    ]
    assert [True, True, False] == [each.has_processes for each in reports if each is not None]
    assert {"one was left out"} == {each.reason for each in reports if each is not None}
    assert box.fork_report is None
    told.answers[f"POST {BOX}/fork"] = fork_answer({}, has_processes=True)
    (other,) = box.fork()
    assert other.fork_report is not None
    assert other.fork_report.has_processes, "what execs left behind goes on"


def test_a_fork_is_asked_for_with_what_is_given_and_nothing_else(
    told: Told, box: RemoteSandbox
) -> None:
    told.answers[f"POST {BOX}/fork"] = fork_answer({})
    (plain,) = box.fork()
    assert {"n": 1, "processes": "auto"} == told.last.form
    assert box.spec.limits == plain.spec.limits
    (changed,) = box.fork(
        1,
        processes="none",
        network="example.com",
        limits={"pids": 5},
        labels={"a": "b"},
        secrets={"S": "t"},
    )
    body = told.last.form
    assert ["example.com"] == body["network"]["allowed_hosts"]
    assert (5, {"a": "b"}, {"S": "t"}, "none") == (
        body["limits"]["pids"],
        body["labels"],
        body["secrets"],
        body["processes"],
    )
    assert (5, None) == (changed.spec.limits.pids, changed.spec.id)
    assert told.last.headers["idempotency-key"]
    count = len(told.server.requests)
    wrong: Any
    for wrong in ({"n": 0}, {"processes": "some"}, {"labels": {"a": 1}}, {"at": object()}):
        with pytest.raises((InvalidRequest, Unsupported)):
            box.fork(**wrong)
    with pytest.raises(Unsupported):
        box.mark()
    with pytest.raises(Unsupported):
        box.rewind("x")
    assert count == len(told.server.requests), "refused without asking"


def test_a_default_context_goes_on_in_each_fork_under_its_own_id(
    told: Told, box: RemoteSandbox
) -> None:
    """Also in a fork of a fork that has not used it."""
    box._carried = ["ctx"]
    told.answers[f"POST {BOX}/fork"] = fork_answer({"ctx": "ctx-0", "other": "other-0"}, {})
    first, second = box.fork(2)
    assert (["ctx-0"], []) == (first._carried, second._carried)
    told.answers["POST /v1/sandboxes/sbx-0/fork"] = fork_answer({"ctx-0": "ctx-9"})
    (again,) = first.fork()
    assert ["ctx-9"] == again._carried


def test_a_sandbox_knows_those_that_it_descends_from(told: Told, client: Client) -> None:
    for labels, lineage in (({}, ()), ({LINEAGE: "sbx-x sbx-y"}, ("sbx-x", "sbx-y"))):
        told.answers[f"GET {BOX}"] = sandbox_view(labels=labels).to_json()
        found = client.get("sbx-a")
        assert lineage == found.lineage()
        assert (lineage[-1] if lineage else None) == found.parent


def test_a_merge_names_both_sides_and_its_base(
    told: Told, box: RemoteSandbox, client: Client
) -> None:
    merged = {"is_applied": True, "changes": [], "conflicts": []}
    told.answers[f"POST {BOX}/merge"] = merged
    told.answers["GET /v1/sandboxes/sbx-b"] = sandbox_view("sbx-b").to_json()
    into = client.get("sbx-b")
    assert box.merge(into, base="snap-1").is_applied
    assert {"into": "sbx-b", "base": "snap-1", "path": ".", "dry_run": False} == told.last.form
    box.merge(into, base="snap-1", path="/srv", prefer="theirs", dry_run=True)
    assert {
        "into": "sbx-b", "base": "snap-1", "path": "/srv", "dry_run": True, "prefer": "theirs",
    } == told.last.form  # fmt: skip
    count = len(told.server.requests)
    with pytest.raises(InvalidRequest):
        box.merge(into, base="snap-1", prefer="mine")
    with pytest.raises(InvalidRequest):
        box.merge(object(), base="snap-1")  # type: ignore[arg-type]
    assert count == len(told.server.requests)


# -- bodies and parameters -----------------------------------------------------------------------

SNAPSHOT = {"id": "snap-1", "session_id": "s", "created_at": 1.0, "metadata": {}}
KEY = {"id": "key-1", "key": "secret"}
Call = Callable[[Client, RemoteSandbox], Any]


@pytest.mark.parametrize(
    ("call", "asked", "form"),
    [
        (lambda _c, b: b.update(name="x"), f"PATCH {BOX}", {"name": "x"}),
        (lambda _c, b: b.update(labels={"a": None}), f"PATCH {BOX}", {"labels": {"a": None}}),
        (lambda _c, b: b.update(labels={}), f"PATCH {BOX}", {"labels": {}}),
        (lambda _c, b: b.extend(9.0), f"POST {BOX}/extend", {"ttl_s": 9.0}),
        (lambda _c, b: b.apply_network_policy("a.test"), f"PUT {BOX}/network", ...),
        (lambda c, _b: c.make_key("ann"), "POST /v1/keys", {"owner": "ann", "scope": "user", "name": ""}),
        (
            lambda c, _b: c.make_key("ann", scope="admin", name="n", expires_in_s=5.0, max_sandboxes=0),
            "POST /v1/keys",
            {"owner": "ann", "scope": "admin", "name": "n", "expires_in_s": 5.0, "max_sandboxes": 0},
        ),
        (lambda c, _b: c.rotate_key("key-1"), "POST /v1/keys/key-1/rotate", {"overlap_s": 0.0}),
        (
            lambda c, _b: c.rotate_key("key-1", overlap_s=3.0),
            "POST /v1/keys/key-1/rotate",
            {"overlap_s": 3.0},
        ),
        (lambda c, _b: c.change_pool(size=2), "PUT /v1/pools", {"size": 2, "kept": True}),
        (
            lambda c, _b: c.templates.publish("t/1", public=False),
            "PATCH /v1/templates/t%2F1",
            {"public": False},
        ),
        (
            lambda c, _b: c.sessions.set_default_sandbox(None),
            "PUT /v1/sessions/default",
            {"sandbox_id": None},
        ),
        (
            lambda c, _b: c.sessions.set_default_sandbox("sbx-a"),
            "PUT /v1/sessions/default",
            {"sandbox_id": "sbx-a"},
        ),
    ],
)  # fmt: skip
def test_a_body_has_what_is_given(
    call: Call, asked: str, form: Any, told: Told, client: Client, box: RemoteSandbox
) -> None:
    told.answers |= {
        "POST /v1/keys": KEY,
        "POST /v1/keys/key-1/rotate": KEY,
        "GET /v1/pools": {"config": {"size": 1, "kept": True}, "warm": 0},
        "PUT /v1/pools": {"config": {}},
        "PUT /v1/sessions/default": {"session": None},
        "PATCH /v1/templates/t%2F1": {
            "id": "tpl-1", "name": "t", "owner": "ann", "status": "ready", "created_at": 1.0,
            "updated_at": 1.0, "public": False, "is_ready": True, "build_id": "b",
        },
    }  # fmt: skip
    call(client, box)
    assert asked == f"{told.last.method} {told.last.path}"
    assert form is ... or form == told.last.form


@pytest.mark.parametrize(
    ("call", "query"),
    [
        (lambda _c, b: b.changes(), {}),
        (lambda _c, b: b.changes("snap-1"), {"since": "snap-1"}),
        (lambda c, _b: c.list(), {"limit": "1000"}),
        (lambda c, _b: c.list(labels={"a": "b"}, states=["running"], name=""),
         {"label": "a=b", "state": "running", "name": "", "limit": "1000"}),
        (lambda c, _b: c.sessions.list(states=["active"], labels={"a": "b"}),
         {"label": "a=b", "state": "active"}),
        (lambda c, _b: c.events(5), {"since": "5"}),
        (lambda c, _b: c.delete_key("key-1"), {}),
        (lambda c, _b: c.delete_key("key-1", this_key=True), {"this_key": "true"}),
        (lambda _c, b: b.files.remove("f"), {"path": "f", "recursive": "false"}),
        (lambda _c, b: b.files.remove("f", recursive=True), {"path": "f", "recursive": "true"}),
        (lambda _c, b: b.files.search("x", "/p", regex=True, ignore_case=True, glob="*.c", limit=3),
         {"pattern": "x", "path": "/p", "regex": "true", "ignore_case": "true", "glob": "*.c", "limit": "3"}),
        (lambda _c, b: b.files.glob("*.c", "/p", limit=3), {"pattern": "*.c", "path": "/p", "limit": "3"}),
    ],
)  # fmt: skip
def test_parameters_are_those_that_are_given(
    call: Call, query: dict[str, str], told: Told, client: Client, box: RemoteSandbox
) -> None:
    empty: dict[str, Any] = {"items": [], "next_cursor": None}
    told.answers |= {
        f"GET {BOX}/changes": {"items": []},
        "GET /v1/sandboxes": empty,
        "GET /v1/sessions": empty,
        "GET /v1/events": empty,
        f"GET {BOX}/files/glob": {"items": [], "truncated": False},
        f"GET {BOX}/files/search": {"items": [], "truncated": False},
    }
    call(client, box)
    assert query == told.last.query


def test_a_restored_sandbox_is_asked_for_with_what_differs_alone(
    told: Told, client: Client
) -> None:
    told.answers["POST /v1/sandboxes"] = sandbox_view("sbx-b").to_json()
    restored = client.restore("snap-1", name="n", ttl_s=5.0, labels={"a": "b"})
    assert {
        "snapshot_id": "snap-1",
        "name": "n",
        "ttl_s": 5.0,
        "labels": {"a": "b"},
    } == told.last.form
    assert "sbx-b" == restored.id
    client.restore("snap-1", SandboxSpec(limits=Limits(pids=7)), idempotency_key="mine")
    assert ("snap-1", 7) == (told.last.form["snapshot_id"], told.last.form["limits"]["pids"])
    assert "mine" == told.last.headers["idempotency-key"]
    count = len(told.server.requests)
    with pytest.raises(InvalidRequest) as refused:
        client.restore("snap-1", SandboxSpec(), ttl_s=5.0)
    assert "ttl_s" == refused.value.field
    with pytest.raises(InvalidRequest, match="python"):
        client.create(python_env=True)
    with pytest.raises(SandboxNotFound):
        client.get("")
    assert count == len(told.server.requests)


def test_secrets_go_to_the_server_and_each_creation_has_a_key_of_its_own(
    told: Told, client: Client
) -> None:
    keys, rule = set(), NetworkRule("a.test", credential=Credential("TOKEN"))
    policy = NetworkPolicy(rules=(rule,))
    for _ in range(2):
        client.create(
            network=policy,
            secrets={"TOKEN": "hidden"},
            env={"A": "b"},
            metadata={"m": "n"},
            use_pool=False,
        )
        body = told.last.form
        assert ({"TOKEN": "hidden"}, {"A": "b"}, {"m": "n"}, False) == (
            body["secrets"],
            body["env"],
            body["metadata"],
            body["use_pool"],
        )
        assert "timeouts" not in body
        keys.add(told.last.headers["idempotency-key"])
    assert 2 == len(keys)


# -- ends ----------------------------------------------------------------------------------------


def test_a_sandbox_is_ended_once_with_its_exposures_and_then_not_asked_any_more(
    told: Told, client: Client
) -> None:
    told.answers[f"DELETE {BOX}"] = sandbox_view(state="terminated").to_json()
    with client.get("sbx-a") as box:
        exposed = box.expose(80)
        assert exposed._is_open
    assert not exposed._is_open
    count = len(told.server.requests)
    box.terminate()
    assert ("terminated", "terminated") == (box.state, box.session.state)
    assert count == len(told.server.requests)
    assert 1 == told.server.asked.count("DELETE sbx-a")
    told.answers[f"GET {BOX}"] = sandbox_view(state="terminated").to_json()
    with pytest.raises(Exception, match="terminated"):
        client.get("sbx-a").expose(80)
