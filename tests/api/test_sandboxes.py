"""Sandboxes over HTTP."""

from __future__ import annotations

import httpx


def test_a_sandbox_from_create_to_delete(client: httpx.Client) -> None:
    made = client.post("/v1/sandboxes", json={"name": "first", "labels": {"team": "a"}})
    sandbox_id = made.json()["id"]
    ran = client.post(
        f"/v1/sandboxes/{sandbox_id}/execs",
        json={"argv": ["sh", "-c", "echo out; echo err >&2; exit 3"], "wait": True},
    )
    gone = client.delete(f"/v1/sandboxes/{sandbox_id}")
    again = client.delete(f"/v1/sandboxes/{sandbox_id}")

    assert 201 == made.status_code
    assert ("first", {"team": "a"}) == (made.json()["name"], made.json()["labels"])
    result = ran.json()["result"]
    assert 3 == result["exit_code"]
    assert ("out\n", "err\n") == (result["stdout"], result["stderr"])
    assert ("terminated", "terminated") == (gone.json()["state"], again.json()["state"])
    assert 200 == client.get(f"/v1/sandboxes/{sandbox_id}").status_code
