"""The OpenAPI document says what the server does: whatever is sent, no 5xx, and nothing undeclared."""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from ringfence.api import app as app_module
from ringfence.api.app import document, make_app
from ringfence.api.schema import schema_of
from ringfence.api.service import Service
from ringfence.api.thread_pools import ThreadPools
from ringfence.errors import RingfenceError
from ringfence.model import ExecRequest, NetworkPolicy, StartRequest
from ringfence.model.base.model import Model
from ringfence.model.create import CreateRequest
from ringfence.model.execution.execution import ExecutionRequest
from tests.api.conftest import Daemon, StartDaemon
from tests.api.fuzz_rules import CANNOT_BE_SAID, cannot_be_said

pytestmark = pytest.mark.anyone

CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
EXAMPLES = int(os.environ.get("RINGFENCE_TEST_EXAMPLES", "2"))
"""Of each operation, well-formed and again malformed; more find more."""

ENDLESS = r"/files/watch$|/attach$"
FOR_ADMINS = ("/v1/keys", "/metrics", "/api/v1/sandbox/config")
load_all_checks()
schemathesis.serializer.alias("application/x-tar", "application/octet-stream")

DOCUMENT: dict[str, Any] = document(make_app(cast("Service", None)))
# Every request here has a key; what happens without one is in test_auth.
OPEN = {key: part for key, part in DOCUMENT.items() if key != "security"}
OPERATIONS: list[Any] = [
    cast("Any", found).ok()
    for found in schemathesis.openapi.from_dict(OPEN)
    .exclude(path_regex=ENDLESS)
    .get_all_operations()
]


@pytest.fixture(scope="module")
def daemon(start_daemon: StartDaemon) -> Daemon:
    return start_daemon("--listen", "127.0.0.1:0", "--max-sandboxes", "500")


@pytest.fixture(scope="module")
def keys(daemon: Daemon) -> dict[str, str]:
    """By scope."""
    with daemon.client() as client:
        return {
            scope: client.post("/v1/keys", json={"owner": "fuzz", "scope": scope}).json()["key"]
            for scope in ("admin", "user")
        }


class Sandboxes:
    """A live one for whoever asks, and no more than a few at once."""

    def __init__(self, daemon: Daemon, key: str) -> None:
        headers = {"authorization": f"Bearer {key}"}
        self.client = httpx.Client(base_url=daemon.tcp, headers=headers, timeout=60)
        self._last = ""

    def one(self) -> str:
        found = self.client.get(f"/v1/sandboxes/{self._last}") if self._last else None
        if found is None or found.json()["state"] in ("suspended", "terminated"):
            for each in self.client.get("/v1/sandboxes", params={"limit": 1000}).json()["items"]:
                self.client.delete(f"/v1/sandboxes/{each['id']}")
            self._last = self.client.post("/v1/sandboxes", json={}).json()["id"]
        return self._last


@pytest.fixture(scope="module")
def sandboxes(daemon: Daemon, keys: dict[str, str]) -> Any:
    found = Sandboxes(daemon, keys["user"])
    yield found
    found.client.close()


def test_the_document_is_whole(daemon: Daemon) -> None:
    assert "3.1.0" == DOCUMENT["openapi"]
    for path, operations in DOCUMENT["paths"].items():
        for method, operation in operations.items():
            where = f"{method} {path}"
            assert {"401", "403", "404", "422", "429", "503"} <= set(operation["responses"]), where
            assert operation.get("description"), where
    assert "x-ringfence-model" not in str(DOCUMENT)
    with daemon.client() as client:
        assert DOCUMENT == client.get("/v1/openapi.json").json()


def test_every_route_is_in_the_reference() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "http-api.md").read_text()
    listed = {tuple(found) for found in re.findall(r"^\| `([A-Z]+) (/[^`]*)`", page, re.MULTILINE)}
    served = {
        (method.upper(), path)
        for path, operations in DOCUMENT["paths"].items()
        for method in operations
    }

    assert served == {each for each in listed if each[0] not in ("WS", "ANY")}


