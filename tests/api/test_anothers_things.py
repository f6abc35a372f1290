"""What a request names besides the sandbox of its path is the caller's own too, on every route."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.api.conftest import Daemon, StartDaemon

pytestmark = pytest.mark.anyone


@pytest.fixture(scope="module")
def daemon(start_daemon: StartDaemon) -> Daemon:
    return start_daemon("--listen", "127.0.0.1:0")


@pytest.fixture(scope="module")
def clients(daemon: Daemon) -> Iterator[dict[str, httpx.Client]]:
    """Two users: alice, who has all that is named, and bob."""
    found = {}
    for owner in ("alice", "bob"):
        with daemon.client() as admin:
            key = admin.post("/v1/keys", json={"owner": owner}).raise_for_status().json()["key"]
        headers = {"x-api-key": key}
        found[owner] = httpx.Client(base_url=daemon.tcp, headers=headers, timeout=60)
    yield found
    for each in found.values():
        each.close()


def made(client: httpx.Client, path: str, **body: Any) -> Any:
    return client.post(path, json=body).raise_for_status().json()


def upload(client: httpx.Client, content: bytes) -> str:
    """Store content for templates; its digest."""
    digest = hashlib.sha256(content).hexdigest()
    client.put(f"/v1/uploads/{digest}", content=content).raise_for_status()
    return digest


@pytest.fixture(scope="module")
def things(clients: dict[str, httpx.Client]) -> dict[str, str]:
    """Ids of alice's things, and of bob's two sandboxes."""
    alice, bob = clients["alice"], clients["bob"]
    sandbox = made(alice, "/v1/sandboxes", name="hers", labels={"whose": "hers"})["id"]
    in_it = f"/v1/sandboxes/{sandbox}"
    found = {
        "sandbox": sandbox,
        "snapshot": made(alice, f"{in_it}/snapshots")["id"],
        "exec": made(alice, f"{in_it}/execs", argv=["true"], wait=True)["id"],
        "execution": made(alice, "/api/v1/sandbox/execute?wait=true", command="true")["id"],
        "session": made(alice, "/v1/sessions")["session"]["session_id"],
        "upload": upload(alice, b"hers"),
    }
    for number in ("1", "2"):
        found[f"own{number}"] = made(bob, "/v1/sandboxes")["id"]
    return found


Ask = Callable[[dict[str, str], str], tuple[str, str, Any]]


def of_session(verb: str) -> Ask:
    return lambda has, _own: ("POST", f"/v1/sessions/{has['session']}/{verb}", None)


NAMED: dict[str, Ask] = {
    "create from a snapshot": lambda has, _own: (
        "POST",
        "/v1/sandboxes",
        {"snapshot_id": has["snapshot"]},
    ),
    "changes since a snapshot": lambda has, own: (
        "GET",
        f"/v1/sandboxes/{own}/changes?since={has['snapshot']}",
        None,
    ),
    "show a snapshot": lambda has, _own: ("GET", f"/v1/snapshots/{has['snapshot']}", None),
    "merge into a sandbox": lambda has, own: (
        "POST",
        f"/v1/sandboxes/{own}/merge",
        {"into": has["sandbox"], "base": has["snapshot"]},
    ),
    "attach to a sandbox": lambda has, _own: (
        "POST",
        "/v1/sessions/attach",
        {"sandbox_id": has["sandbox"]},
    ),
    "make a sandbox the default": lambda has, _own: (
        "PUT",
        "/v1/sessions/default",
        {"sandbox_id": has["sandbox"]},
    ),
    "ask for an exec": lambda has, own: (
        "GET",
        f"/v1/sandboxes/{own}/execs/{has['exec']}",
        None,
    ),
    "ask for an execution": lambda has, _own: (
        "GET",
        f"/api/v1/sandbox/status/{has['execution']}",
        None,
    ),
    "kill an execution": lambda has, _own: (
        "POST",
        f"/api/v1/sandbox/kill/{has['execution']}",
        None,
    ),
    "kill an exec": lambda has, own: (
        "POST",
        f"/v1/sandboxes/{own}/execs/{has['exec']}/kill",
        None,
    ),
    "ask for a session": lambda has, _own: ("GET", f"/v1/sessions/{has['session']}", None),
    "attach by a session": lambda has, _own: (
        "POST",
        "/v1/sessions/attach",
        {"sandbox_id": has["session"]},
    ),
    **{f"{verb} a session": of_session(verb) for verb in ("detach", "suspend", "resume", "touch")},
    "release a session": lambda has, _own: (
        "POST",
        f"/v1/sessions/{has['session']}/release",
        {"keep_alive": False},
    ),
    "delete a snapshot": lambda has, _own: (
        "DELETE",
        f"/v1/snapshots/{has['snapshot']}",
        None,
    ),
}
"""Requests that name something of alice's, by what they ask for; the last takes it away."""


