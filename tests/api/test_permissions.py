"""Who may do what: every route and every judged field, asked for by each kind of caller.

Routes and bodies are those that the application itself has: what is added without a line in the table
of permissions, or here, fails. `pytest -s` prints the table as it was found.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from ringfence.api.access import permissions
from ringfence.api.access.caller import ADMIN, SCOPES, TOKEN
from ringfence.api.app import document, make_app, routes_of
from ringfence.api.routes import ROUTERS
from ringfence.api.routes.keys import NewKey, Rotate
from ringfence.api.routes.sandboxes import Extend, NewToken
from ringfence.api.service import Service
from ringfence.model.acquire import AcquireOptions, AttachRequest
from ringfence.model.create import OWN as OF_CREATE
from ringfence.model.execs.exec import ExecRequest
from ringfence.model.execution.execution import ExecutionRequest
from ringfence.model.mount import Mount
from ringfence.model.net.network import NetworkPolicy
from ringfence.model.net.rules import NetworkRule
from ringfence.model.spec import SandboxSpec
from ringfence.model.template import TemplateRequest, TemplateStep
from tests.api.conftest import Daemon, StartDaemon

pytestmark = pytest.mark.anyone

MOST = {"memory_bytes": 2**28, "pids": 64, "wall_time_s": 60, "ttl_s": 3600, "idle_timeout_s": 900}
MOST |= {"disk_bytes": 2**26, "open_files": 256, "output_bytes": 2**20, "inodes": 5000}

CALLERS = {
    "none": None,
    "token": TOKEN,
    "another token": TOKEN,
    "metrics": "metrics",
    "read_only": "read_only",
    "user": "user",
    "another user": "user",
    "admin": "admin",
}
"""By what they are called here, their scope."""

# What each route with a JSON body takes at least; of an owner that has no such thing it is a 404.
BODIES: dict[str, Any] = {
    "/v1/sandboxes": {},
    "/v1/sandboxes/{sandbox_id}": {"name": "x"},
    "/v1/sandboxes/{sandbox_id}/extend": {"ttl_s": 60},
    "/v1/sandboxes/{sandbox_id}/tokens": {},
    "/v1/sandboxes/{sandbox_id}/execs": {"argv": ["true"]},
    "/v1/sandboxes/{sandbox_id}/execs/{exec_id}/signal": {"signal": 15},
    "/v1/sandboxes/{sandbox_id}/contexts": {},
    "/v1/sandboxes/{sandbox_id}/contexts/{context_id}/restart": {},
    "/v1/sandboxes/{sandbox_id}/contexts/{context_id}/input": {"text": None},
    "/v1/sandboxes/{sandbox_id}/contexts/{context_id}/cells": {"code": ""},
    "/v1/sandboxes/{sandbox_id}/execs/{exec_id}/resize": {"rows": 1, "cols": 1},
    "/v1/sandboxes/{sandbox_id}/files/move": {"source": "a", "target": "b"},
    "/v1/sandboxes/{sandbox_id}/files/dirs": {"path": "a"},
    "/v1/sandboxes/{sandbox_id}/files/replace": {"paths": [], "pattern": "a", "replacement": "b"},
    "/v1/sandboxes/{sandbox_id}/network": {"mode": "limited", "allowed_hosts": ["example.com"]},
    "/v1/sandboxes/{sandbox_id}/mounts": {"target": "/a"},
    "/v1/sandboxes/{sandbox_id}/snapshots": {},
    "/v1/sandboxes/{sandbox_id}/checkpoint": {},
    "/v1/sandboxes/{sandbox_id}/evict": {},
    "/v1/sandboxes/{sandbox_id}/fork": {},
    "/v1/sandboxes/{sandbox_id}/merge": {"into": "x", "base": "x"},
    "/v1/templates": {"name": "x"},
    "/v1/templates/{template}": {"public": False},
    "/v1/sessions": {},
    "/v1/sessions/attach": {"sandbox_id": "x", "client_id": "x"},
    "/v1/sessions/default": {"sandbox_id": None},
    "/v1/sessions/{session_id}/release": {},
    "/api/v1/sandbox/execute": {"command": "true"},
    "/api/v1/sandbox/config": {},
    "/v1/pools": {},
    "/v1/keys": {"owner": "x"},
    "/v1/keys/{key_id}/rotate": {},
}
QUERIES = {"path": ".", "pattern": "a"}

ROUTES: list[tuple[str, str]] = [
    (method, path)
    for methods, path in [(["GET"], "/v1/openapi.json")]
    + [each for router in ROUTERS for each in routes_of(router.routes)]
    for method in sorted(methods)
]
DOCUMENT: dict[str, Any] = document(make_app(cast("Service", None)))


def _rule(method: str, path: str) -> permissions.Rule:
    rules = permissions.ROUTES
    return rules.get((method, path)) or rules[permissions.ANY, path]


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("roots")
    (found / "shared").mkdir()
    return found


@pytest.fixture(scope="module")
def daemon(start_daemon: StartDaemon, roots: Path) -> Daemon:
    config = roots / "config.json"
    form = {"host_roots": [str(roots)], "host_networks": ["192.168.77.0/24:443"], "most": MOST}
    config.write_text(json.dumps(form))
    return start_daemon("--listen", "127.0.0.1:0", "--config", str(config))


@pytest.fixture(scope="module")
def keys(daemon: Daemon) -> dict[str, str]:
    """A key for each caller; alice has the sandboxes."""
    owners = {"user": "alice", "read_only": "alice", "another user": "bob"}
    found = {}
    with daemon.client() as client:
        for name in ("metrics", "read_only", "user", "another user", "admin"):
            body = {"owner": owners.get(name, "ops"), "scope": CALLERS[name]}
            found[name] = client.post("/v1/keys", json=body).raise_for_status().json()["key"]
    return found


@pytest.fixture(scope="module")
def sandbox_id(daemon: Daemon, keys: dict[str, str]) -> str:
    """Alice's, of which `token` is; `another token` is of another one."""
    with httpx.Client(base_url=daemon.tcp, headers=_headers(keys["user"]), timeout=60) as alice:
        made = [alice.post("/v1/sandboxes", json={}).raise_for_status().json() for _ in range(2)]
        for name, each in zip(("token", "another token"), made, strict=True):
            answer = alice.post(f"/v1/sandboxes/{each['id']}/tokens").raise_for_status()
            keys[name] = answer.json()["key"]
    found: str = made[0]["id"]
    return found


