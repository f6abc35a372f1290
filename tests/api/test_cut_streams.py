"""What a key has opened ends with the key: removed, rotated or expired; what another one opened goes on."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from ringfence.bench.attacker import Wire, frame
from tests.api.conftest import Daemon

pytestmark = pytest.mark.anyone

PATIENCE_S = 60.0
_UPGRADE = (
    "Upgrade: websocket",
    "Connection: Upgrade",
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
    "Sec-WebSocket-Version: 13",
)
POLICY_VIOLATION = struct.pack("!H", 1008)  # RFC 6455 7.4.1

# Answers with a line and never ends; a WebSocket on the same port answers the handshake.
_SERVER = r"""
import base64, hashlib, re, socket, threading, time
listener = socket.create_server(("127.0.0.1", 8080))
print("ready", flush=True)
def serve(sock):
    head = b""
    while b"\r\n\r\n" not in head:
        head += sock.recv(4096) or b"\r\n\r\n"
    if key := re.search(rb"(?i)sec-websocket-key: *(\S+)", head):
        told = hashlib.sha1(key[1] + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
        sock.sendall(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                     b"Sec-WebSocket-Accept: " + base64.b64encode(told) + b"\r\n\r\n")
    else:
        sock.sendall(b"HTTP/1.1 200 OK\r\n\r\nfirst\n")
    time.sleep(10_000)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""


@dataclass(frozen=True)
class Kind:
    """A kind of stream.

    Attributes:
        method, target: `{exec}` and `{terminal}` stand for the paths of two execs that run on.
        status: What it is answered with at once; 0: nothing before the end.
        is_socket: It is a WebSocket.
        sent: What the client sends of a body that it does not end.
    """

    target: str
    method: str = "GET"
    status: int = 200
    is_socket: bool = False
    sent: bytes = b""


KINDS = {
    "pipes": Kind("{exec}/attach", status=101, is_socket=True),
    "terminal": Kind("{terminal}/attach", status=101, is_socket=True),
    "port": Kind("{at}/ports/8080/tcp", status=101, is_socket=True),
    "port's WebSocket": Kind("{at}/ports/8080/ws/", status=101, is_socket=True),
    "preview": Kind("{at}/ports/8080/http/"),
    "events": Kind("/v1/events?follow=true"),
    "both outputs": Kind("{exec}/output?follow=true"),
    "one output": Kind("{exec}/output?follow=true&stream=stdout"),
    "wait": Kind("{exec}/wait", status=0),
    "input": Kind("{exec}/stdin", "POST", status=0, sent=b"5\r\nhello\r\n"),
    "watch": Kind("{at}/files/watch?path=."),
    "upload": Kind("{at}/files/content?path=up", "PUT", status=0, sent=b"5\r\nhello\r\n"),
    "tree in": Kind("{at}/files/tree?path=tree", "PUT", status=0, sent=b"5\r\nhello\r\n"),
    "tree out": Kind("{at}/files/tree?path=large"),
}
OF_TOKENS = tuple(each for each in KINDS if each != "events")


class Open:
    """One stream, under way."""

    def __init__(self, daemon: Daemon, places: dict[str, str], kind: Kind, key: str) -> None:
        self.kind, self.wire = kind, Wire(daemon.socket)
        self.wire.sock.settimeout(PATIENCE_S)
        self._target, self._key = kind.target.format(**places), key

    def begin(self) -> None:
        """Ask, and hear that it is under way."""
        kind = self.kind
        more = _UPGRADE if kind.is_socket else ("Connection: close",)
        if kind.sent:
            more = (*more, "Transfer-Encoding: chunked")
        self.wire.ask(kind.method, self._target, f"Authorization: Bearer {self._key}", *more)
        if kind.status:
            assert kind.status == self.wire.status(), self._target
        self.wire.sock.sendall(kind.sent)

    def goes_on(self) -> bool:
        """Whether the server has not closed it; what it sends meanwhile is let lie."""
        self.wire.sock.setblocking(False)
        try:
            return self.wire.sock.recv(1) != b""
        except BlockingIOError:
            return True
        finally:
            self.wire.sock.settimeout(PATIENCE_S)

    def rest(self) -> bytes:
        """What comes until the server closes."""
        found = bytearray()
        while piece := self.wire.sock.recv(1 << 16):
            found += piece
            if self.kind.is_socket and POLICY_VIOLATION in found:
                self.wire.sock.sendall(frame(8, POLICY_VIOLATION))  # it waits for this
        return bytes(found)

    def close(self) -> None:
        self.wire.sock.close()


@pytest.fixture(name="places", scope="module")
def fixture_places(daemon: Daemon) -> Iterator[dict[str, str]]:
    """Of alice's sandbox: its path and those of its execs."""
    with daemon.client() as admin:
        key = admin.post("/v1/keys", json={"owner": "alice"}).json()["key"]
    with daemon.client(headers={"authorization": f"Bearer {key}"}) as alice:
        at = "/v1/sandboxes/" + alice.post("/v1/sandboxes", json={}).json()["id"]

        def start(*argv: str, **fields: Any) -> str:
            answer = alice.post(f"{at}/execs", json={"argv": argv, **fields}).raise_for_status()
            return f"{at}/execs/{answer.json()['id']}"

        server = start("python3", "-S", "-c", _SERVER)
        with alice.stream("GET", f"{server}/output?stream=stdout&follow=true") as output:
            assert "ready" == next(output.iter_lines())
        large = "mkdir large; truncate -s 100M large/hole"
        alice.post(f"{at}/execs", json={"argv": ["sh", "-c", large], "wait": True})
        yield {
            "at": at,
            "exec": start("cat", stream_stdin=True),
            "terminal": start("cat", pty=[24, 80]),
        }
        alice.delete(at)


@pytest.fixture(name="make_key")
def fixture_make_key(client: httpx.Client) -> Callable[..., tuple[str, str]]:
    """A new key of alice's: its id and what opens."""

    def make(**fields: Any) -> tuple[str, str]:
        made = client.post("/v1/keys", json={"owner": "alice", **fields}).raise_for_status().json()
        return made["id"], made["key"]

    return make


def open_all(
    stack: ExitStack, daemon: Daemon, places: dict[str, str], key: str, kinds: Any = KINDS
) -> dict[str, Open]:
    found = {}
    for name in kinds:
        found[name] = Open(daemon, places, KINDS[name], key)
        stack.callback(found[name].close)
        found[name].begin()
    return found


def assert_all_cut(streams: dict[str, Open]) -> None:
    for name, stream in streams.items():
        rest = stream.rest()
        if stream.kind.is_socket:
            assert POLICY_VIOLATION + b"the key was removed, was rotated or has expired" in rest, (
                name
            )
        elif not stream.kind.status:
            head, _, body = rest.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 401"), (name, head)
            assert "unauthenticated" == json.loads(body)["code"], name
        else:
            assert not rest.endswith(b"0\r\n\r\n"), f"{name}: not told as whole"


def test_a_rotated_key_ends_what_its_old_secret_opened(
    daemon: Daemon, places: dict[str, str], client: httpx.Client, make_key: Any
) -> None:
    """The first of these tests: what they cut is looked at again 5 s later, with all that is open then."""
    key_id, old = make_key()
    with ExitStack() as stack:
        first = open_all(stack, daemon, places, old)
        overlap = {"overlap_s": 3600}
        new = (
            client.post(f"/v1/keys/{key_id}/rotate", json=overlap).raise_for_status().json()["key"]
        )
        second = open_all(stack, daemon, places, new)
        for name, stream in first.items():
            assert stream.goes_on(), f"{name}: the control, both secrets open"
        assert client.post(f"/v1/keys/{key_id}/rotate", json=overlap).is_success
        assert_all_cut(first)
        for name, stream in second.items():
            assert stream.goes_on(), name


def test_a_removed_key_ends_what_it_opened_and_nothing_else(
    daemon: Daemon, places: dict[str, str], client: httpx.Client, make_key: Any
) -> None:
    (key_id, key), (_, living) = make_key(), make_key()
    with ExitStack() as stack:
        cut = open_all(stack, daemon, places, key)
        control = open_all(stack, daemon, places, living)
        assert client.delete(f"/v1/keys/{key_id}").is_success
        assert_all_cut(cut)
        for name, stream in control.items():
            assert stream.goes_on(), name


@pytest.mark.full
def test_an_expired_key_ends_what_it_opened(
    daemon: Daemon, places: dict[str, str], make_key: Any
) -> None:
    """However slow this machine is: with a longer life, where all were not open in time."""
    for life_s in (4.0, 20.0, 100.0):
        _, key = make_key(expires_in_s=life_s)
        with ExitStack() as stack:
            try:
                cut = open_all(stack, daemon, places, key)
            except AssertionError:
                continue
            assert_all_cut(cut)
            return
    raise AssertionError("no stream was opened in time")


def test_a_token_ends_with_the_key_that_it_was_made_with(
    daemon: Daemon, places: dict[str, str], client: httpx.Client, make_key: Any
) -> None:
    key_id, key = make_key()
    with daemon.client(headers={"authorization": f"Bearer {key}"}) as alice, ExitStack() as stack:
        token = alice.post(f"{places['at']}/tokens").raise_for_status().json()["key"]
        cut = open_all(stack, daemon, places, token, OF_TOKENS)
        assert client.delete(f"/v1/keys/{key_id}").is_success
        assert_all_cut(cut)


def test_what_changes_something_is_answered_once(
    daemon: Daemon, places: dict[str, str], client: httpx.Client, make_key: Any
) -> None:
    """It is not known of a request that was cut whether it has done anything."""
    key_id, key = make_key()
    argv = ["sh", "-c", "touch here; until [ -e go ]; do sleep 0.1; done"]
    with daemon.client() as admin, ExitStack() as stack:
        wire = Wire(daemon.socket)
        stack.callback(wire.sock.close)
        wire.sock.settimeout(PATIENCE_S)
        text = json.dumps({"argv": argv, "wait": True}).encode()
        more = (f"Authorization: Bearer {key}", "Content-Type: application/json")
        wire.ask("POST", f"{places['at']}/execs", *more, body=text)
        while not admin.get(f"{places['at']}/files/stat?path=here").is_success:
            pass
        assert client.delete(f"/v1/keys/{key_id}").is_success
        assert admin.put(f"{places['at']}/files/content?path=go", content=b"").is_success
        assert 200 == wire.status()


def test_an_upload_that_was_cut_leaves_no_part_of_a_file(
    daemon: Daemon, places: dict[str, str], client: httpx.Client, make_key: Any
) -> None:
    key_id, key = make_key()
    at = places["at"]

    def listed() -> list[Any]:
        return list(client.get(f"{at}/files/list?path=into").raise_for_status().json()["items"])

    assert client.post(f"{at}/files/dirs", json={"path": "into"}).is_success
    kind = Kind("{at}/files/content?path=into/up", "PUT", status=0, sent=b"5\r\nhello\r\n")
    with ExitStack() as stack:
        stream = Open(daemon, places, kind, key)
        stack.callback(stream.close)
        stream.begin()
        until = time.monotonic() + PATIENCE_S
        while not listed():
            assert time.monotonic() < until, "it begins with a file beside"
        assert client.delete(f"/v1/keys/{key_id}").is_success
        assert_all_cut({"upload": stream})
        while listed():
            assert time.monotonic() < until, listed()
