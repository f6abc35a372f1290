"""Bodies: bounded in bytes and counts, read beside the event loop, and refused where none is taken."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.api import bodies
from ringfence.api.access import permissions
from ringfence.errors import BadJson, TooLarge

pytestmark = pytest.mark.anyone

NOTES = 256 << 10


@pytest.mark.full
def test_a_body_is_refused_where_none_is_taken(client: httpx.Client) -> None:
    """On every such route, before it does anything: what a body says must not be passed over."""
    names = dict.fromkeys(("sandbox_id", "exec_id", "session_id", "snapshot_id", "key_id"), "x")
    names |= {"execution_id": "x", "port": "1", "context_id": "x", "cell_id": "0" * 32}
    names |= {"template": "x", "digest": "0" * 64}
    for (method, path), rule in permissions.ROUTES.items():
        if rule.body != permissions.NOTHING or method == permissions.WEBSOCKET:
            continue
        at = path.format(**names)
        refused = client.request(method, at, json={"ttl_s": 60})
        chunked = client.request(method, at, content=iter([b" ", b"[1]"]))
        assert [(422, "body")] * 2 == [
            (a.status_code, a.json()["field"]) for a in (refused, chunked)
        ]
        for empty in (b"", b"{}", b" {} "):
            assert "does not accept a body" not in client.request(method, at, content=empty).text, (
                path
            )


MANY = {str(i): "" for i in range(65)}
AT_MOST: list[tuple[str, Any, Any]] = [
    ("labels", {**dict.fromkeys(map(str, range(64)), "v")}, MANY),
    ("labels", {"k": "v" * ((16 << 10) - 1)}, {"k": "v" * (16 << 10)}),
    ("labels", {"k": "é"}, {"k": "a\nb"}),
    ("labels", {"k e y": ""}, {"k\x1b[2J": ""}),
    ("metadata", {"k": "v" * (NOTES - 1)}, {"k": "v" * NOTES}),
    ("env", {"K": "v" * (NOTES - 1)}, {"K": "v" * NOTES}),
    ("protect", ["a"] * 1000, ["a"] * 1001),
    ("unprotect", [".git/hooks"] * 1000, [".git/hooks"] * 1001),
    ("deny", ["/a"] * 1000, ["/a"] * 1001),
    ("image", "i" * 1000, "i" * 1001),
    ("limits", {"disk_bytes": 2**46}, {"disk_bytes": 10**18}),
    ("limits", {"memory_bytes": 2**46}, {"memory_bytes": 2**46 + 1}),
    ("mounts", [{"target": "/a", "protect": ["a"] * 1000}], [{"target": "/a", "protect": ["a"] * 1001}]),
    ("network", {"mode": "limited", "rules": [{"host": "a.com", "paths": ["/"] * 1000}]},
     {"mode": "limited", "rules": [{"host": "a.com", "paths": ["/"] * 1001}]}),
    ("network", {"mode": "limited", "rules": [{"host": "a.com", "methods": ["GET"] * 64}]},
     {"mode": "limited", "rules": [{"host": "a.com", "methods": ["GET"] * 65}]}),
    ("network", {"mode": "limited", "allowed_hosts": ["a.com:" + ",".join(map(str, range(1, 512, 2)))]},
     {"mode": "limited", "allowed_hosts": ["a.com:" + ",".join(map(str, range(1, 515, 2)))]}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "most", "more"), AT_MOST, ids=[f"{i}-{each[0]}" for i, each in enumerate(AT_MOST)]
)
def test_what_a_request_may_hold(client: httpx.Client, name: str, most: Any, more: Any) -> None:
    """Of two requests that differ in the least, the second is refused by the name of the field."""
    nowhere = {"backend": "nowhere"}  # where no sandbox is made
    taken = client.post("/v1/sandboxes", json={name: most, **nowhere})
    refused = client.post("/v1/sandboxes", json={name: more, **nowhere})

    assert "nowhere" in taken.json()["detail"], taken.text[:500]
    assert (422, "invalid_request") == (refused.status_code, refused.json()["code"])
    assert refused.json()["field"].startswith(name)
    assert len(refused.content) < 2000  # it is not sent back
    if name in ("labels", "protect", "unprotect", "deny"):
        spec = client.post("/v1/sessions", json={"spec": {name: more}})
        assert (422, True) == (spec.status_code, spec.json()["field"].startswith(name))


def test_notes_are_weighed_together(client: httpx.Client) -> None:
    half = {"K": "v" * (NOTES // 2)}
    for body in ({"env": half, "metadata": half}, {"env": half, "secrets": half}):
        answer = client.post("/v1/sandboxes", json=body)
        assert 422 == answer.status_code, answer.text
    options = {"options": {"metadata": {"k": "v" * NOTES}}}
    assert 422 == client.post("/v1/sessions", json=options).status_code
    labels = {"options": {"required_labels": MANY}}
    assert 422 == client.post("/v1/sessions", json=labels).status_code
    paths = {"options": {"required": {"readable_paths": ["/a"] * 1001}}}
    assert 422 == client.post("/v1/sessions", json=paths).status_code


def test_a_snapshots_notes_are_weighed(client: httpx.Client, sandbox_id: str) -> None:
    at = f"/v1/sandboxes/{sandbox_id}"
    refused = client.post(f"{at}/snapshots", json={"metadata": {"k": "v" * NOTES}})

    assert (422, "metadata") == (refused.status_code, refused.json()["field"])
    assert [] == client.get("/v1/snapshots").json()["items"]


def test_a_command_is_no_longer_than_a_kernel_takes(client: httpx.Client, sandbox_id: str) -> None:
    """And a long one, read in a thread, does what a short one does."""
    at = f"/v1/sandboxes/{sandbox_id}/execs"
    texts = ["x" * 100_000] * 15
    ran = client.post(at, json={"argv": ["sh", "-c", "echo $#", *texts], "wait": True}).json()
    fed = {"argv": ["wc", "-c"], "stdin": "y" * 3_000_000, "wait": True}
    counted = client.post(at, json=fed).json()
    refused = [
        client.post(at, json={"argv": ["true", *(["x" * 100_000] * 63)]}),
        client.post(at, json={"argv": ["true"], "env": {"K": "v" * 7_000_000}}),
        client.post(at, json={"argv": ["true", *([""] * 90_000)] * 8}),
    ]

    assert ("14\n", "3000000\n") == (ran["result"]["stdout"], counted["result"]["stdout"])
    assert [(422, "argv"), (422, "argv")] == [
        (a.status_code, a.json()["field"]) for a in refused[:2]
    ]
    assert 413 == refused[2].status_code
    body = {"command": "true", "args": ["x" * 100_000] * 63}
    assert 422 == client.post("/api/v1/sandbox/execute", json=body).status_code


def test_a_long_body_that_is_wrong_is_told_of_as_a_short_one_is(client: httpx.Client) -> None:
    pad = " " * (1 << 17)
    asked: list[tuple[str, bytes, int, str]] = [
        ("/v1/sandboxes", b'{"name": 1}', 422, "name"),
        ("/v1/sandboxes", b'{"nane": "x"}', 422, "nane"),
        ("/v1/sandboxes", b'{"name": ', 400, ""),
        ("/v1/sandboxes", b"[]", 422, ""),
        ("/v1/sessions", b'{"spec": {"tier": "x"}}', 422, "tier"),
        ("/v1/sessions", b'{"spek": {}}', 422, "spek"),
        ("/v1/keys", b'{"owner": 5}', 422, "owner"),
        ("/v1/sandboxes", b"[" * 200_000, 400, ""),
        ("/v1/sandboxes", b"\xff", 400, ""),
    ]
    for path, text, status, field in asked:
        headers = {"content-type": "application/json"}
        answer = client.post(path, content=text + pad.encode(), headers=headers)
        assert (status, field) == (answer.status_code, answer.json()["field"]), answer.text[:500]


@pytest.mark.full
def test_a_body_of_very_many_values_is_too_large(client: httpx.Client) -> None:
    many: list[Any] = [{"labels": {str(i): "" for i in range(100_000)}}, {"deny": [[]] * 100_000}]
    for body in many:
        answer = client.post("/v1/sandboxes", json=body)
        assert (413, "too_large") == (answer.status_code, answer.json()["code"])


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.full
@given(value=_JSON)
def test_long_bodies_are_read_as_short_ones_are(value: Any) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
        raw = text.encode("utf-8", "surrogatepass")
        try:
            expected = json.loads(raw)
        except ValueError:
            with pytest.raises(BadJson):
                bodies.loads(raw)
        else:
            assert expected == bodies.loads(raw)


def test_reading_a_long_body_lets_others_run() -> None:
    """Another thread has its turns while 8 MiB of lists are read; the decoder in C gives none."""
    text = b"[" + b"[]," * (8 << 20) + b"1]"
    turns = over = 0

    def read() -> None:
        nonlocal over
        with pytest.raises(TooLarge):
            bodies.loads(text)
        over = 1

    thread = threading.Thread(target=read)
    thread.start()
    while not over:
        time.sleep(0.001)
        turns += 1
    thread.join()

    assert turns > 5
