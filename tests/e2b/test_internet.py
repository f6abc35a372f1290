"""A server whose `internet` is every public address: what clients deny there, and what stays open."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api.conftest import Daemon, StartDaemon
from tests.e2b.conftest import Client

pytestmark = pytest.mark.anyone
_ALL = "0.0.0.0/0"


@pytest.fixture(scope="module", params=["public", "learning"])
def internet(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def daemon(
    start_daemon: StartDaemon, tmp_path_factory: pytest.TempPathFactory, internet: str
) -> Daemon:
    """A daemon that serves E2B's API, with internet access as E2B has it."""
    options = ["--e2b", "--listen", "127.0.0.1:0"]
    if internet == "public":
        return start_daemon(*options, "--internet", "public")
    config = tmp_path_factory.mktemp("config") / "config.json"
    config.write_text(json.dumps({"e2b": {"internet": {"mode": "limited", "learn": True}}}))
    return start_daemon(*options, "--config", str(config))


@pytest.mark.parametrize(
    ("options", "hosts", "is_open"),
    [
        ({}, [], True),
        ({"denyOut": ["8.8.8.8"]}, ["!8.8.8.8"], True),
        (
            {"denyOut": ["8.8.8.8", "9.9.9.9"], "allowOut": ["9.9.9.9"]},
            ["9.9.9.9", "!8.8.8.8"],
            True,
        ),
        ({"denyOut": [_ALL]}, [], False),
        ({"denyOut": [_ALL], "allowOut": ["1.1.1.1"]}, ["1.1.1.1"], False),
    ],
    ids=str,
)
def test_what_is_not_denied_stays_open(
    client: Client,
    daemon: Daemon,
    internet: str,
    options: dict[str, Any],
    hosts: list[str],
    is_open: bool,
) -> None:
    created, updated = client.create(network=options), client.create()
    path = f"/sandboxes/{updated.id}/network"
    assert 204 == client.api("PUT", path, json=options).status_code

    with daemon.client() as ours:
        for box in (created, updated):
            policy = ours.get(f"/v1/sandboxes/{box.id}/network").json()
            if internet == "public" and is_open:
                assert "public" == policy["allowed_hosts"].pop(0)
            assert hosts == policy["allowed_hosts"]
            assert (is_open and internet == "learning") == policy.get("learn", False)
            network = client.api("GET", f"/sandboxes/{box.id}").json()["network"]
            assert hosts == [*network["allowOut"], *(f"!{each}" for each in network["denyOut"])]
            client.api("DELETE", f"/sandboxes/{box.id}")


def test_a_client_without_internet_access_has_none(client: Client, daemon: Daemon) -> None:
    box = client.create(allow_internet_access=False, network={"denyOut": ["8.8.8.8"]})
    with daemon.client() as ours:
        policy = ours.get(f"/v1/sandboxes/{box.id}/network").json()
    client.api("DELETE", f"/sandboxes/{box.id}")

    assert [] == policy["allowed_hosts"]
    assert not policy.get("learn")