def test_what_the_document_cannot_say_is_in_the_reference() -> None:
    """Each rule that the fuzzing tool lets pass, and no other."""
    page = (Path(__file__).parents[2] / "docs" / "reference" / "http-api.md").read_text()
    table = page.partition("## Rules beyond the OpenAPI document")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([a-z ]+) \|", table, re.MULTILINE)

    assert {rule for _, _, rule in CANNOT_BE_SAID} == {*rows} - {"rule"}


def test_every_method_of_a_path_is_named_where_one_is_refused(daemon: Daemon) -> None:
    """RFC 9110 15.5.6: whatever route each of them has."""
    with daemon.client() as client:
        for path, operations in DOCUMENT["paths"].items():
            answer = client.request("TRACE", re.sub(r"{\w+}", "none", path))
            allowed = set(answer.headers["allow"].split(", "))

            assert 405 == answer.status_code
            methods = {method.upper() for method in operations}
            assert methods <= allowed, path
            if "{" not in path:  # no other route's methods
                assert methods == allowed - {"HEAD"}, path


def models_read() -> Iterator[tuple[type[Model], dict[str, Any]]]:
    """Models that come in, and how they are described."""
    for name, form in DOCUMENT["components"]["schemas"].items():
        for found in _all_below(Model):
            if name == found.__name__ and "title" not in form:
                yield found, form


def _all_below(cls: type[Model]) -> Iterator[type[Model]]:
    for each in cls.__subclasses__():
        yield each
        yield from _all_below(each)


def _objection(model: type[Model], key: str) -> str:
    """To a body with nothing but this key; that others are missing is another matter."""
    try:
        model.from_json({key: None})
    except RingfenceError as exc:
        return exc.message
    return ""


def test_what_is_said_of_a_body_is_what_is_read() -> None:
    """Each key that the document has is known to who reads it, and what it writes is described."""
    seen = set()
    for model, form in models_read():
        seen.add(model)
        unknown = [key for key in form["properties"] if "unknown key" in _objection(model, key)]
        assert [] == unknown, model.__name__
    assert {StartRequest, ExecutionRequest, CreateRequest, NetworkPolicy} <= seen
    command = StartRequest(ExecRequest(("true",))).to_json()
    assert command.keys() <= DOCUMENT["components"]["schemas"]["StartRequest"]["properties"].keys()


@pytest.mark.parametrize(
    ("name", "key", "wrong"),
    [
        ("ExecutionRequest", "command", ""),
        ("SandboxSpec", "profile", ""),
        ("SandboxSpec", "user", "Not A User"),
        ("SandboxSpec", "env", {"1": ""}),
        ("SandboxSpec", "labels", {"a": "b\nc"}),
        ("SandboxSpec", "deny", ["proc"]),
        ("Mount", "target", "/"),
        ("SessionTimeouts", "idle_s", 0),
        ("PoolConfig", "warm_ttl_s", 0),
        ("PoolConfig", "warm_profiles", ["a\x00b"]),
        ("ExecutionConfig", "no such key", 1),
        ("ExecutionConfig", "max_pending", -1),
        ("AttachRequest", "sandbox_id", ""),
        ("ExecRequest", "pty", [0, 0]),
        ("NetworkLimits", "connections", 0),
        ("NetworkLimits", "header_s", -1),
        ("Mount", "target", "relative"),
        ("SandboxSpec", "allow_degraded", ["nothing"]),
    ],
)
def test_what_the_server_refuses_the_document_does_not_allow(
    name: str, key: str, wrong: Any
) -> None:
    model = next(each for each in _all_below(Model) if name == each.__name__)
    described = schema_of(model, written=False)

    assert not jsonschema_rs.is_valid(described["properties"].get(key, False), wrong)
    assert described["additionalProperties"] is False
    with pytest.raises(RingfenceError):
        model.from_json({"argv": ["x"], key: wrong} if name == "ExecRequest" else {key: wrong})


