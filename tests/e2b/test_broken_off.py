"""Requests that the end of the server or of a key breaks off: told in E2B's form, and no error of the log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from ringfence.api.access.keys import e2b_form
from ringfence.bench.attacker import Wire
from tests.api.conftest import Daemon, StartDaemon
from tests.e2b.conftest import Box

pytestmark = pytest.mark.anyone

PATIENCE_S = 60.0
_RPC = ("Content-Type: application/connect+json",)
_INSIDE = "E2b-Sandbox-Port: 49999"


def framed(**form: object) -> bytes:
    text = json.dumps(form).encode()
    return b"\0" + len(text).to_bytes(4, "big") + text


@dataclass(frozen=True)
class Kind:
    """A request that does not end by itself.

    Attributes:
        body: All of it, or what there is of one that does not end.
        is_whole: It is all of it.
        status: What it is answered with at once; 0: nothing before the end.
        of_api: It is not for what is inside.
    """

    method: str
    path: str
    headers: tuple[str, ...] = ()
    body: bytes = b""
    is_whole: bool = False
    status: int = 0
    of_api: bool = False


_SLEEP = framed(process={"cmd": "/bin/sleep", "args": ["1000"]}, stdin=False)
_CELL = b'{"code": "import time\\ntime.sleep(1000)"}'
KINDS = {
    "process": Kind("POST", "/process.Process/Start", _RPC, _SLEEP, is_whole=True, status=200),
    "input": Kind("POST", "/process.Process/StreamInput", _RPC, framed(other={})),
    "upload": Kind("POST", "/files?path=/tmp/x", ("Content-Type: application/octet-stream",), b"x"),
    "cell": Kind("POST", "/execute", (_INSIDE,), _CELL, is_whole=True, status=200),
    "create": Kind("POST", "/sandboxes", ("Content-Type: application/json",), b"{", of_api=True),
}


@dataclass
class Server:
    """A server, an API key of its client, and a sandbox that was made with it."""

    daemon: Daemon
    key_id: str
    key: str
    box: Box

    def open(self, kind: Kind) -> Wire:
        """Send it; the head of the answer is read where there is one."""
        wire = Wire(self.daemon.socket)
        wire.sock.settimeout(PATIENCE_S)
        own = {"X-API-Key": self.key} if kind.of_api else self.box.headers
        headers = ["Connection: close", *(f"{name}: {value}" for name, value in own.items())]
        if kind.is_whole:
            wire.ask(kind.method, kind.path, *headers, *kind.headers, body=kind.body)
        else:
            wire.ask(kind.method, kind.path, *headers, *kind.headers, "Content-Length: 1000")
            wire.sock.sendall(kind.body)
        if kind.status:
            assert kind.status == wire.status()
        return wire


@pytest.fixture(name="server")
def fixture_server(
    start_daemon: StartDaemon, capfd: pytest.CaptureFixture[str]
) -> Iterator[Server]:
    """A server whose log `capfd` has."""
    del capfd
    daemon = start_daemon("--e2b")
    with daemon.client() as http:
        made = http.post("/v1/keys", json={"owner": "ann"}).raise_for_status().json()
        key = e2b_form(made["key"])
        sandbox = http.post("/sandboxes", json={"timeout": 600}, headers={"X-API-Key": key})
        yield Server(daemon, made["id"], key, Box(http, sandbox.raise_for_status().json()))


def rest_of(wire: Wire) -> bytes:
    found = b""
    while piece := wire.sock.recv(1 << 16):
        found += piece
    return found


def all_open(stack: ExitStack, server: Server) -> dict[str, Wire]:
    found = {name: server.open(kind) for name, kind in KINDS.items()}
    for wire in found.values():
        stack.callback(wire.sock.close)
    # They are under way: what was sent later has been answered.
    assert server.box.rpc("/process.Process/List", {}).is_success
    return found


@pytest.mark.full
def test_they_are_told_that_the_server_stops(
    server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as stack:
        streams = all_open(stack, server)
        assert 0 == server.daemon.stop()
        for name, wire in streams.items():
            head, _, body = rest_of(wire).partition(b"\r\n\r\n")
            if KINDS[name].status:
                assert b"0\r\n" != (head + body)[-5:-2], f"{name}: not told as whole"
                continue
            assert head.startswith(b"HTTP/1.1 503 "), (name, head)
            assert "the server is stopping" in json.loads(body)["message"], name
    said = capfd.readouterr().err
    assert "sandbox created" in said, "the control: this is its log"
    assert "Traceback" not in said
    assert '"level":"error"' not in said


def test_those_of_a_key_that_is_removed_are_ended_and_refused(
    server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    """But for what changes something by itself: whether it has is known by its answer alone."""
    with ExitStack() as stack, server.daemon.client() as admin:
        streams = all_open(stack, server)
        assert admin.delete(f"/v1/keys/{server.key_id}").is_success
        for name in ("process", "input", "upload", "cell"):
            head, _, body = rest_of(streams[name]).partition(b"\r\n\r\n")
            if KINDS[name].status:
                assert not body.endswith(b"0\r\n\r\n"), f"{name}: not told as whole"
                continue
            assert head.startswith(b"HTTP/1.1 401 "), (name, head)
            assert "the key was removed" in json.loads(body)["message"], name
        streams["create"].sock.sendall(b" " * 998 + b"}")
        assert b"HTTP/1.1 201 " == streams["create"].sock.recv(13)
    said = capfd.readouterr().err
    assert "sandbox created" in said, "the control: this is its log"
    assert "Traceback" not in said
    assert '"level":"error"' not in said
