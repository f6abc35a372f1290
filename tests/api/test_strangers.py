"""What somebody who has only curl and the documentation gets wrong first, and what he is told."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.anyone


def refused(answer: httpx.Response) -> dict[str, Any]:
    assert 422 == answer.status_code, answer.text
    form: dict[str, Any] = answer.json()
    return form


@pytest.mark.parametrize("path", ["/sandboxes", "/sandboxes/ID/execs"])
def test_json_that_is_not_called_json(client: httpx.Client, sandbox_id: str, path: str) -> None:
    """As `curl -d` sends it."""
    headers = {"content-type": "application/x-www-form-urlencoded"}
    where = f"/v1{path.replace('ID', sandbox_id)}"
    body = json.dumps({"argv": ["true"]} if "execs" in path else {})

    assert "curl --json" in refused(client.post(where, content=body, headers=headers))["hint"]

    answer = client.post(where, content=body, headers={"content-type": "application/json"})
    assert answer.is_success, "the control"
    if "execs" not in path:
        client.delete(f"/v1/sandboxes/{answer.json()['id']}")


def test_the_nearest_name_is_told_where_one_is_misspelt(
    client: httpx.Client, sandbox_id: str
) -> None:
    made = refused(client.post("/v1/sandboxes", json={"nmae": "x"}))
    assert ("nmae", "did you mean name?") == (made["field"], made["hint"])

    body = {"argv": ["true"], "timeout": 3}
    started = refused(client.post(f"/v1/sandboxes/{sandbox_id}/execs", json=body))
    assert ("timeout", "did you mean timeout_s?") == (started["field"], started["hint"])


def test_all_names_are_told_where_none_is_near(client: httpx.Client, sandbox_id: str) -> None:
    made = refused(client.post("/v1/sandboxes", json={"qqqq": "x"}))
    for name in ("name", "snapshot_id", "idle_timeout_s", "mounts"):
        assert f" {name}," in made["hint"]

    started = refused(
        client.post(f"/v1/sandboxes/{sandbox_id}/execs", json={"argv": ["true"], "qqqq": 3})
    )
    for name in ("wait", "script", "tty", "timeout_s", "stdin"):
        assert f" {name}" in started["hint"]


@pytest.mark.parametrize("body", [{}, {"argv": "ls -l"}])
def test_a_command_that_is_no_list(
    client: httpx.Client, sandbox_id: str, body: dict[str, Any]
) -> None:
    form = refused(client.post(f"/v1/sandboxes/{sandbox_id}/execs", json=body))

    assert "argv" == form["field"]
    assert "`script`" in form["hint"]


def test_a_word_where_an_object_is_meant(client: httpx.Client) -> None:
    form = refused(client.post("/v1/sandboxes", json={"mounts": ["/tmp:/x:ro"]}))

    assert "mounts[0]" == form["field"]
    assert "source" in form["hint"]
