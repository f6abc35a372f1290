"""Keys, tokens and signatures of others open nothing; what is sent is bounded."""

from __future__ import annotations

import base64
import gzip
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ringfence.api.access.keys import e2b_form
from tests.api.conftest import StartDaemon
from tests.e2b.conftest import Box, Client, MakeClient, frames_of


@pytest.fixture(scope="module")
def other(make_client: MakeClient) -> Client:
    """A client of another owner."""
    return make_client("bob")


@pytest.fixture(scope="module")
def others_box(other: Client) -> Iterator[Box]:
    """A sandbox of another owner."""
    made = other.create(timeout=600)
    yield made
    other.api("DELETE", f"/sandboxes/{made.id}")


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", ""),
        ("DELETE", ""),
        ("POST", "/timeout"),
        ("POST", "/connect"),
        ("POST", "/pause"),
        ("POST", "/resume"),
        ("POST", "/fork"),
        ("POST", "/snapshots"),
        ("PUT", "/network"),
    ],
)
def test_another_owners_id_opens_nothing(
    client: Client, box: Box, others_box: Box, method: str, path: str
) -> None:
    form = {} if method in ("GET", "DELETE") else {"json": {"timeout": 30}}
    refused = client.api(method, f"/sandboxes/{others_box.id}{path}", **form)

    assert (404, f"sandbox '{others_box.id}' not found") == (
        refused.status_code,
        refused.json()["message"],
    )


def test_another_sandboxes_token_opens_nothing(box: Box, others_box: Box) -> None:
    mixed = {**others_box.headers, "X-Access-Token": box.made["envdAccessToken"]}
    for token in (box.made["envdAccessToken"], "", others_box.made["trafficAccessToken"]):
        headers = {**mixed, "X-Access-Token": token}
        answers = [
            box.http.post("/process.Process/List", json={}, headers=headers),
            box.http.get("/files?path=/etc/passwd", headers=headers),
            box.http.get("/envs", headers=headers),
        ]
        assert [401] * 3 == [each.status_code for each in answers]
        assert "unauthenticated" == answers[0].json()["code"]
    assert 200 == others_box.rpc("/process.Process/List", {}).status_code


def test_an_invented_key_opens_nothing(client: Client) -> None:
    for key in ("", "e2b_00", "e2b_zz", client.key[:-2] + "00", "rf_" + client.key):
        answer = client.http.get("/v2/sandboxes", headers={"X-API-Key": key})
        assert (401, 401) == (answer.status_code, answer.json()["code"])
    assert 200 == client.api("GET", "/v2/sandboxes").status_code


def test_a_key_that_reads_changes_nothing(make_client: MakeClient) -> None:
    reader = make_client("ann", "read_only")

    assert 200 == reader.api("GET", "/v2/sandboxes").status_code
    assert 403 == reader.api("POST", "/v2/sandboxes", json={}).status_code


def test_a_signature_is_for_one_path_and_one_operation(box: Box) -> None:
    box.call("POST", "/files?path=/home/user/a", content=b"a")
    box.call("POST", "/files?path=/home/user/b", content=b"b")
    named = {"E2b-Sandbox-Id": box.id}
    query = box.signed("/home/user/a")

    assert b"a" == box.http.get("/files", params=query, headers=named).content
    assert b"a" == box.http.get("/files", params=query).content, "without the sandbox's id"
    for path in ("/home/user/b", "/home/user/a/../b", "/home/user/a/", "/home/user//a"):
        changed = {**query, "path": path}
        assert 401 == box.http.get("/files", params=changed, headers=named).status_code
        assert 401 == box.http.get("/files", params=changed).status_code
    assert 401 == box.http.post("/files", params=query, content=b"x", headers=named).status_code
    until = str(int(time.time()) - 1)
    for headers in (named, {}):
        late = box.http.get(
            "/files", params=box.signed("/home/user/a", "read", until), headers=headers
        )
        assert (401, "signature is already expired") == (late.status_code, late.json()["message"])
    longer = {**box.signed("/home/user/a", "read", until), "signature_expiration": "9" * 10}
    assert 401 == box.http.get("/files", params=longer, headers=named).status_code


