"""A daemon of a cluster's node: what it tells its actor, and that it drains when the lease says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringfence.daemon.membership import ADDRESSES, DRAIN, DRAINED, LEASE, SECRET
from tests.daemon.servers import Server
from tests.native.outside import until


def _start(server: Server) -> None:
    server.state.mkdir(mode=0o700, exist_ok=True)
    (server.state / SECRET).write_bytes(b"of the cluster")
    config = server.state / "config.json"
    membership = {"node": "0123abcd", "lease_s": 600}
    manager = {"pool": {"enabled": False}}
    listen = "127.0.0.1:0"
    config.write_text(json.dumps({"membership": membership, "manager": manager, "listen": listen}))
    server.start("--config", str(config), faulty=False)


def _address(server: Server) -> str:
    found: list[str] = json.loads((server.state / ADDRESSES).read_text())
    return found[-1]


@pytest.mark.full
def test_its_addresses_are_those_of_the_daemon_that_runs(server: Server) -> None:
    """Written by whoever else, they would be the last one's where that is killed in between."""
    _start(server)
    first = _address(server)
    server.kill()
    _start(server)

    assert first != _address(server)
    assert 200 == server.http.get("/v1/health").status_code
    assert _answers(_address(server))
    assert not _answers(first), "the control: the first one is gone"


def _answers(address: str) -> bool:
    import httpx

    try:
        return httpx.get(f"{address}/v1/health").status_code in (200, 401)
    except httpx.TransportError:
        return False


@pytest.mark.full
def test_it_drains_when_its_lease_says_so(server: Server) -> None:
    _start(server)
    made = server.http.post("/v1/sandboxes", json={}).json()["id"]
    lease, drained = server.state / LEASE, server.state / DRAINED

    _renew(lease, b"1" + DRAIN)

    assert until(lambda: 503 == _created(server))
    assert not drained.exists(), "one is left"
    assert 200 == server.http.get(f"/v1/sandboxes/{made}").status_code
    server.http.delete(f"/v1/sandboxes/{made}")
    assert until(drained.exists)
    _renew(lease, b"2")
    assert until(lambda: 201 == _created(server))
    assert not drained.exists()


def _created(server: Server) -> int:
    """Make a sandbox and end it; the answer's status."""
    answer = server.http.post("/v1/sandboxes", json={})
    if answer.status_code == 201:
        server.http.delete(f"/v1/sandboxes/{answer.json()['id']}")
    return answer.status_code


def _renew(lease: Path, content: bytes) -> None:
    lease.with_name("lease.new").write_bytes(content)
    lease.with_name("lease.new").rename(lease)
