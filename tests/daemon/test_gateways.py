"""A node of a cluster and its gateways: what a connection may do that has carried a stranger's request."""

from __future__ import annotations

import http.client
import json
import socket
from contextlib import closing
from pathlib import Path

import pytest

from ringfence.api.access import gateways
from ringfence.api.access.caller import USER, Caller
from ringfence.daemon.membership import SECRET
from tests.daemon.servers import Server

pytestmark = pytest.mark.anyone

_SECRET = b"of this cluster, thirty-two bytes"
_PATHS = "/v1/sandboxes", "/sandboxes"  # of ours, and of E2B's


@pytest.fixture
def socket_path(server: Server) -> Path:
    """Of a node's daemon."""
    server.state.mkdir(mode=0o700, exist_ok=True)
    (server.state / SECRET).write_bytes(_SECRET)
    config = server.state / "config.json"
    config.write_text(json.dumps({"membership": {"node": "0123abcd", "lease_s": 600}}))
    server.start("--e2b", "--config", str(config), faulty=False)
    return server.state / "ringfence.sock"


class _Connection(http.client.HTTPConnection):
    """One to a unix socket, kept for all its requests."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path
        self.auto_open = 0  # it stays the connection that it is

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(str(self._path))

    def status(self, path: str, *, sealed: bool, secret: bytes = _SECRET) -> int:
        seal = gateways.seal(secret, Caller("ann", USER), "GET", path.encode()).decode()
        self.request("GET", path, headers={gateways.HEADER: seal} if sealed else {})
        answer = self.getresponse()
        answer.read()
        return answer.status


def test_what_follows_a_sealed_request_needs_a_seal_or_a_key(socket_path: Path) -> None:
    """A second request in what a stranger sent would else be the operator's."""
    for sealed in _PATHS:
        for other in _PATHS:
            with closing(_Connection(socket_path)) as connection:
                connection.connect()
                assert 200 == connection.status(other, sealed=False), "the control: the operator's"
                assert 200 == connection.status(sealed, sealed=True)
                assert 200 == connection.status(sealed, sealed=True)
                assert 401 == connection.status(other, sealed=False)

    for path in _PATHS:
        with closing(_Connection(socket_path)) as connection:
            connection.connect()
            assert 200 == connection.status(path, sealed=False), "others are as before"
            assert 401 == connection.status(path, sealed=True, secret=b"of another cluster")
            if connection.sock is not None:  # `/v1` ends the connection of who has no key
                assert 401 == connection.status("/sandboxes", sealed=False), "E2B's does not"
                assert 401 == connection.status("/v1/sandboxes", sealed=False)