def ask(client: httpx.Client, method: str, path: str, body: Any) -> httpx.Response:
    return client.request(method, path, json=body)


@pytest.mark.parametrize("what", NAMED)
def test_what_another_has_is_not_there(
    clients: dict[str, httpx.Client], things: dict[str, str], what: str
) -> None:
    """And is there for its owner, in whose place `own` is a sandbox of hers."""
    bobs = ask(clients["bob"], *NAMED[what](things, things["own1"]))
    hers = ask(clients["alice"], *NAMED[what](things, things["sandbox"]))
    assert 404 == bobs.status_code, bobs.text
    assert 404 != hers.status_code


def test_a_merge_over_anothers_snapshot_is_refused_with_two_sandboxes_of_ones_own(
    clients: dict[str, httpx.Client],
) -> None:
    alice, bob = clients["alice"], clients["bob"]
    sandbox = made(alice, "/v1/sandboxes")["id"]
    hers = made(alice, f"/v1/sandboxes/{sandbox}/snapshots")["id"]
    first, second = (made(bob, "/v1/sandboxes")["id"] for _ in range(2))
    his = made(bob, f"/v1/sandboxes/{first}/snapshots")["id"]
    path = f"/v1/sandboxes/{first}/merge"
    assert 404 == ask(bob, "POST", path, {"into": second, "base": hers}).status_code
    assert 200 == ask(bob, "POST", path, {"into": second, "base": his}).status_code


def test_content_that_another_uploaded_is_not_there(
    clients: dict[str, httpx.Client], things: dict[str, str]
) -> None:
    """Whoever knows its digest is not told that it exists, and gets nothing of it."""
    at = f"/v1/uploads/{things['upload']}"
    tar = {"accept": "application/x-tar"}
    for name, is_hers in (("alice", True), ("bob", False)):
        assert is_hers == clients[name].get(at).raise_for_status().json()["present"]
        sent = clients[name].get(at, headers=tar)
        assert (is_hers, is_hers) == (sent.is_success, sent.content == b"hers")


def test_a_key_of_a_request_is_each_clients_own(
    clients: dict[str, httpx.Client], things: dict[str, str]
) -> None:
    headers = {"idempotency-key": "same"}
    made: list[str] = []
    for name in ("alice", "bob", "alice", "bob"):
        answered = clients[name].post("/v1/sandboxes", json={}, headers=headers)
        made.append(answered.raise_for_status().json()["id"])
    assert made[:2] == made[2:]
    assert made[0] != made[1]
    for name, each in zip(("alice", "bob"), made, strict=False):
        assert 200 == clients[name].delete(f"/v1/sandboxes/{each}").status_code
    again = clients["bob"].post("/v1/sandboxes", json={}, headers=headers)
    assert (200, made[1], "terminated") == (
        again.status_code,
        again.json()["id"],
        again.json()["state"],
    )


def test_no_list_shows_what_another_has(clients: dict[str, httpx.Client]) -> None:
    alice, bob = clients["alice"], clients["bob"]
    sandbox = made(alice, "/v1/sandboxes")["id"]
    made(alice, f"/v1/sandboxes/{sandbox}/snapshots")
    for path in ("/v1/sandboxes", "/v1/snapshots", "/v1/sessions", "/v1/events"):
        hers, his = (each.get(path).raise_for_status().text for each in (alice, bob))
        assert sandbox in hers, path
        assert sandbox not in his, path
    narrowed = bob.get("/v1/snapshots", params={"sandbox_id": sandbox}).raise_for_status()
    assert [] == narrowed.json()["items"]