def test_a_signature_for_reading_is_none_for_writing_by_another_split(box: Box) -> None:
    """`path:operation:user:token` has colons between, and a path may have some, too."""
    box.call("POST", "/files?path=/home/user/c:write", content=b"c")
    query = box.signed("/home/user/c:write")
    assert b"c" == box.http.get("/files", params=query).content, "the control"

    split = {**query, "path": "/home/user/c", "username": "read:"}
    for headers in ({}, {"E2b-Sandbox-Id": box.id}):
        answer = box.http.post("/files", params=split, content=b"x", headers=headers)
        assert (401, 401) == (answer.status_code, answer.json()["code"])


def test_a_path_longer_than_any_file_has_is_not_hashed_for_every_sandbox(box: Box) -> None:
    long = "/home/user/" + "x" * 4096
    assert 401 == box.http.get("/files", params=box.signed(long)).status_code
    assert (
        401
        == box.http.get(
            "/files", params=box.signed(long), headers=box.headers | {"X-Access-Token": ""}
        ).status_code
    )


def test_a_removed_key_takes_its_sandboxes_tokens_along(
    make_client: MakeClient, daemon: object
) -> None:
    gone = make_client("carol")
    box = gone.create()
    key_id = bytes.fromhex(gone.key.removeprefix("e2b_")).decode().partition(".")[0]
    assert 200 == box.rpc("/process.Process/List", {}).status_code
    with daemon.client() as admin:  # type: ignore[attr-defined]
        assert 204 == admin.delete(f"/v1/keys/{key_id}").status_code
        refused = box.rpc("/process.Process/List", {})
        admin.delete(f"/v1/sandboxes/{box.id}")

    assert (401, "unauthenticated") == (refused.status_code, refused.json()["code"])


def test_a_name_of_a_snapshot_is_its_owners_also_for_an_admin(make_client: MakeClient) -> None:
    """Admins see the snapshots of all clients, and a name means one of its owner's."""
    bob, admin = make_client("bob"), make_client("ops", "admin")
    boxes = {each.key: each.create() for each in (bob, admin)}

    for caller, owner in ((bob, bob), (admin, admin), (bob, bob), (admin, bob)):
        path = f"/sandboxes/{boxes[owner.key].id}/snapshots"
        assert 201 == caller.api("POST", path, json={"name": "same"}).status_code
        names = [each["names"] for each in bob.api("GET", "/snapshots").json()]
        assert [["same:default"]] == names
    for owner in (bob, admin):
        made = owner.create(templateID="same")
        assert 204 == owner.api("DELETE", f"/sandboxes/{made.id}").status_code
    assert 204 == admin.api("DELETE", "/templates/same").status_code
    assert 404 == admin.api("DELETE", "/templates/same").status_code
    assert 204 == bob.api("DELETE", "/templates/same").status_code
    for owner in (bob, admin):
        owner.api("DELETE", f"/sandboxes/{boxes[owner.key].id}")


def test_a_watcher_answers_in_its_own_sandbox_alone(box: Box, others_box: Box) -> None:
    at = "/filesystem.Filesystem"
    form = box.rpc(f"{at}/CreateWatcher", {"path": "/home/user"}).json()
    box.call("POST", "/files?path=/home/user/watched", content=b"a")

    for call in ("GetWatcherEvents", "RemoveWatcher"):
        refused = others_box.rpc(f"{at}/{call}", form)
        assert (404, "not_found") == (refused.status_code, refused.json()["code"])
    events = box.rpc(f"{at}/GetWatcherEvents", form).json()["events"]
    assert {"watched"} == {each["name"] for each in events}
    assert 200 == box.rpc(f"{at}/RemoveWatcher", form).status_code


def test_a_frame_of_four_gibibytes_is_refused_by_its_head(box: Box) -> None:
    headers = {"content-type": "application/connect+json"}
    body = b"\0\xff\xff\xff\xff" + b"{"
    answer = box.call("POST", "/process.Process/Start", content=body, headers=headers)

    (last,) = frames_of(answer.content)
    assert "resource_exhausted" == last["error"]["code"]


