"""Sandboxes over HTTP, from create to delete, and everything around them."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ringfence.errors import RingfenceError, error_from_json
from ringfence.model import ClientSession, CreateRequest, SandboxSpec, SandboxView
from tests.api.conftest import Daemon, StartDaemon, metrics_of

pytestmark = pytest.mark.anyone


def _run(client: httpx.Client, sandbox_id: str, script: str) -> dict[str, Any]:
    body = {"argv": ["sh", "-c", script], "wait": True}
    answer = client.post(f"/v1/sandboxes/{sandbox_id}/execs", json=body)
    assert 200 == answer.status_code, answer.text
    result: dict[str, Any] = answer.json()["result"]
    return result


def _make(client: httpx.Client, **body: Any) -> str:
    made = client.post("/v1/sandboxes", json=body)
    assert 201 == made.status_code, made.text
    found: str = made.json()["id"]
    return found


@pytest.fixture(autouse=True)
def _clean(client: httpx.Client) -> Iterator[None]:
    """Each test starts with no sandbox and leaves none."""
    yield
    for each in client.get("/v1/sandboxes").json()["items"]:
        client.delete(f"/v1/sandboxes/{each['id']}")


def test_a_sandbox_from_create_to_delete(client: httpx.Client) -> None:
    made = client.post("/v1/sandboxes", json={"name": "first", "labels": {"team": "a"}})
    sandbox_id = made.json()["id"]
    result = _run(client, sandbox_id, "echo out; echo err >&2; exit 3")
    gone = client.delete(f"/v1/sandboxes/{sandbox_id}")
    again = client.delete(f"/v1/sandboxes/{sandbox_id}")

    assert 201 == made.status_code
    assert ("first", {"team": "a"}) == (made.json()["name"], made.json()["labels"])
    assert 3 == result["exit_code"]
    assert ("out\n", "err\n") == (result["stdout"], result["stderr"])
    assert ("terminated", "terminated") == (gone.json()["state"], again.json()["state"])
    shown = SandboxView.from_json(client.get(f"/v1/sandboxes/{sandbox_id}").json())
    assert ("terminated", "terminated") == (shown.state, shown.reason)


def test_a_sandbox_tells_how_it_was_made_and_when_it_ends(client: httpx.Client) -> None:
    env = {"TOKEN": "not-shown", "A": "b"}
    began = time.time()
    made = client.post(
        "/v1/sandboxes", json={"env": env, "workdir": "/tmp", "user": "root", "ttl_s": 600}
    )
    plain = client.post("/v1/sandboxes", json={}).json()
    assert 201 == made.status_code, made.text
    assert "not-shown" not in made.text
    view = SandboxView.from_json(made.json())
    client.delete(f"/v1/sandboxes/{view.id}")
    gone = SandboxView.from_json(client.get(f"/v1/sandboxes/{view.id}").json())

    assert ("/tmp", "root", None, ("A", "TOKEN")) == (
        view.workdir, view.user, view.image, view.env_names
    )  # fmt: skip
    assert view.expires_at is not None
    assert began + 590 < view.expires_at < time.time() + 600.1
    assert (None, None, None, []) == tuple(
        plain[name] for name in ("workdir", "user", "expires_at", "env_names")
    )
    assert (None, None) == (view.ended_at, plain["ended_at"])
    assert gone.ended_at is not None
    assert began < gone.ended_at < time.time() + 0.1


def test_an_error_is_the_librarys_own(client: httpx.Client) -> None:
    for body, code, field in (
        ('{"limits": {"memory": 3}}', "invalid_request", "limits.memory"),
        ('{"limits": {"memory_bytes": "1g"}}', "invalid_request", "limits.memory_bytes"),
        ('{"ttl_s": NaN}', "invalid_request", "ttl_s"),
        ('{"snapshot_id": "snap-1"}', "snapshot_not_found", ""),
        ('{"backend": "other"}', "invalid_request", "backend"),
        (
            '{"mounts": [{"target": "/a"}, {"target": "//a/"}]}',
            "invalid_request",
            "mounts[1].target",
        ),
        ('{"limits', "bad_json", ""),
        ("[]", "invalid_request", ""),
    ):
        answer = client.post(
            "/v1/sandboxes", content=body, headers={"content-type": "application/json"}
        )
        error: RingfenceError = error_from_json(answer.json())
        assert (code, field) == (error.code, error.field), body
        assert answer.status_code == answer.json()["status"]
        assert type(error) is not RingfenceError
    assert 422 == client.get("/v1/sandboxes", params={"lable": "a=b"}).status_code
    assert 405 == client.put("/v1/sandboxes").status_code
    assert 404 == client.get("/v2").status_code
    assert [] == client.get("/v1/sandboxes").json()["items"]


@pytest.mark.parametrize(
    ("path", "field", "said"),
    [
        ("?limit=abc", "limit", "must be a whole number, not 'abc'"),
        ("?limit=0", "limit", "must be at least 1, not 0"),
        ("?limit=1001", "limit", "must be at most 1000, not 1001"),
        ("?name=" + "x" * 300, "name", "must have at most 255 characters"),
        ("?state=running&state=gone", "state[1]", "must be provisioned, running, suspended or"),
        ("/NO_ID", "sandbox_id", "'NO_ID' is not an id"),
        ("/sbx-1/files/content", "path", "is missing"),
        ("/sbx-1/files/content?path=", "path", "must have 1 to 4095 characters"),
        ("/sbx-1/execs/exec-1/output?stream=all", "stream", "must be stdout, stderr or both"),
        ("/sbx-1/execs/exec-1/wait?timeout_s=soon", "timeout_s", "must be a number, not 'soon'"),
    ],
)
def test_a_parameter_that_does_not_fit_is_refused_in_our_words(
    client: httpx.Client, path: str, field: str, said: str
) -> None:
    answer = client.get(f"/v1/sandboxes{path}")

    error = error_from_json(answer.json())
    assert (422, "invalid_request", field) == (answer.status_code, error.code, error.field)
    assert said in error.message
    assert not error.retryable


def test_a_flag_and_a_small_body_are_refused_in_our_words(client: httpx.Client) -> None:
    sandbox_id = _make(client)
    said = {"ttl_s": "is missing", "more": "no such field", "": "must be a JSON object"}
    bodies: list[object] = [{}, {"ttl_s": 1, "more": 2}, [1]]

    for body, (field, words) in zip(bodies, said.items(), strict=True):
        answer = client.post(f"/v1/sandboxes/{sandbox_id}/extend", json=body)
        assert (422, field, words) == (
            answer.status_code,
            answer.json()["field"],
            answer.json()["message"],
        )
    flag = client.get("/v1/events", params={"follow": "maybe"}).json()
    assert ("follow", "must be true or false, not 'maybe'") == (flag["field"], flag["message"])


def test_a_body_larger_than_is_taken_is_refused(client: httpx.Client) -> None:
    large = json.dumps({"labels": {"a": "x" * (17 << 20)}})
    pieces = (large[i : i + 65536].encode() for i in range(0, len(large), 65536))

    for content in (large.encode(), pieces):
        answer = client.post("/v1/sandboxes", content=content)
        assert (413, "too_large") == (answer.status_code, answer.json()["code"])


def test_create_is_idempotent_under_a_key(client: httpx.Client) -> None:
    """Asked at once and again, whatever became of it; another request under the key is refused."""
    headers, body = {"idempotency-key": "job-1"}, {"labels": {"job": "1"}}
    answers: list[httpx.Response] = []

    def create() -> None:
        answers.append(client.post("/v1/sandboxes", json=body, headers=headers))

    threads = [threading.Thread(target=create) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    ids = {each.json()["id"] for each in answers}
    other = client.post("/v1/sandboxes", json={}, headers=headers)
    (sandbox_id,) = ids
    client.delete(f"/v1/sandboxes/{sandbox_id}")
    late = client.post("/v1/sandboxes", json=body, headers=headers)

    assert [200] * 7 + [201] == sorted(each.status_code for each in answers)
    assert (422, "key") == (other.status_code, other.json()["field"])
    assert (200, sandbox_id) == (late.status_code, late.json()["id"])
    assert "terminated" == late.json()["state"]
    assert [] == client.get("/v1/sandboxes").json()["items"]


def test_an_id_of_the_clients_own(client: httpx.Client) -> None:
    assert "mine-1" == _make(client, id="mine-1")
    client.delete("/v1/sandboxes/mine-1")
    taken = client.post("/v1/sandboxes", json={"id": "mine-1"})

    assert (422, "id") == (taken.status_code, taken.json()["field"])


def test_lists_by_label_state_and_page(client: httpx.Client) -> None:
    ids = [_make(client, labels={"n": str(i), "even": str(i % 2 == 0)}) for i in range(5)]
    client.post(f"/v1/sandboxes/{ids[0]}/suspend")
    client.delete(f"/v1/sandboxes/{ids[4]}")

    def ask(**params: Any) -> list[str]:
        found, cursor = [], ""
        while cursor is not None:
            page = client.get("/v1/sandboxes", params={**params, "cursor": cursor}).json()
            assert len(page["items"]) <= params.get("limit", 100)
            found += [each["id"] for each in page["items"]]
            cursor = page["next_cursor"]
        return found

    assert ids[:4] == ask(limit=1) == ask(limit=3) == ask()
    assert [ids[0], ids[2]] == ask(label="even=True", limit=1)
    assert [ids[2]] == ask(label=["even=True", "n=2"])
    assert [ids[0]] == ask(state="suspended")
    assert [ids[0], ids[4]] == ask(state=["suspended", "terminated"], label="even=True", limit=1)
    assert 422 == client.get("/v1/sandboxes", params={"cursor": "nonsense"}).status_code
    assert 422 == client.get("/v1/sandboxes", params={"label": "n"}).status_code


def test_suspend_and_resume(client: httpx.Client) -> None:
    sandbox_id = _make(client)
    base = f"/v1/sandboxes/{sandbox_id}"
    states = [
        client.post(f"{base}/{verb}").json()["state"]
        for verb in ("suspend", "suspend", "resume", "resume")
    ]
    client.post(f"{base}/suspend")
    refused = client.post(f"{base}/execs", json={"argv": ["true"], "wait": True})

    assert ["suspended", "suspended", "running", "running"] == states
    assert (409, "lifecycle") == (refused.status_code, refused.json()["code"])
    assert "terminated" == client.delete(base).json()["state"]


def test_a_snapshot_is_restored_after_its_sandbox_is_gone(client: httpx.Client) -> None:
    first = _make(client, labels={"a": "1"}, env={"WHERE": "there"})
    _run(client, first, "echo saved > file")
    made = client.post(f"/v1/sandboxes/{first}/snapshots", json={"metadata": {"note": "x"}})
    client.delete(f"/v1/sandboxes/{first}")
    snapshot_id = made.json()["id"]
    again = _make(client, snapshot_id=snapshot_id, labels={"b": "2"})
    listed = client.get("/v1/snapshots", params={"sandbox_id": first}).json()["items"]

    assert 201 == made.status_code
    assert "saved\nthere\n" == _run(client, again, "cat file; echo $WHERE")["stdout"]
    assert {"b": "2"} == client.get(f"/v1/sandboxes/{again}").json()["labels"]
    assert [snapshot_id] == [each["id"] for each in listed]
    assert {"note": "x"} == client.get(f"/v1/snapshots/{snapshot_id}").json()["metadata"]
    assert 204 == client.delete(f"/v1/snapshots/{snapshot_id}").status_code
    assert 404 == client.delete(f"/v1/snapshots/{snapshot_id}").status_code
    assert 0 == _run(client, again, "cat file")["exit_code"]


def test_time_to_live_and_idle_time(client: httpx.Client) -> None:
    kept = _make(client, ttl_s=2.0)
    left = client.post(f"/v1/sandboxes/{kept}/extend", json={"ttl_s": 600}).json()["expires_in_s"]
    short = _make(client, ttl_s=2.0)
    idle = _make(client, idle_timeout_s=0.5)
    with client.stream("GET", "/v1/events", params={"follow": True}) as events:
        ended: dict[str, str] = {}
        for line in events.iter_lines():
            event = json.loads(line[6:]) if line.startswith("data: ") else {}
            if "ended" == event.get("kind") and event["sandbox_id"] in (short, idle, kept):
                ended[event["sandbox_id"]] = event["reason"]
            if len(ended) == 2:
                break

    assert {short: "ttl", idle: "idle"} == ended
    assert 590 < left <= 600
    assert 422 == client.post(f"/v1/sandboxes/{kept}/extend", json={"ttl_s": 0}).status_code


def test_the_name_and_the_labels_of_a_live_sandbox_change(client: httpx.Client) -> None:
    box = _make(client, name="first", labels={"a": "1", "b": "2"}, metadata={"m": "n"})
    at = f"/v1/sandboxes/{box}"

    changed = client.patch(at, json={"name": "second", "labels": {"b": None, "c": "3"}}).json()
    renamed = client.patch(at, json={"name": "third"}).json()
    listed = client.get("/v1/sandboxes", params={"name": "third", "label": "c=3"}).json()
    refused = [
        client.patch(at, json=body)
        for body in (
            {"name": "a\nb"},
            {"labels": {f"l{i}": "" for i in range(64)}},
            {"labels": {"x": 1}},
            {"id": "other"},
        )
    ]
    client.delete(at)
    ended = client.get(at).json()

    assert ("second", {"a": "1", "c": "3"}) == (changed["name"], changed["labels"])
    assert ("third", {"a": "1", "c": "3"}) == (renamed["name"], renamed["labels"])
    assert [box] == [each["id"] for each in listed["items"]]
    assert [422] * 4 == [each.status_code for each in refused]
    assert ("third", {"a": "1", "c": "3"}) == (ended["name"], ended["labels"])  # as written down
    assert {"m": "n"} == ended["metadata"]
    assert 409 == client.patch(at, json={"name": "fourth"}).status_code


def test_events_go_on_where_they_broke_off(client: httpx.Client) -> None:
    first = _make(client)
    client.delete(f"/v1/sandboxes/{first}")

    def lines(count: int, begin: str, **headers: str) -> list[str]:
        params = {"follow": True}
        with client.stream("GET", "/v1/events", params=params, headers=headers) as events:
            wanted = (line for line in events.iter_lines() if line.startswith(begin))
            return list(itertools.islice(wanted, count))

    last, following = (each.removeprefix("id: ") for each in lines(2, "id: "))
    assert [f"id: {following}"] == lines(1, "id: ", **{"last-event-id": last})
    assert ["event: gap"] == lines(1, "event: ", **{"last-event-id": "another-5"})
    kinds = [
        e["kind"] for e in client.get("/v1/events").json()["items"] if e["sandbox_id"] == first
    ]
    assert ["created", "ended"] == kinds


def test_network_mounts_and_reports(client: httpx.Client, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("from the host")
    tmp_path.chmod(0o755)
    base = f"/v1/sandboxes/{_make(client)}"
    policy = {"mode": "limited", "allowed_hosts": ["example.com"]}
    changed = client.put(f"{base}/network", json=policy)
    mounted = client.post(f"{base}/mounts", json={"target": "/data", "source": str(tmp_path)})
    _run(client, base.rsplit("/", 1)[1], "getent hosts nowhere.invalid; true")

    assert ["example.com:443"] == changed.json()["allowed_hosts"] or policy == changed.json()
    assert changed.json() == client.get(f"{base}/network").json()
    assert (201, str(tmp_path)) == (mounted.status_code, mounted.json()["host_path"])
    read = client.get(f"{base}/files/content", params={"path": "/data/f"})
    assert "from the host" == read.text
    assert "/data" in [each["target"] for each in client.get(f"{base}/mounts").json()["items"]]
    assert 200 == client.get(f"{base}/network/log").status_code
    assert "limited" == client.get(f"{base}/network/learned").json()["mode"]
    assert "running" == client.get(f"{base}/stats").json()["state"]
    assert client.get(f"{base}/capabilities").json()["syscall_filter_active"]
    names = [each["name"] for each in client.get(f"{base}/protections").json()["items"]]
    assert "seccomp" in " ".join(names)


def test_sessions_have_what_the_manager_has(client: httpx.Client) -> None:
    body = {"spec": {"labels": {"a": "b"}}, "options": {"metadata": {"x": "y"}}}
    made = client.post("/v1/sessions", json=body)
    session = ClientSession.from_json(made.json()["session"])
    base = f"/v1/sessions/{session.session_id}"
    states = [client.post(f"{base}/{verb}").json()["state"] for verb in ("detach", "suspend")]
    attached = client.post("/v1/sessions/attach", json={"sandbox_id": session.sandbox_id})
    client.put("/v1/sessions/default", json={"sandbox_id": session.sandbox_id})
    default = client.get("/v1/sessions/default").json()["session"]

    assert (201, {"x": "y"}) == (made.status_code, dict(session.metadata))
    assert ["detached", "suspended"] == states
    assert (200, "active") == (attached.status_code, attached.json()["session"]["state"])
    assert session.session_id == default["session_id"]
    assert [session.session_id] == [
        each["session_id"] for each in client.get("/v1/sessions").json()["items"]
    ]
    assert "active" == client.post(f"{base}/touch").json()["state"]
    assert "released" == client.post(f"{base}/release").json()["reason"]
    assert client.get("/v1/sessions/default").json()["session"] is None


def test_a_pool_is_changed_while_it_runs(client: httpx.Client) -> None:
    before = client.get("/v1/pools").json()["config"]
    try:
        off = client.put("/v1/pools", json={"enabled": False}).json()
        assert (False, 0) == (off["config"]["enabled"], off["warm"])
        on = client.put("/v1/pools", json={"min_warm": 3, "max_warm": 4})
        assert 3 == on.json()["config"]["min_warm"]
        _until(
            lambda: client.get("/v1/pools").json()["warm"] >= 3
        )  # nodes of a cluster have as many each
        hits = client.get("/v1/stats").json()["pool_hits"]
        _make(client, env={"A": "1"}, limits={"memory_bytes": 256 << 20})
        assert hits + 1 == client.get("/v1/stats").json()["pool_hits"]
        assert 422 == client.put("/v1/pools", json={"min_warm": 9, "max_warm": 1}).status_code
    finally:
        client.put("/v1/pools", json=before)


def _until(holds: Any) -> None:
    for _ in range(600):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError("it never held")


def test_what_the_server_says_of_itself(client: httpx.Client) -> None:
    sandbox_id = _make(client)
    info = client.get("/v1/info").json()
    metrics = metrics_of(client)

    assert ("local", True) == (info["client"], info["is_admin"])
    assert "native" == info["backends"][0]["backend"]
    assert client.get("/v1/health").json()["ok"]
    assert 1 == client.get("/v1/stats").json()["active_sandboxes"]
    assert 1 == metrics["ringfence_sandboxes"]
    route = 'route="/v1/sandboxes",method="POST",status="201"'
    assert f"ringfence_http_requests_total{{{route}}}" in metrics
    assert not any(sandbox_id in each for each in metrics)
    assert "x-request-id" in client.get("/v1/info").headers


@pytest.mark.full
def test_no_room_is_said_so(start_daemon: StartDaemon) -> None:
    daemon = start_daemon("--max-sandboxes", "1")
    with daemon.client() as client:
        client.put("/v1/pools", json={"enabled": False})
        # The pool may be making one that nobody wants any more: it has the only place until it ends.
        patience = time.monotonic() + 60
        while (made := client.post("/v1/sandboxes", json={})).status_code == 503:
            assert time.monotonic() < patience, made.text
        first = made.json()["id"]
        full = client.post("/v1/sandboxes", json={})
        client.delete(f"/v1/sandboxes/{first}")
        then = client.post("/v1/sandboxes", json={})

    assert (503, "resource_exhausted", True) == (
        full.status_code,
        full.json()["code"],
        full.json()["retryable"],
    )
    assert int(full.headers["retry-after"]) >= 1
    assert 201 == then.status_code
    daemon.stop()


def test_a_stuck_sandbox_delays_nobody(daemon: Daemon, client: httpx.Client) -> None:
    """Its own calls wait, more of them than there are threads; everybody else is served."""
    stuck = _make(client)
    url = f"/v1/sandboxes/{stuck}/files"
    threads = []
    with daemon.client(limits=httpx.Limits(max_connections=100)) as other:

        def search() -> None:
            # A pattern that takes for ever, until its helper is ended.
            params: dict[str, Any] = {"pattern": "(a+)+$", "regex": True, "path": "slow"}
            try:
                other.get(f"{url}/search", params=params)
            except httpx.HTTPError:
                pass

        client.put(f"{url}/content", params={"path": "slow"}, content=b"a" * 40 + b"!")
        threads = [threading.Thread(target=search) for _ in range(40)]
        for each in threads:
            each.start()
        for _ in range(5):
            fresh = _make(client)
            assert 0 == _run(client, fresh, "true")["exit_code"]
            assert 200 == client.delete(f"/v1/sandboxes/{fresh}").status_code
        assert any(each.is_alive() for each in threads)
        assert "terminated" == client.delete(f"/v1/sandboxes/{stuck}").json()["state"]
        for each in threads:
            each.join()


def test_a_request_is_read_and_written_alike() -> None:
    request = CreateRequest(SandboxSpec(labels={"a": "b"}), name="n", given=("labels",))

    assert request == CreateRequest.from_json(request.to_json())
    assert 5.0 == CreateRequest.from_json({"idle_timeout_s": 5}).spec.limits.idle_timeout_s
