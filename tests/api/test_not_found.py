"""Who asks for what is not there is told what to do, in the same words whether or not it is another's."""

from __future__ import annotations

import httpx
import pytest

pytestmark = pytest.mark.anyone


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/sandboxes/x"),
        ("POST", "/v1/sandboxes/x/suspend"),
        ("GET", "/v1/sessions/x"),
        ("DELETE", "/v1/snapshots/x"),
        ("DELETE", "/v1/keys/x"),
        ("GET", "/v1/nowhere"),
        ("GET", "/api/v1/sandbox/status/x"),
    ],
)
def test_the_next_step_is_said(client: httpx.Client, method: str, path: str) -> None:
    answer = client.request(method, path)

    problem = answer.json()
    assert 404 == answer.status_code
    assert problem["code"].endswith("not_found")
    assert problem["hint"]
    assert not problem["retryable"]


def test_of_an_exec(client: httpx.Client, sandbox_id: str) -> None:
    problem = client.get(f"/v1/sandboxes/{sandbox_id}/execs/x").json()

    assert ("exec_not_found", False) == (problem["code"], problem["retryable"])
    assert "ringfence logs --list" in problem["hint"]


def test_of_a_method_and_of_a_websocket(client: httpx.Client) -> None:
    wrong = client.patch("/v1/sandboxes").json()
    assert "no route for PATCH /v1/sandboxes" == wrong["message"]
    assert "allowed methods: GET, POST" == wrong["hint"]

    plain = client.get("/v1/sandboxes/x/execs/y/attach").json()
    assert "WebSocket" in plain["hint"]
