"""One owner's tokens, metadata and floods against another owner's sandboxes and the server."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from ringfence import SandboxSpec
from ringfence.api.access.keys import e2b_form
from ringfence.e2b.tokens import Tokens
from ringfence.model.client_session import SessionTimeouts
from ringfence.sessions.clock import Clock
from ringfence.sessions.live import Live
from tests.api.conftest import Daemon, StartDaemon
from tests.e2b.conftest import Box, Client, MakeClient

pytestmark = pytest.mark.anyone

_MIB = 1 << 20


def _v1(client: Client) -> dict[str, str]:
    key = bytes.fromhex(client.key.removeprefix("e2b_")).decode()
    return {"Authorization": f"Bearer rf_{key}"}


def _made_by_v1(client: Client, sandbox_id: str, **more: object) -> None:
    made = client.http.post("/v1/sandboxes", json={"id": sandbox_id, **more}, headers=_v1(client))
    assert 201 == made.status_code, made.text


def test_a_token_is_of_one_life_of_an_id() -> None:
    """An id may be taken again, by another owner, once its record is gone."""

    def live(session_id: str) -> Live:
        spec, timeouts = SandboxSpec(), SessionTimeouts()
        return Live(Clock(), session_id, "ann", "native", "sbx-1", spec, timeouts, {}, {})

    tokens, before, now = Tokens(None), live("sess-1"), live("sess-2")

    assert tokens.opens(now, tokens.of(now))
    assert tokens.opens_traffic(now, tokens.of_traffic(now))
    assert not tokens.opens(now, tokens.of(before))
    assert not tokens.opens_traffic(now, tokens.of_traffic(before))
    assert not tokens.opens_traffic(now, tokens.of(before))


@pytest.mark.full
@pytest.mark.parametrize(
    "host", ["LOCALHOST:80", "localhost.:80", "127.0.0.1 :80", "127.0.0.1,a.example", "127.1", "*"]
)
@pytest.mark.parametrize("how", ["create", "change"])
def test_no_spelling_of_a_host_opens_the_servers_own(
    client: Client, box: Box, host: str, how: str
) -> None:
    asked = {"allowOut": [host]}
    if how == "create":
        answer = client.api("POST", "/v2/sandboxes", json={"network": asked})
    else:
        answer = client.api("PUT", f"/sandboxes/{box.id}/network", json=asked)

    assert answer.status_code in (400, 403), answer.text
    assert [] == client.api("GET", f"/sandboxes/{box.id}").json()["network"]["allowOut"]


def test_ports_of_a_sandbox_of_v1_are_not_public(client: Client) -> None:
    _made_by_v1(client, "sbx-of-v1")
    found = client.api("GET", "/sandboxes/sbx-of-v1").json()
    host = {"Host": "3000-sbx-of-v1.sbx.test"}
    stranger = client.http.get("/", headers=host)
    owner = client.http.get("/", headers={**host, "X-Access-Token": found["envdAccessToken"]})
    client.api("DELETE", "/sandboxes/sbx-of-v1")

    assert (403, 502) == (stranger.status_code, owner.status_code)
    assert found["network"]["allowPublicTraffic"] is False


@pytest.mark.parametrize("notes", ['{"key": "%s"}', '{"key": ["%s"]}', "[" * 2000])
def test_metadata_of_v1_takes_no_other_owners_key(
    client: Client, make_client: MakeClient, daemon: Daemon, notes: str
) -> None:
    other = make_client("bob")
    key_id = bytes.fromhex(other.key.removeprefix("e2b_")).decode().partition(".")[0]
    text = notes % key_id if "%s" in notes else notes
    body = {"options": {"metadata": {"e2b": text}}}
    made = client.http.post("/v1/sessions", json=body, headers=_v1(client))
    assert 201 == made.status_code, made.text
    sandbox_id = made.json()["session"]["sandbox_id"]
    token = client.api("GET", f"/sandboxes/{sandbox_id}").json()["envdAccessToken"]
    shown = {"E2b-Sandbox-Id": sandbox_id, "X-Access-Token": token}
    answer = client.http.post("/process.Process/List", json={}, headers=shown)
    client.api("DELETE", f"/sandboxes/{sandbox_id}")

    assert (401 if "key" in notes else 200) == answer.status_code, answer.text


@pytest.mark.full
def test_what_keeps_a_parser_busy_is_counted(box: Box) -> None:
    """Read by the decoder in C, 16 MiB of empty lists hold the event loop for seconds."""
    lists = b"[" + b"[]," * 150_000 + b"[]]"
    frame = b'{"process":' + lists + b"}"
    frame = b"\0" + len(frame).to_bytes(4, "big") + frame
    shown = (
        "class X:\n def _repr_mimebundle_(s, **k): return {'application/json': [[]] * 150000}\nX()"
    )
    stream, kernel = {"content-type": "application/connect+json"}, {"E2b-Sandbox-Port": "49999"}

    body = box.call("POST", "/process.Process/List", content=lists)
    message = box.call("POST", "/process.Process/Start", content=frame, headers=stream)
    result = box.call("POST", "/execute", json={"code": shown}, headers=kernel)

    assert "more than 100000 values" in body.json()["message"]
    assert b"more than 100000 values" in message.content
    (main,) = [
        each for each in map(json.loads, result.text.splitlines()) if "is_main_result" in each
    ]
    assert "application/json" in main["extra"]


def test_variables_are_counted_too(client: Client) -> None:
    _made_by_v1(client, "sbx-variables")
    contexts, headers = "/v1/sandboxes/sbx-variables/contexts", _v1(client)
    made = client.http.post(contexts, json={}, headers=headers).json()["id"]
    cells, asked = f"{contexts}/{made}/cells", f"{contexts}/{made}/variables"
    code = (
        "import json as j; real = j.dumps; j.dumps = lambda *a, **k: '[' + '[],' * 150000 + '[]]'"
    )
    client.http.post(cells, json={"code": "a = 1"}, headers=headers)
    control = client.http.get(asked, headers=headers)
    client.http.post(cells, json={"code": code}, headers=headers)
    answer = client.http.get(asked, headers=headers)
    client.api("DELETE", "/sandboxes/sbx-variables")

    assert ["a"] == [each["name"] for each in control.json()["items"]]
    assert "more than 100000 values" in answer.json()["message"]


def test_names_that_a_guest_chose_are_bounded(box: Box) -> None:
    """Of events between two polls, and in a list of a directory."""
    made = box.rpc("/filesystem.Filesystem/CreateWatcher", {"path": "/home/user"}).json()
    box.run("cd; python3 -c 'for n in range(6000): open(str(n).zfill(250), \"w\").close()'")
    box.run("touch last")
    names: list[str] = []
    while "last" not in names:
        found = box.rpc("/filesystem.Filesystem/GetWatcherEvents", made).json()["events"]
        assert sum(len(each["name"]) for each in found) <= _MIB
        names += [each["name"] for each in found]
    deep = "cd /tmp; for n in $(seq 14); do d=$(printf d%.0s $(seq 250)); mkdir $d; cd $d; done; "
    box.run(deep + "touch $(seq 1300)")

    listed = box.rpc("/filesystem.Filesystem/ListDir", {"path": "/tmp", "depth": 20})

    assert "characters in their paths" in listed.json()["message"]
    assert (
        200 == box.rpc("/filesystem.Filesystem/ListDir", {"path": "/tmp", "depth": 3}).status_code
    )


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/v2/sandboxes", {"timeout": 10**400}),
        ("/v2/sandboxes", {"timeout": "--5"}),
        ("/v2/sandboxes", {"timeout": -(10**30)}),
        ("/v2/sandboxes", {"metadata": {"\ud800": "x"}}),
        ("/v2/sandboxes", {"envVars": {"A=B": "x"}}),
        ("/v2/sandboxes", {"network": {"allowOut": ["\0"]}}),
        ("/v2/sandboxes", {"templateID": "../../etc"}),
        ("/v2/sandboxes", {"templateID": "x" * 100_000}),
        ("/sandboxes/{id}/timeout", {"timeout": 10**400}),
        ("/sandboxes/{id}/connect", {"timeout": 10**400}),
        ("/sandboxes/{id}/fork", {"count": 10**400}),
        ("/sandboxes/{id}/snapshots", {"name": "\ud800"}),
        ("/sandboxes/{id}/snapshots", {"name": "x" * 1_000_000}),
    ],
)
def test_a_malformed_request_is_the_clients_fault(
    client: Client, box: Box, path: str, form: dict[str, object]
) -> None:
    answer = client.api("POST", path.replace("{id}", box.id), content=json.dumps(form))

    assert answer.status_code in range(400, 500), answer.text
    assert 200 == client.api("GET", f"/sandboxes/{box.id}").status_code


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/process.Process/SendInput", {"process": {"pid": "--1"}}),
        ("/process.Process/SendSignal", {"process": {"pid": 10**400}, "signal": "SIGNAL_SIGKILL"}),
        ("/process.Process/SendSignal", {"process": {"pid": 1}, "signal": []}),
        ("/filesystem.Filesystem/Stat", {"path": "\0"}),
        ("/filesystem.Filesystem/Stat", {"path": "\ud800"}),
        ("/filesystem.Filesystem/ListDir", {"path": "/", "depth": 10**400}),
        ("/filesystem.Filesystem/Stat", {"path": "/" + "x/" * 5000}),
        ("/filesystem.Filesystem/Move", {"source": "/a", "destination": "/proc/x"}),
        ("/filesystem.Filesystem/Remove", {"path": "/"}),
    ],
)
def test_a_malformed_call_is_the_clients_fault(
    box: Box, path: str, form: dict[str, object]
) -> None:
    answer = box.call("POST", path, content=json.dumps(form))

    assert "the server failed" not in answer.text
    assert answer.status_code < 500 or "code" in answer.json()
    assert 200 == box.rpc("/process.Process/List", {}).status_code


@pytest.mark.full
@pytest.mark.parametrize("most", [{"snapshots": 2}, {"snapshot_bytes": 2 * _MIB}])
def test_a_client_keeps_so_many_snapshots(
    start_daemon: StartDaemon, tmp_path: Path, most: dict[str, int]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"most": most}))
    daemon = start_daemon("--e2b", "--listen", "127.0.0.1:0", "--config", str(config))
    with daemon.client() as admin, httpx.Client(base_url=daemon.tcp, timeout=60) as http:
        key = admin.post("/v1/keys", json={"owner": "ann", "scope": "user"}).json()["key"]
        client = Client(http, e2b_form(key))
        box = client.create()
        box.call("POST", "/files?path=/home/user/x", content=bytes(_MIB))
        path, own = f"/v1/sandboxes/{box.id}/snapshots", _v1(client)
        first = http.post(path, headers=own).json()["id"]
        named = client.api("POST", f"/sandboxes/{box.id}/snapshots", json={"name": "n"})
        answers = [
            http.post(path, headers=own),
            http.post(f"/v1/sandboxes/{box.id}/checkpoint", headers=own),
            client.api("POST", f"/sandboxes/{box.id}/snapshots", json={"name": "other"}),
        ]
        again = client.api("POST", f"/sandboxes/{box.id}/snapshots", json={"name": "n"})
        forked = http.post(f"/v1/sandboxes/{box.id}/fork", headers=own)
        by_admin = admin.post(path)
        for each in (first, by_admin.json()["id"]):
            assert 204 == admin.delete(f"/v1/snapshots/{each}").status_code
        after = http.post(path, headers=own)

    assert 201 == named.status_code == again.status_code == forked.status_code, (
        "replaced, or dropped"
    )
    assert [429] * 3 == [each.status_code for each in answers], [each.text for each in answers]
    assert next(iter(most)) == answers[0].json()["field"]
    assert 201 == by_admin.status_code == after.status_code