def _headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def ask(daemon: Daemon, keys: dict[str, str], sandbox_id: str) -> Iterator[Any]:
    """Ask for a route as a caller: the answer's status."""
    with httpx.Client(base_url=daemon.tcp, timeout=60) as client:

        def send(caller: str, method: str, path: str, query: dict[str, str]) -> int:
            names = {"sandbox_id": sandbox_id, "session_id": sandbox_id, "port": "1", "path": "x"}
            at = path.replace("{path:path}", "{path}")
            at = at.format(
                exec_id="e",
                context_id="e",
                cell_id="0" * 32,
                snapshot_id="s",
                execution_id="x",
                key_id="k",
                template="t",
                digest="0" * 64,
                **names,
            )
            headers = _headers(keys.get(caller))
            if method == permissions.WEBSOCKET:
                url = str(httpx.URL(daemon.tcp.replace("http", "ws") + at, params=query))
                try:
                    connect(url, additional_headers=headers, proxy=None).close()
                except InvalidStatus as exc:
                    return exc.response.status_code
                return 101
            body = BODIES[path] if _rule(method, path).body == permissions.JSON else None
            sent = client.request(method, at, params=query, json=body, headers=headers)
            return sent.status_code

        yield send


def _expected(caller: str, method: str, path: str) -> str:
    scope = CALLERS[caller]
    if scope is None:
        return "401"
    if scope not in _rule(method, path).scopes or caller == "another token":
        return "403"
    return "yes"