@pytest.mark.full
def test_a_bomb_of_gzip_ends_at_the_bound(box: Box) -> None:
    bomb = gzip.compress(bytes(200 << 20))
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    answer = box.call("POST", "/process.Process/List", content=bomb, headers=headers)

    assert 413 == answer.status_code
    assert 200 == box.rpc("/process.Process/List", {}).status_code


def test_watchers_are_bounded(box: Box) -> None:
    made = [
        box.rpc("/filesystem.Filesystem/CreateWatcher", {"path": "/home/user"}) for _ in range(40)
    ]
    ids = [each.json()["watcherId"] for each in made if each.status_code == 200]

    assert 0 < len(ids) < 40
    assert {"resource_exhausted"} == {each.json()["code"] for each in made[len(ids) :]}
    for watcher_id in ids:
        box.rpc("/filesystem.Filesystem/RemoveWatcher", {"watcherId": watcher_id})


def test_a_web_page_calls_nothing(client: Client, box: Box) -> None:
    page = {"Origin": "https://evil.example"}
    assert 403 == client.api("GET", "/v2/sandboxes", headers=page).status_code
    assert 403 == box.call("GET", "/envs", headers=page).status_code
    assert 403 == client.api("GET", "/v2/sandboxes", headers={"Host": "evil.test"}).status_code


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a sandbox a root of its own")
def test_a_template_is_the_operators_word(start_daemon: StartDaemon, tmp_path: Path) -> None:
    """A client's key may not ask for a root of its own, and gets what the configuration names."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"e2b": {"templates": {"rooted": {"profile": "own_root"}}}}))
    daemon = start_daemon("--e2b", "--listen", "127.0.0.1:0", "--config", str(config))
    with daemon.client() as admin, httpx.Client(base_url=daemon.tcp, timeout=60) as http:
        key = e2b_form(admin.post("/v1/keys", json={"owner": "ann"}).json()["key"])
        asked = {"profile": "own_root"}
        refused = http.post("/v1/sandboxes", json=asked, headers={"X-API-Key": key})
        assert 403 == refused.status_code
        box = Client(http, key).create(templateID="rooted")
    with httpx.Client(base_url=daemon.tcp, timeout=60) as http:
        box.http = http
        as_root = {"authorization": "Basic " + base64.b64encode(b"root:").decode()}
        box.run("mkdir -m 700 /var/of-root", headers=as_root)
        path = "/files?path=/var/of-root/file"
        assert 400 == box.call("POST", path, content=b"1").status_code
        assert 200 == box.call("POST", f"{path}&username=root", content=b"1").status_code
        for more, status in (("", 403), ("&username=root", 200)):
            assert status == box.call("GET", f"{path}{more}").status_code
        box.run("echo -n secret > /root/s; chmod 600 /root/s", headers=as_root)
        secret = "/files?path=/root/s&username=root"
        part = box.call("GET", secret, headers={"Range": "bytes=1-3"})
        assert (206, b"ecr") == (part.status_code, part.content)
        assert 0 == box.run("! ls -A /tmp | grep e2b-")[-2]["event"]["end"].get("exitCode", 0)
        assert 404 == box.call("GET", f"{path}2&username=root").status_code
        services = "/filesystem.Filesystem"
        for name, form in (
            ("MakeDir", {"path": "/root/new/below"}),
            ("Move", {"source": "/root/new", "destination": "/root/a/moved"}),
            ("Remove", {"path": "/root/a"}),
        ):
            assert 403 == box.rpc(f"{services}/{name}", form).status_code, name
            assert 200 == box.rpc(f"{services}/{name}", form, headers=as_root).status_code, name
        (*_, end, _) = box.run("test ! -e /root/new -a ! -e /root/a", headers=as_root)
        assert 0 == end["event"]["end"].get("exitCode", 0)
        (*_, last) = box.run(
            "true", headers={"authorization": "Basic " + base64.b64encode(b"nobody2:").decode()}
        )
        assert "unauthenticated" == last["error"]["code"]
        http.delete(f"/sandboxes/{box.id}", headers={"X-API-Key": key})
