"""A user's sandbox does not reach the server's host, whatever its policy says; an admin's does."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.conftest import Daemon, StartDaemon

pytestmark = pytest.mark.anyone


@pytest.fixture(scope="module")
def service() -> Iterator[int]:
    """The port of a service on every address of this host, which greets."""
    with socket.create_server(("0.0.0.0", 0), backlog=64) as listener:

        def greet() -> None:
            while True:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                with peer:
                    peer.sendall(b"inside")

        threading.Thread(target=greet, daemon=True).start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def own() -> str:
    """An address of this host, as the kernel would choose it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this host has no address but loopback")
        return str(probe.getsockname()[0])


@pytest.fixture(scope="module")
def daemon(
    start_daemon: StartDaemon, tmp_path_factory: pytest.TempPathFactory, service: int
) -> Daemon:
    """Which gives users 127.0.0.1 on the service's port alone, by no name."""
    config = tmp_path_factory.mktemp("networks") / "config.json"
    config.write_text(json.dumps({"host_networks": [f"127.0.0.1:{service}"]}))
    return start_daemon("--listen", "127.0.0.1:0", "--config", str(config))


@pytest.fixture
def alice(daemon: Daemon, client: httpx.Client) -> Iterator[httpx.Client]:
    key = client.post("/v1/keys", json={"owner": "alice"}).json()["key"]
    with httpx.Client(base_url=daemon.tcp, headers={"x-api-key": key}, timeout=60) as found:
        yield found


CONNECT = """
import socket, sys
for host, port in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        with socket.create_connection((host, int(port)), 20) as peer:
            peer.settimeout(20)
            print(peer.recv(6) == b"inside")
    except OSError:
        print(False)
"""


def _reached(client: httpx.Client, sandbox_id: str, *places: tuple[str, int]) -> list[bool]:
    """Which places greet code inside."""
    argv = ["python3", "-c", CONNECT, *(str(each) for place in places for each in place)]
    answer = client.post(f"/v1/sandboxes/{sandbox_id}/execs", json={"argv": argv, "wait": True})
    return [line == "True" for line in answer.json()["result"]["stdout"].split()]


def _policy(*hosts: str) -> dict[str, Any]:
    return {"mode": "limited", "allowed_hosts": list(hosts)}


def test_wide_networks_and_names_do_not_lead_to_the_host(
    alice: httpx.Client, client: httpx.Client, service: int, own: str
) -> None:
    """The control is the same places for an admin, who names them."""
    name = socket.gethostname()
    places = [("127.0.0.1", service), (own, service)]
    wide = ["0.0.0.0/0", "0.0.0.0/1", "128.0.0.0/1", "::/0", "10.0.0.0/7", "172.0.0.0/7"]
    sandbox_id = alice.post(
        "/v1/sandboxes", json={"network": _policy(*wide, f"{name}.:{service}", "localtest.me")}
    ).json()["id"]
    try:
        refused = _reached(alice, sandbox_id, *places, (name, service), ("localhost", service))
        named = _policy(f"127.0.0.1:{service}", own)
        at = f"/v1/sandboxes/{sandbox_id}/network"
        assert 403 == alice.put(at, json=named).status_code
        assert 200 == client.put(at, json=named).status_code
        opened = _reached(client, sandbox_id, *places)
    finally:
        client.delete(f"/v1/sandboxes/{sandbox_id}")

    assert [False] * 4 == refused
    assert [True, True] == opened


def test_what_the_configuration_lists_is_reached_and_no_more(
    alice: httpx.Client, service: int, daemon: Daemon
) -> None:
    port = int(daemon.tcp.rpartition(":")[2])
    for other in (f"127.0.0.1:{port}", "127.0.0.1", f"localhost:{service}", f"127.0.0.2:{service}"):
        assert 403 == alice.post("/v1/sandboxes", json={"network": _policy(other)}).status_code
    made = alice.post("/v1/sandboxes", json={"network": _policy(f"127.0.0.1:{service}")})
    sandbox_id = made.raise_for_status().json()["id"]
    reached = _reached(alice, sandbox_id, ("127.0.0.1", service), ("127.0.0.1", port))
    alice.delete(f"/v1/sandboxes/{sandbox_id}")

    assert [True, False] == reached


FORMS = [
    "2130706433",
    "0x7f000001",
    "0x7f.0.0.1",
    "0177.0.0.1",
    "127.1",
    "127.0.0.1.",
    "[::ffff:127.0.0.1]:80",
    "[0:0:0:0:0:ffff:7f00:1]",
    "::ffff:0:127.0.0.1",
    "[::1%lo]:80",
    "[64:ff9b::7f00:1]:80",
    "*.localhost",
    "x.localhost:80",
    "LocalHost",
    "ⓛocalhost",
    "127.0.0.1/8",
    "127.0.0.0/8",
    "169.254.169.254:80",
    "metadata@169.254.169.254",
    "http://169.254.169.254/",
    "*",
    "0.0.0.0:1-65535",
]


@pytest.mark.parametrize("text", FORMS)
def test_no_writing_of_a_special_address_is_taken(alice: httpx.Client, text: str) -> None:
    body = {"network": _policy("example.com", text)}
    answer = alice.post("/v1/sandboxes", json=body)

    assert answer.status_code in (403, 422), answer.text
    assert answer.json()["field"].startswith("network."), answer.text


def test_a_wrong_list_does_not_start(start_daemon: StartDaemon, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    for wrong in (
        {"host_networks": ["!10.0.0.0/8"]},
        {"most": {"memory": 1}},
        {"most": {"ttl_s": 0}},
        {"most": {"snapshots": -1}},
    ):
        config.write_text(json.dumps(wrong))
        with pytest.raises(AssertionError, match="ended with 125"):
            start_daemon("--config", str(config))
    assert os.path.exists(config)
