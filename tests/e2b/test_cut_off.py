"""Streams that break: the server is killed, a client reads nothing, a connection is closed on one side."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from ringfence.api.access.keys import e2b_form
from tests.api.conftest import Daemon, StartDaemon
from tests.e2b.conftest import Box, Client, frames_of

pytestmark = pytest.mark.anyone

_WAITS = "echo begun; until [ -e go ]; do sleep 0.02; done; echo ended; exit 3"
_CONNECT = {"content-type": "application/connect+json"}


def _framed(form: dict[str, Any]) -> bytes:
    text = json.dumps(form).encode()
    return b"\0" + len(text).to_bytes(4, "big") + text


def _start(script: str) -> bytes:
    return _framed({"process": {"cmd": "/bin/bash", "args": ["-c", script]}, "stdin": False})


@contextmanager
def _streaming(box: Box, path: str, body: bytes) -> Iterator[Iterator[dict[str, Any]]]:
    """The events of a stream, as they come."""
    headers = {**box.headers, **_CONNECT}
    with box.http.stream("POST", path, content=body, headers=headers) as response:

        def events() -> Iterator[dict[str, Any]]:
            data = b""
            for more in response.iter_raw():
                data += more
                while len(data) >= 5 and len(data) >= 5 + int.from_bytes(data[1:5], "big"):
                    size = 5 + int.from_bytes(data[1:5], "big")
                    (found,), data = frames_of(data[:size]), data[size:]
                    yield found.get("event", found)

        yield events()


@pytest.mark.full
def test_a_command_is_found_again_after_the_server_was_killed(start_daemon: StartDaemon) -> None:
    options = ("--e2b", "--listen", "127.0.0.1:0")
    daemon = start_daemon(*options)
    with daemon.client() as admin:
        key = e2b_form(admin.post("/v1/keys", json={"owner": "ann"}).json()["key"])
    with httpx.Client(base_url=daemon.tcp, timeout=60) as http:
        box = Client(http, key).create()
        with _streaming(box, "/process.Process/Start", _start(_WAITS)) as events:
            pid = next(events)["start"]["pid"]
            assert "data" in next(events), "it has begun"
            daemon.process.send_signal(signal.SIGKILL)
            daemon.process.wait(30)
            with pytest.raises(httpx.TransportError):
                list(events)

    daemon = start_daemon(*options, state_dir=daemon.state_dir)
    with httpx.Client(base_url=daemon.tcp, timeout=60) as http:
        again = Box(http, box.made)
        connect = _framed({"process": {"pid": pid}})
        with _streaming(again, "/process.Process/Connect", connect) as events:
            assert pid == next(events)["start"]["pid"]
            assert 200 == again.call("POST", "/files?path=go", content=b"").status_code
            assert 3 == next(each for each in events if "end" in each)["end"]["exitCode"]
        assert 204 == Client(http, key).api("DELETE", f"/sandboxes/{box.id}").status_code


def _raw(box: Box, daemon: Daemon, body: bytes) -> socket.socket:
    """A connection of one's own, on which a command was asked for."""
    at = urlsplit(daemon.tcp)
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.settimeout(60)
    made.connect((at.hostname, at.port))
    headers = {**box.headers, **_CONNECT, "Host": at.netloc, "Content-Length": str(len(body))}
    lines = [f"{name}: {value}\r\n" for name, value in {**headers, "Connection": "close"}.items()]
    head = "".join(["POST /process.Process/Start HTTP/1.1\r\n", *lines, "\r\n"])
    made.sendall(head.encode() + body)
    return made


def _until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline


def _resident(daemon: Daemon) -> int:
    with open(f"/proc/{daemon.process.pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.full
def test_a_client_that_reads_nothing_holds_nobody_up(box: Box, daemon: Daemon) -> None:
    before = _resident(daemon)
    script = "head -c 300000000 /dev/zero; touch written"
    with _raw(box, daemon, _start(script)) as connection:
        assert connection.recv(1)
        _until(lambda: 200 == box.call("GET", "/files?path=written").status_code)
        assert 204 == box.call("GET", "/health").status_code
        grown = _resident(daemon) - before
    assert grown < 64 << 20, grown


def test_a_connection_closed_on_one_side_is_let_go(box: Box, daemon: Daemon) -> None:
    with _raw(
        box, daemon, _start("until [ -e go ]; do sleep 0.02; done; touch done")
    ) as connection:
        answer = b""
        while b'"start"' not in answer:  # a command that has not begun by then never does
            piece = connection.recv(65536)
            assert piece
            answer += piece
        connection.shutdown(socket.SHUT_WR)
        # The command waits, so that the end comes of us.
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert b'"end"' not in answer
    assert 200 == box.call("POST", "/files?path=go", content=b"").status_code
    _until(lambda: 200 == box.call("GET", "/files?path=done").status_code)


def test_a_client_that_leaves_does_not_end_its_command(box: Box, daemon: Daemon) -> None:
    """As with E2B: another connection finds it by its number."""
    with _raw(
        box, daemon, _start("echo $$ >number; until [ -e left ]; do sleep 0.02; done; touch on")
    ):
        _until(lambda: box.call("GET", "/files?path=number").text.strip().isdecimal())
    found = box.call("GET", "/files?path=number")
    connect = _framed({"process": {"pid": int(found.text)}})
    with _streaming(box, "/process.Process/Connect", connect) as events:
        assert int(found.text) == next(events)["start"]["pid"]
        assert 200 == box.call("POST", "/files?path=left", content=b"").status_code
        assert 0 == next(each for each in events if "end" in each)["end"].get("exitCode", 0)
    assert 200 == box.call("GET", "/files?path=on").status_code