ODD = ["%2e%2e", "..%2f..%2fetc%2fpasswd", "%2e%2e%2f", "a%00b", "-rf", "A", "x" * 64, "%ff", "a b"]


@pytest.mark.full
def test_no_path_parameter_is_ever_a_path(daemon: Daemon, sandboxes: Sandboxes) -> None:
    """Each parameter in turn, the others being right; what is there stays as it is."""
    right = {"sandbox_id": sandboxes.one(), "port": "80"}
    with daemon.client() as client:
        client.get(f"/v1/sandboxes/{ODD[0]}")  # the first refusal makes the log of refusals
        before = sorted(str(each) for each in daemon.state_dir.rglob("*"))
        for path, operations in DOCUMENT["paths"].items():
            for name in re.findall(r"{(\w+)}", path):
                rest = {**dict.fromkeys(re.findall(r"{(\w+)}", path), "none"), **right}
                for odd in ODD:
                    url = path.format(**{**rest, name: odd})
                    for method in operations:
                        answer = client.request(method, url)
                        assert 400 <= answer.status_code < 500, (method, url, answer.text)
                        assert "application/problem+json" == answer.headers["content-type"]
        assert "provisioned" == client.get(f"/v1/sandboxes/{right['sandbox_id']}").json()["state"]
    assert before == sorted(str(each) for each in daemon.state_dir.rglob("*"))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.label)
@pytest.mark.parametrize(
    "mode",
    [GenerationMode.POSITIVE, pytest.param(GenerationMode.NEGATIVE, marks=pytest.mark.full)],
)
def test_whatever_is_sent(
    operation: Any,
    mode: GenerationMode,
    daemon: Daemon,
    keys: dict[str, str],
    sandboxes: Sandboxes,
) -> None:
    """Half of what is about a sandbox is about one that is there."""
    if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query):
        return  # there is nothing to get wrong
    scope = "admin" if operation.path.startswith(FOR_ADMINS) else "user"
    headers = {"authorization": f"Bearer {keys[scope]}"}

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        if isinstance(case.query, dict):
            case.query.pop("follow", None)
        given = case.path_parameters
        if "sandbox_id" in given and mode is GenerationMode.POSITIVE:
            given["sandbox_id"] = sandboxes.one()
        if isinstance(case.body, dict) and "timeout_s" in case.body:
            case.body["timeout_s"] = 5
        response = case.call(base_url=daemon.tcp, headers=headers, timeout=60)
        assert response.status_code < 500
        if mode is GenerationMode.POSITIVE and response.status_code == 422:
            assert cannot_be_said(response.json()), response.text
        case.validate_response(response, checks=CHECKS)

    send()


def test_what_the_framework_refuses_has_one_status(client: httpx.Client) -> None:
    """In the body and on the wire."""
    for method, path, status in (("PATCH", "/v1/sandboxes", 405), ("GET", "/v1/nowhere", 404)):
        answer = client.request(method, path)

        assert (status, status) == (answer.status_code, answer.json()["status"])
    refused = client.patch("/v1/sandboxes").json()
    assert ("Method Not Allowed", "unsupported") == (refused["title"], refused["code"])


async def test_the_document_is_made_once_and_not_on_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes half a second, in which nobody else would be answered."""
    service = cast("Service", SimpleNamespace(thread_pools=ThreadPools()))
    app, made_in = make_app(service), list[threading.Thread]()

    def count(app: Any) -> dict[str, Any]:
        made_in.append(threading.current_thread())
        return document(app)

    monkeypatch.setattr(app_module, "document", count)
    (endpoint,) = (each.endpoint for each in app.routes if each.path == "/v1/openapi.json")  # type: ignore[attr-defined]
    request = SimpleNamespace(app=app)
    answers = await asyncio.gather(*(endpoint(request) for _ in range(4)))
    service.thread_pools.close()

    assert 1 == len(made_in)
    assert threading.current_thread() is not made_in[0]
    assert all(DOCUMENT == json.loads(each.body) for each in answers)