def test_every_route_is_in_the_table() -> None:
    """And nothing that is no route; an application with another one does not start."""
    methods: dict[str, set[str]] = {}
    for method, path in ROUTES:
        methods.setdefault(path, set()).add(method)
    listed = {(method, path) for method, path in permissions.ROUTES if method != permissions.ANY}
    previews = {path for method, path in permissions.ROUTES if method == permissions.ANY}

    assert listed == {(m, p) for m, p in ROUTES if p not in previews}
    assert previews <= methods.keys()
    assert {scope for rule in permissions.ROUTES.values() for scope in rule.scopes} == {*SCOPES}
    permissions.check_complete([(["GET"], "/v1/info")])
    with pytest.raises(LookupError, match="POST /v1/info"):
        permissions.check_complete([(["GET", "POST"], "/v1/info")])


def test_what_a_route_takes_is_in_the_table() -> None:
    for path, operations in DOCUMENT["paths"].items():
        for method, operation in operations.items():
            content = operation.get("requestBody", {}).get("content", {})
            stream = "application/octet-stream" in content or path.endswith("/stdin")
            kind = permissions.JSON if "application/json" in content else permissions.NOTHING
            said = _rule(method.upper(), path).body
            assert (permissions.STREAM if stream else kind) == said, (method, path)


def _columns(words: Iterable[str]) -> str:
    return " ".join(f"{each:>13}" for each in words)


def test_each_route_for_each_caller(ask: Any) -> None:
    """Who is let in is told of a parameter that no route has: nothing is done."""
    lines, wrong = [], []
    for method, path in ROUTES:
        row = []
        for caller in CALLERS:
            status = ask(caller, method, path, {**QUERIES, "no-such-parameter": "1"})
            row.append(str(status) if status in (401, 403) else "yes")
        changes = ", ".join(_rule(method, path).changes)
        lines.append(f"{method:7} {path:62} {changes:28} {_columns(row)}")
        expected = [_expected(caller, method, path) for caller in CALLERS]
        if row != expected:
            wrong.append((method, path, dict(zip(CALLERS, row, strict=True)), expected))
    print(f"\n{'':70} {'changes':28} {_columns(CALLERS)}")
    print("\n".join(lines))
    assert [] == wrong


def test_anothers_sandbox_is_not_there_on_any_route(ask: Any) -> None:
    for method, path in ROUTES:
        if "{sandbox_id}" not in path and "{session_id}" not in path:
            continue
        query = dict(QUERIES) if "/files" in path else {}
        if path.endswith(("glob", "search")):
            query = {"pattern": "a"}
        elif "/files" in path:
            query = {"path": "."}
        if path.endswith(("move", "dirs", "replace")):
            query = {}
        refused = 404 if _rule(method, path).scopes != (ADMIN,) else 403
        assert refused == ask("another user", method, path, query), (method, path)


def test_the_short_way_asks_the_same_table(ask: Any, keys: dict[str, str], daemon: Daemon) -> None:
    """Requests without a query are answered without the framework."""
    for caller in ("token", "another token", "metrics", "read_only"):
        for method, path in (
            ("POST", "/v1/sandboxes"),
            ("DELETE", "/v1/sandboxes/{sandbox_id}"),
        ):
            assert 403 == ask(caller, method, path, {})
    at = "/v1/sandboxes/{sandbox_id}"
    assert (200, 403) == (ask("token", "GET", at, {}), ask("another token", "GET", at, {}))
    start: tuple[str, str, dict[str, str]] = ("POST", f"{at}/execs", {})
    found = [ask(caller, *start) for caller in ("token", "another token", "read_only", "metrics")]
    assert [201, 403, 403, 403] == found


# -- fields ---------------------------------------------------------------------------------------

NOWHERE = {"mode": "limited", "allowed_hosts": ["example.com"]}
FAR = {"host": "192.168.78.1", "ports": "443"}

SPECS: dict[str, tuple[Any, Any]] = {
    "profile": ("own_root", "os_hardened"),
    "python_env": (True, False),
    "allow_degraded": (["*"], []),
    "memory_dir": ("/etc", None),
    "network.mode": ("unrestricted", None),
    "network.allowed_hosts": (["127.0.0.1"], ["192.168.77.5:443"]),
    "network.rules": ([FAR], [{"host": "192.168.77.0/25", "ports": "443"}]),
    "mounts.source": ("/etc", None),
    "ttl_s": (3601, 3600),
    **{f"limits.{name}": (most + 1, most) for name, most in MOST.items() if name != "ttl_s"},
}
"""By the field of a spec: what only an admin may say, and what anybody."""

