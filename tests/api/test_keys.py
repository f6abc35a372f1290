"""Keys: their end, bounds and use; tokens, which never outlive what made them; who is told of what."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.conftest import Daemon, StartDaemon

pytestmark = pytest.mark.anyone

Opened = Callable[..., httpx.Client]


@pytest.fixture(scope="module")
def daemon(start_daemon: StartDaemon, tmp_path_factory: pytest.TempPathFactory) -> Daemon:
    """With a quota for each client."""
    config = tmp_path_factory.mktemp("quota") / "config.json"
    config.write_text(json.dumps({"manager": {"max_of_client": 3}}))
    return start_daemon("--listen", "127.0.0.1:0", "--config", str(config))


@pytest.fixture
def opened(daemon: Daemon, client: httpx.Client) -> Iterator[Opened]:
    """A client with a new key, or with the one that is given."""
    clients: list[httpx.Client] = []

    def make(owner: str = "ann", *, key: str = "", **body: Any) -> httpx.Client:
        if not key:
            asked = {"owner": owner, **body}
            key = client.post("/v1/keys", json=asked).raise_for_status().json()["key"]
        clients.append(httpx.Client(base_url=daemon.tcp, headers={"x-api-key": key}, timeout=60))
        return clients[-1]

    yield make
    for each in clients:
        each.close()


def _id(client: httpx.Client) -> str:
    return str(client.headers["x-api-key"]).removeprefix("rf_").partition(".")[0]


def _until_refused(client: httpx.Client, path: str) -> None:
    until = time.monotonic() + 60
    while client.get(path).status_code != 401:
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.full
def test_a_key_ends_in_time_and_its_tokens_with_it(opened: Opened, client: httpx.Client) -> None:
    short, long = opened(expires_in_s=3.0), opened()
    at = f"/v1/sandboxes/{long.post('/v1/sandboxes', json={}).json()['id']}"
    by_key = short.post(f"{at}/tokens", json={"ttl_s": 1000}).raise_for_status().json()
    by_itself = long.post(f"{at}/tokens", json={"ttl_s": 2.0}).raise_for_status().json()
    lasting = long.post(f"{at}/tokens").raise_for_status().json()
    tokens = [opened(key=each["key"]) for each in (by_key, by_itself, lasting)]
    found = {each["id"]: each for each in client.get("/v1/keys").json()["items"]}

    assert by_key["expires_at"] == found[_id(short)]["expires_at"] < time.time() + 3
    assert (_id(long), None) == (found[lasting["id"]]["made_with"], lasting["expires_at"])
    _until_refused(short, "/v1/info")
    for token in tokens[:2]:
        _until_refused(token, at)
    assert 200 == tokens[2].get(at).status_code == long.get(at).status_code
    long.delete(at)


def test_a_token_goes_with_the_key_that_made_it(opened: Opened, client: httpx.Client) -> None:
    """Also over a restart, as it is written down."""
    mine, other = opened(), opened()
    at = f"/v1/sandboxes/{mine.post('/v1/sandboxes', json={}).json()['id']}"
    tokens = [opened(key=each.post(f"{at}/tokens").json()["key"]) for each in (mine, other, client)]
    before = [each.get(at).status_code for each in tokens]
    assert 204 == client.delete(f"/v1/keys/{_id(mine)}").status_code
    after = [each.get(at).status_code for each in tokens]
    kept = {each["id"] for each in client.get("/v1/keys").json()["items"]}

    assert ([200] * 3, [401, 200, 200]) == (before, after)
    assert [False, True, True] == [_id(each) in kept for each in tokens]
    other.delete(at)


def test_a_sandbox_has_no_end_of_tokens(opened: Opened) -> None:
    ann = opened()
    at = f"/v1/sandboxes/{ann.post('/v1/sandboxes', json={}).json()['id']}"
    made = [ann.post(f"{at}/tokens").status_code for _ in range(101)]

    assert [201] * 100 + [429] == made
    ann.delete(at)


def test_a_rotated_key_has_another_secret(opened: Opened, client: httpx.Client) -> None:
    ann = opened()
    at = f"/v1/keys/{_id(ann)}/rotate"
    beside = opened(key=client.post(at, json={"overlap_s": 3600}).raise_for_status().json()["key"])
    both = [ann.get("/v1/info").status_code, beside.get("/v1/info").status_code]
    instead = opened(key=client.post(at).raise_for_status().json()["key"])
    statuses = [each.get("/v1/info").status_code for each in (ann, beside, instead)]

    assert ([200, 200], [401, 401, 200]) == (both, statuses)
    assert _id(ann) == _id(instead)
    assert 404 == client.post("/v1/keys/key-none/rotate").status_code
    assert 422 == client.post(at, json={"overlap_s": -1}).status_code


def test_a_token_has_one_secret(opened: Opened, client: httpx.Client) -> None:
    ann = opened()
    at = ann.post("/v1/sandboxes", json={}).raise_for_status().json()["id"]
    token = ann.post(f"/v1/sandboxes/{at}/tokens").raise_for_status().json()

    refused = client.post(f"/v1/keys/{token['id']}/rotate")

    assert 409 == refused.status_code
    assert "create a new token" == refused.json()["hint"]
    ann.delete(f"/v1/sandboxes/{at}")


def test_nobody_deletes_the_key_they_use_by_accident(opened: Opened) -> None:
    admin = opened(scope="admin")
    at = f"/v1/keys/{_id(admin)}"
    refused = admin.delete(at)

    assert (409, "lifecycle") == (refused.status_code, refused.json()["code"])
    assert 204 == admin.delete(at, params={"this_key": True}).status_code
    assert 401 == admin.get("/v1/info").status_code


def test_when_a_key_was_used_last_is_kept(
    opened: Opened, client: httpx.Client, daemon: Daemon
) -> None:
    used, unused = opened(), opened()
    before = time.time()
    used.get("/v1/info")
    found = {each["id"]: each["last_used_at"] for each in client.get("/v1/keys").json()["items"]}

    assert before <= found[_id(used)] <= time.time()
    assert found[_id(unused)] is None
    with closing(sqlite3.connect(f"file:{daemon.state_dir}/state.sqlite3?mode=ro", uri=True)) as db:
        kept = db.execute("SELECT used_at FROM keys WHERE id = ?", (_id(used),)).fetchone()
    assert found[_id(used)] == kept[0]


def test_a_clients_own_quota_is_no_want_of_room(opened: Opened, client: httpx.Client) -> None:
    """The server's, by owner, and a key's: waiting makes no room, so nothing says how long to wait."""
    ann, few, none = opened("quo"), opened("quo", max_sandboxes=2), opened("quo", max_sandboxes=0)
    made = [ann.post("/v1/sandboxes", json={}).json()["id"] for _ in range(2)]
    asked: list[tuple[httpx.Client, str, Any]] = [
        (few, "/v1/sandboxes", {}),
        (few, "/v1/sessions", {}),
        (
            few,
            "/v1/sessions/attach",
            {"sandbox_id": "x", "client_id": "quo", "create_if_missing": True},
        ),
        (none, "/v1/sandboxes", {}),
    ]
    for who, path, body in asked:
        answer = who.post(path, json=body)
        assert (429, "quota_exceeded", False) == (
            answer.status_code,
            answer.json()["code"],
            answer.json()["retryable"],
        ), path
        assert "retry-after" not in answer.headers
    failed = few.post("/api/v1/sandbox/execute", json={"command": "true"}).json()
    assert ("failed", "quota_exceeded") == (failed["status"], failed["error"]["code"])
    made.append(ann.post("/v1/sandboxes", json={}).raise_for_status().json()["id"])
    assert 429 == ann.post("/v1/sandboxes", json={}).status_code
    assert [2, 3] == [each.get("/v1/info").json()["max_sandboxes"] for each in (few, ann)]
    for each in made:
        client.delete(f"/v1/sandboxes/{each}")
    again = few.post("/v1/sandboxes", json={}).raise_for_status().json()["id"]
    client.delete(f"/v1/sandboxes/{again}")


def test_a_keys_requests_are_bounded(opened: Opened) -> None:
    """Those at once; another key of the same owner has its own."""
    few, other = opened("req", max_requests=1), opened("req")
    with few.stream("GET", "/v1/events", params={"follow": True}):
        refused = few.get("/v1/info")
        served = other.get("/v1/info")

    assert (429, "max_requests") == (refused.status_code, refused.json()["field"])
    assert "1" == refused.headers["retry-after"]
    assert 200 == served.status_code
    until = time.monotonic() + 60
    while (
        200 != few.get("/v1/info").status_code
    ):  # the server has yet to see that the stream is left
        assert time.monotonic() < until
        time.sleep(0.05)


def test_who_is_told_of_others_and_of_the_host(opened: Opened, client: httpx.Client) -> None:
    watcher, ann, bob = opened(scope="metrics"), opened("one"), opened("two")
    reader = opened("one", scope="read_only")
    made = [each.post("/v1/sandboxes", json={}).json()["id"] for each in (ann, ann, bob)]
    body = {"command": "sleep", "args": ["60"]}
    running = bob.post("/api/v1/sandbox/execute", json=body, params={"wait": False}).json()["id"]
    until = time.monotonic() + 60
    while "running" != bob.get(f"/api/v1/sandbox/status/{running}").json()["status"]:
        assert time.monotonic() < until
        time.sleep(0.05)

    counts = [each.get("/v1/stats").json() for each in (ann, reader, bob, watcher, client)]
    assert [2, 2, 2, 4, 4] == [each["active_sandboxes"] for each in counts]
    assert all("created" not in each and "lost" not in each for each in counts[:3])
    assert all("created" in each for each in counts[3:])
    told = [each.get("/v1/info").json() for each in (ann, client)]
    assert {"backend", "available", "tiers"} == told[0]["backends"][0].keys()
    assert told[0]["backends"][0].keys() < told[1]["backends"][0].keys()
    assert ["user", "admin"] == [each["scope"] for each in told]
    details = [each.get("/v1/health").json() for each in (ann, watcher)]
    assert [False, True] == [any(e["detail"] for e in each["checks"]) for each in details]
    here = [each.get("/api/v1/sandbox/info").json()["running"] for each in (ann, bob, client)]
    assert [0, 1, 1] == here
    assert "ringfence_" in watcher.get("/metrics").text
    bob.post(f"/api/v1/sandbox/kill/{running}")
    for each in made:
        client.delete(f"/v1/sandboxes/{each}")


def test_scopes_are_those(client: httpx.Client) -> None:
    for scope in ("sandbox", "root", "", "read-only"):
        assert 422 == client.post("/v1/keys", json={"owner": "x", "scope": scope}).status_code


@pytest.mark.full
def test_keys_of_an_older_version_open(start_daemon: StartDaemon, tmp_path: Path) -> None:
    """The table is made anew with what was in it."""
    from ringfence.store.schema import MIGRATIONS, migrate

    where = tmp_path / "state"
    where.mkdir(mode=0o700)
    before = next(i for i, each in enumerate(MIGRATIONS) if "new_keys" in each)
    with closing(sqlite3.connect(where / "state.sqlite3", isolation_level=None)) as db:
        migrate(db, MIGRATIONS[:before])
        values = ("key-old", bytes(32), "ann", "user", None, "mine", 1.5)
        db.execute("INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?)", values)
    daemon = start_daemon(state_dir=where)
    with daemon.client() as client:
        (found,) = client.get("/v1/keys").json()["items"]
    daemon.stop()

    assert ("key-old", "ann", "user", "mine", 1.5) == tuple(
        found[name] for name in ("id", "owner", "scope", "name", "created_at")
    )
    assert (None, None, None) == tuple(
        found[n] for n in ("expires_at", "last_used_at", "max_requests")
    )
