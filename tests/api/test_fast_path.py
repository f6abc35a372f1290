"""The short way answers as the long way does, and leaves to it what it does not know."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from ringfence.api.fast_path import FastPath
from ringfence.model.create import CreateRequest
from ringfence.model.execs.exec_start import StartRequest

pytestmark = pytest.mark.anyone

SHORT, LONG = "application/json", "application/json; charset=utf-8"
CHANGES = ("id", "session_id", "sandbox_id", "created_at", "last_active_at", "ended_at", "status")


def same(form: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs from one request to the next."""
    kept = {key: value for key, value in form.items() if key not in CHANGES}
    for inner in ("result", "status"):
        if isinstance(kept.get(inner), dict):
            kept[inner] = {key: kept[inner][key] for key in ("stdout", "stderr", "exit_code")}
    return kept


def ask(
    client: httpx.Client, path: str, content: bytes, media_type: str, **headers: str
) -> httpx.Response:
    given = {"content-type": media_type, **headers}
    return client.post(f"/v1/sandboxes{path}", content=content, headers=given)


@pytest.mark.full
@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("", b'{"name": "n", "labels": {"a": "b"}}'),
        ("/{}/execs", b'{"argv": ["sh", "-c", "echo o; echo e >&2; exit 3"], "wait": true}'),
        ("/{}/execs", b'{"script": "exit 0", "wait": true}'),
        ("", b"{"),
        ("", b"[]"),
        ("", b'{"unknown": 1}'),
        ("", b'{"limits": {"pids": -1}}'),
        ("", b'{"mounts": [{"target": "/x", "source": "/no/such/path"}]}'),
        ("/{}/execs", b'{"argv": []}'),
        ("/{}/execs", b'{"argv": ["true"], "user": "nobody-of-that-name"}'),
        ("/sbx-nothing/execs", b'{"argv": ["true"]}'),
        ("/%2e%2e/execs", b'{"argv": ["true"]}'),
        ("/UPPER/execs", b'{"argv": ["true"]}'),
        ("/{}/execs", b""),
    ],
)
def test_both_ways_lead_to_the_same(
    client: httpx.Client, sandbox_id: str, path: str, content: bytes
) -> None:
    short, long = (
        ask(client, path.format(sandbox_id), content, media_type) for media_type in (SHORT, LONG)
    )

    assert long.status_code == short.status_code
    assert long.headers["content-type"] == short.headers["content-type"]
    assert same(long.json()) == same(short.json())
    for each in (short, long):
        if not path and each.status_code == 201:
            client.delete(f"/v1/sandboxes/{each.json()['id']}")


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize("sandbox", ["sbx-nothing", "-", "a" * 64, "..%2f"])
def test_one_that_is_not_there(client: httpx.Client, method: str, sandbox: str) -> None:
    """A parameter that no route knows makes it the long way."""
    short = client.request(method, f"/v1/sandboxes/{sandbox}")

    assert 400 <= short.status_code < 500
    assert "application/problem+json" == short.headers["content-type"]
    assert 422 == client.request(method, "/v1/sandboxes/sbx-nothing?x=1").status_code


def test_a_key_counts_on_both_ways(client: httpx.Client) -> None:
    made = [
        ask(client, "", b"{}", media_type, **{"idempotency-key": "k"}).json()["id"]
        for media_type in (SHORT, LONG, SHORT)
    ]
    refused = ask(client, "", b"{}", SHORT, **{"idempotency-key": "k" * 256})

    assert 1 == len(set(made))
    assert 422 == refused.status_code
    assert 200 == client.delete(f"/v1/sandboxes/{made[0]}").status_code


def test_both_are_counted_as_their_route(client: httpx.Client, sandbox_id: str) -> None:
    ask(client, f"/{sandbox_id}/execs", b'{"argv": ["true"]}', SHORT)

    text = client.get("/metrics").text
    for route in ("/v1/sandboxes", "/v1/sandboxes/{sandbox_id}/execs"):
        assert f'route="{route}",method="POST"' in text


@pytest.mark.parametrize(
    ("model", "text", "is_kept"),
    [
        (CreateRequest, b'{"labels": {"a": "b"}}', True),
        (CreateRequest, b'{"env": {"A": "s"}}', False),
        (CreateRequest, b'{"\\u0073ecrets": {"A": "s"}}', False),
        (CreateRequest, b'{"labels": {"a": "' + 1024 * b"b" + b'"}}', False),
        (StartRequest, b'{"argv": ["true"]}', True),
        (StartRequest, b'{"argv": ["true"], "env": {"A": "s"}}', False),
        (StartRequest, b'{"argv": ["true"], "stdin": "s"}', False),
    ],
)
def test_what_the_same_words_mean_is_kept_unless_it_is_secret(
    model: Any, text: bytes, *, is_kept: bool
) -> None:
    fast_path: Any = FastPath(app=None, service=None)  # type: ignore[arg-type]

    first, again = fast_path._read(model, text), fast_path._read(model, bytes(bytearray(text)))

    assert model.from_json(json.loads(text)) == first == again
    assert is_kept == (first is again)


def test_not_more_of_them_are_kept_than_may_be() -> None:
    fast_path: Any = FastPath(app=None, service=None)  # type: ignore[arg-type]

    for number in range(1000):
        fast_path._read(StartRequest, b'{"argv": ["%d"]}' % number)

    assert len(fast_path._known) <= 256