TEMPLATES = ("POST", "/v1/templates")
OF_NO_BUILD = ("memory_dir", "python_env", "ttl_s")
"""Fields of a spec that no template has, whoever asks."""

FREE = {
    # Who works in a sandbox may do all that with a command, or it binds nobody but the sandbox.
    SandboxSpec: "id labels template image env secrets tier user workdir protect unprotect deny"
    " disk_root",  # its size is `limits.disk_bytes`
    AcquireOptions: "preferred_id require_fresh required preferred_backend required_labels use_pool"
    " key metadata snapshot_id",
    NetworkPolicy: "learn",  # `limits` are of a sandbox's own connections
    NetworkRule: "host ports action methods paths credential inspect",  # judged as `network.rules`
    Mount: "target access nofollow protect",
    ExecRequest: "argv cwd env user stdin pty stream_stdin session_leader",
    ExecutionRequest: "command args env work_dir stdin tier id",
    AttachRequest: "sandbox_id create_if_missing create_spec",
    TemplateRequest: "name steps base backend start ready fresh keep_env",
    TemplateStep: "run pip_install copy to env workdir user fresh",  # `source` and `mode` are of the upload
    Extend: "",
    NewToken: "",
    NewKey: "owner scope name expires_in_s max_sandboxes max_requests",  # by admins alone
    Rotate: "overlap_s",
}


def test_every_field_is_judged_or_free() -> None:
    """A new field of a request is somebody's decision."""
    judged = {name.rpartition(".")[2] for name in permissions.FIELDS} | {"network", "mounts"}
    for model, free in FREE.items():
        names = getattr(model, "__match_args__", None) or model.model_fields  # type: ignore[attr-defined]
        assert {*free.split()} == {*names} - judged, model.__name__
    assert {"timeouts"} == judged & {*OF_CREATE}


def _spec_with(name: str, value: Any) -> dict[str, Any]:
    if name == "mounts.source":
        return {"mounts": [{"target": "/work", **({"source": value} if value else {})}]}
    if name == "network.mode":
        return {"network": {"mode": value} if value else NOWHERE}
    outer, _, inner = name.partition(".")
    if outer == "network":
        return {"network": {"mode": "limited", inner: value}}
    return {outer: {inner: value}} if inner else {name: value}


def _places(sandbox_id: str, caller: str) -> dict[tuple[str, str], Any]:
    """Where a spec can be said, and how; none of them makes a sandbox."""
    client = {"another user": "bob", "admin": "ops"}.get(caller, "alice")
    attach = {"sandbox_id": sandbox_id, "client_id": client, "create_if_missing": True}
    return {
        ("POST", "/v1/sandboxes"): lambda spec: {**spec, "backend": "nowhere"},
        ("POST", "/v1/sessions"): lambda spec: {
            "spec": spec,
            "options": {"preferred_backend": "nowhere"},
        },
        ("POST", "/v1/sessions/attach"): lambda spec: {**attach, "create_spec": spec},
        TEMPLATES: lambda spec: {"name": "x", "base": spec, "backend": "nowhere"},
    }


def _names_in(schema: Any, seen: set[str]) -> set[str]:
    """Schemas that a schema refers to, however deep."""
    for key, value in schema.items() if isinstance(schema, dict) else enumerate(schema):
        if key == "$ref":
            name = value.rpartition("/")[2]
            if name not in seen:
                seen.add(name)
                _names_in(DOCUMENT["components"]["schemas"][name], seen)
        elif isinstance(value, (dict, list)):
            _names_in(value, seen)
    return seen


def _taking(schema: str) -> set[tuple[str, str]]:
    """Routes open to users whose body has that schema in it."""
    return {
        (method.upper(), path)
        for path, operations in DOCUMENT["paths"].items()
        for method, operation in operations.items()
        if schema in _names_in(operation.get("requestBody", {}), set())
        and "user" in _rule(method.upper(), path).scopes
    }


