"""A daemon of a cluster's node: what it tells its actor, and that it drains when the lease says so."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from ringfence.backends.local.host.owner import start_time
from ringfence.daemon.membership import ADDRESSES, DRAIN, DRAINED, LEASE, SECRET, lease
from tests.daemon.servers import Server
from tests.native.outside import until


def _start(server: Server, lease_s: float = 600.0) -> None:
    server.state.mkdir(mode=0o700, exist_ok=True)
    (server.state / SECRET).write_bytes(b"of the cluster")
    config = server.state / "config.json"
    membership = {"node": "0123abcd", "lease_s": lease_s}
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
    path, drained = server.state / LEASE, server.state / DRAINED

    _renew(path, b"1" + DRAIN)

    assert until(lambda: 503 == _created(server))
    assert not drained.exists(), "one is left"
    assert 200 == server.http.get(f"/v1/sandboxes/{made}").status_code
    server.http.delete(f"/v1/sandboxes/{made}")
    assert until(drained.exists)
    _renew(path, b"2")
    assert until(lambda: 201 == _created(server))
    assert not drained.exists()


@pytest.mark.full
@pytest.mark.parametrize("is_named", [True, False])
def test_a_lease_goes_on_while_its_actor_is_started_again(server: Server, is_named: bool) -> None:
    """Of a busy machine Ray takes longer to do so than the lease is."""
    with subprocess.Popen(["sleep", "1000"]) as raylet:
        try:
            server.state.mkdir(mode=0o700, exist_ok=True)
            restarter = (raylet.pid, start_time(raylet.pid)) if is_named else (0, 0)
            _renew(server.state / LEASE, lease(restarter, "1", drains=False))
            _start(server, lease_s=1.0)
            assert server.process is not None
            if is_named:
                with pytest.raises(subprocess.TimeoutExpired):
                    server.process.wait(4)
            else:
                assert 0 == server.process.wait(30), "the control"
        finally:
            raylet.kill()
    assert 0 == server.process.wait(30)


def _created(server: Server) -> int:
    """Make a sandbox and end it; the answer's status."""
    answer = server.http.post("/v1/sandboxes", json={})
    if answer.status_code == 201:
        server.http.delete(f"/v1/sandboxes/{answer.json()['id']}")
    return answer.status_code


def _renew(path: Path, content: bytes) -> None:
    path.with_name("lease.new").write_bytes(content)
    path.with_name("lease.new").rename(path)