@pytest.mark.full
def test_each_field_of_a_spec_for_each_caller(
    daemon: Daemon, keys: dict[str, str], sandbox_id: str
) -> None:
    places = _places(sandbox_id, "user").keys()
    assert _taking("SandboxSpec") | _taking("CreateRequest") == places
    fork = ("POST", "/v1/sandboxes/{sandbox_id}/fork")  # tests/fork asks it with each
    network = ("PUT", "/v1/sandboxes/{sandbox_id}/network")
    assert _taking("NetworkPolicy") == places | {network, fork}
    assert _taking("Mount") == places | {("POST", "/v1/sandboxes/{sandbox_id}/mounts")}
    assert _taking("Limits") == places | {fork}
    lines, wrong = [], []
    with httpx.Client(base_url=daemon.tcp, timeout=60) as client:
        for name, values in SPECS.items():
            for method, path in places:
                if (method, path) == TEMPLATES and name in OF_NO_BUILD:
                    continue
                for value in values:
                    is_admins = value is values[0]
                    row = []
                    for caller in CALLERS:
                        body = _places(sandbox_id, caller)[method, path](_spec_with(name, value))
                        headers = _headers(keys.get(caller))
                        answer = client.request(method, path, json=body, headers=headers)
                        status, field = answer.status_code, answer.json().get("field", "")
                        row.append(str(status) if status in (401, 403) else "yes")
                        of_field = caller in OWNERS and row[-1] == "403"
                        last = name.rpartition(".")[2]
                        if row[-1] != _expected_of_field(caller, is_admins=is_admins) or (
                            last not in field if of_field else name in field
                        ):
                            wrong.append((name, path, caller, value, answer.text))
                    what = f"{name} = {json.dumps(value)}"
                    lines.append(f"{what:60} {path:20} {_columns(row)}")
    print(f"\n{'':81} {_columns(CALLERS)}")
    print("\n".join(lines))
    assert [] == wrong


OWNERS = ("user", "another user", "admin")


def _expected_of_field(caller: str, *, is_admins: bool) -> str:
    if CALLERS[caller] is None:
        return "401"
    if caller not in OWNERS or (is_admins and caller != "admin"):
        return "403"
    return "yes"


def test_what_changes_a_sandbox_is_judged_as_what_makes_one(
    daemon: Daemon, keys: dict[str, str], sandbox_id: str
) -> None:
    at = f"/v1/sandboxes/{sandbox_id}"
    asked: list[tuple[str, str, Any, str]] = [
        ("PUT", f"{at}/network", {"mode": "unrestricted"}, "mode"),
        ("PUT", f"{at}/network", {"mode": "limited", "allowed_hosts": ["[::1]:80"]}, "allowed"),
        ("PUT", f"{at}/network", {"mode": "limited", "rules": [FAR]}, "rules[0].host"),
        ("POST", f"{at}/mounts", {"target": "/a", "source": "/etc"}, "source"),
        ("POST", f"{at}/extend", {"ttl_s": 3601}, "ttl_s"),
        ("POST", f"{at}/execs", {"argv": ["true"], "timeout_s": 61}, "timeout_s"),
        ("POST", f"{at}/execs", {"argv": ["true"], "max_output_bytes": 2**21}, "max_output"),
        ("POST", "/v1/sandboxes", {"timeouts": {"idle_s": None}}, "timeouts.idle_s"),
        ("POST", "/v1/sessions", {"options": {"timeouts": {"detach_s": 901}}}, "options.timeouts"),
        ("POST", "/v1/sessions/attach", {"sandbox_id": "x", "client_id": "carol"}, "client_id"),
        ("POST", "/v1/sessions", {"client_id": "carol"}, "client_id"),
        ("POST", "/api/v1/sandbox/execute", {"command": "true", "memory_mb": 257}, "memory_mb"),
        ("POST", "/api/v1/sandbox/execute", {"command": "true", "timeout_secs": 61}, "timeout"),
    ]
    with httpx.Client(base_url=daemon.tcp, timeout=60) as client:
        lines = []
        for method, path, body, field in asked:
            row = []
            for caller in CALLERS:
                if caller == "admin":
                    continue  # the controls below: it would be done
                answer = client.request(method, path, json=body, headers=_headers(keys.get(caller)))
                row.append(str(answer.status_code))
                if caller == "user" or (caller == "token" and path.endswith("/execs")):
                    assert 403 == answer.status_code, (path, body, answer.text)
                    assert answer.json()["field"].startswith(field), answer.text
                assert answer.status_code in (401, 403, 404), (caller, path, body, answer.text)
            lines.append(
                f"{path.replace(sandbox_id, '...'):38} {json.dumps(body):62} {_columns(row)}"
            )
        print(f"\n{'':101} {_columns(list(CALLERS)[:-1])}")
        print("\n".join(lines))
    with httpx.Client(base_url=daemon.tcp, headers=_headers(keys["user"]), timeout=60) as alice:
        headers = _headers(keys["admin"])
        controls = [asked[1], asked[4], asked[5]]
        for method, path, body, _field in controls:
            answer = alice.request(method, path, json=body, headers=headers)
            assert answer.is_success, answer.text
        # What an admin opened on a sandbox of hers she cannot open again, but can close.
        opened = alice.get(f"{at}/network").json()
        assert ["[::1]:80"] == opened["allowed_hosts"]
        assert 403 == alice.put(f"{at}/network", json=opened).status_code
        assert 200 == alice.put(f"{at}/network", json=NOWHERE).status_code


def test_what_is_left_out_is_bounded_too(
    daemon: Daemon, keys: dict[str, str], client: httpx.Client
) -> None:
    """A user's limits, as the sandbox was made with; an admin's are the host's."""
    with httpx.Client(base_url=daemon.tcp, headers=_headers(keys["user"]), timeout=60) as alice:
        made = alice.post("/v1/sandboxes", json={"limits": {"pids": 16}}).raise_for_status().json()
        inside = {"argv": ["sh", "-c", "ulimit -n; df -B1 --output=size / | tail -1"], "wait": True}
        ran = alice.post(f"/v1/sandboxes/{made['id']}/execs", json=inside).json()["result"]
        files, disk = ran["stdout"].split()
        alice.delete(f"/v1/sandboxes/{made['id']}")
    free = client.post("/v1/sandboxes", json={}).raise_for_status().json()
    client.delete(f"/v1/sandboxes/{free['id']}")

    limits = {name: most for name, most in MOST.items() if name != "ttl_s"}
    del limits["idle_timeout_s"]  # the server's own is lower
    assert {**limits, "pids": 16} == {**made["limits"], "wall_time_s": 60}
    assert (256, 2**26) == (int(files), int(disk))
    assert 3500 < made["expires_in_s"] <= 3600
    assert ({}, None) == (free["limits"], free["expires_in_s"])


def test_a_restored_policy_is_judged_anew(
    daemon: Daemon, keys: dict[str, str], client: httpx.Client
) -> None:
    """An admin's key and a user's of the same owner: what the one could have the other cannot."""
    admin = client.post("/v1/keys", json={"owner": "alice", "scope": "admin"}).json()["key"]
    with httpx.Client(base_url=daemon.tcp, timeout=60) as http:
        strong, weak = _headers(admin), _headers(keys["user"])
        network = {"mode": "limited", "allowed_hosts": ["127.0.0.1:1"]}
        body = {"network": network, "limits": {"memory_bytes": 2**29}}
        made = http.post("/v1/sandboxes", json=body, headers=strong).raise_for_status().json()
        snapshot = http.post(f"/v1/sandboxes/{made['id']}/snapshots", headers=strong).json()["id"]
        changes: list[tuple[dict[str, Any], str]] = [
            ({}, "network.allowed_hosts[0]"),
            ({"network": NOWHERE}, "limits.memory_bytes"),
            ({"network": NOWHERE, "limits": {}}, ""),
        ]
        for change, field in changes:
            asked = {"snapshot_id": snapshot, **change}
            answer = http.post("/v1/sandboxes", json=asked, headers=weak)
            assert field == (answer.json()["field"] if field else ""), answer.text
            assert (403 if field else 201) == answer.status_code
        http.delete(f"/v1/sandboxes/{answer.json()['id']}", headers=weak)
        http.delete(f"/v1/sandboxes/{made['id']}", headers=strong)
        http.delete(f"/v1/snapshots/{snapshot}", headers=strong)
