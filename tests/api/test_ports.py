"""Servers inside a sandbox, previewed through the daemon."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import unix_connect

from ringfence.api.streaming.preview import located
from tests.api.conftest import Daemon

pytestmark = pytest.mark.anyone

SERVER = r"""
import hashlib, base64, http.server, json, socketserver

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.headers.get("Upgrade") == "websocket":
            return self.echo_messages()
        if self.path.startswith("/broken"):
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
            self.close_connection = True
            return
        if self.path.startswith("/cut"):
            self.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n")
            self.close_connection = True
            return
        if self.path.startswith("/interim"):
            count = int(self.path.rpartition("/")[2])
            self.wfile.write(b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n" * count)
        if self.path.startswith("/endless"):
            try:
                while True:
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                    while True:
                        self.wfile.write(b"1\r\nx\r\n" * 1000)
            except OSError:
                print("left", flush=True)
                self.close_connection = True
                return
        if self.path.startswith("/garbage"):
            self.wfile.write(b"\0\1\2 nonsense\r\n\r\n")
            self.close_connection = True
            return
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        told = {"path": self.path, "method": self.command, "headers": dict(self.headers.items()),
                "length": len(body), "sha": hashlib.sha256(body).hexdigest()}
        data = json.dumps(told).encode()
        self.send_response(418 if self.path.startswith("/teapot") else 200, "Whatever")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Set-Cookie", "a=b")
        self.send_header("Access-Control-Allow-Origin", "*")
        self.send_header("Content-Security-Policy", "default-src *")
        self.send_header("X-Inner", "kept")
        if self.path.startswith("/moved"):
            self.send_header("Location", "http://localhost:8000/there?x")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = do_OPTIONS = do_GET

    def echo_messages(self):
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", accept)
        self.end_headers()
        if self.path.endswith("/fragments"):
            self.wfile.write(b"\x02\x01x" + b"\x00\x00" * 100_000)
        while True:  # short masked frames are all that the test sends
            first, second = self.rfile.read(2)
            mask = self.rfile.read(4)
            data = self.rfile.read(second & 127) if second & 127 < 126 else b""
            plain = bytes(b ^ mask[i % 4] for i, b in enumerate(data))
            self.wfile.write(bytes([first, len(plain)]) + plain)
            if first & 15 == 8:
                self.close_connection = True
                return

    def log_message(self, *args):
        pass

class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True

server = Server(("127.0.0.1", 8000), Handler)
print("listening", flush=True)
server.serve_forever()
"""


@pytest.fixture(scope="module")
def base(daemon: Daemon) -> Iterator[str]:
    """A sandbox with a server on port 8000."""
    with daemon.client() as client:
        sandbox_id = client.post("/v1/sandboxes", json={}).json()["id"]
        execs = f"/v1/sandboxes/{sandbox_id}/execs"
        exec_id = client.post(execs, json={"argv": ["python3", "-c", SERVER]}).json()["id"]
        output = f"{execs}/{exec_id}/output?stream=stdout"
        while b"listening" not in client.get(output).content:
            assert client.get(f"{execs}/{exec_id}").json()["state"] == "running"
            time.sleep(0.02)
        yield f"/v1/sandboxes/{sandbox_id}/ports/8000"
        client.delete(f"/v1/sandboxes/{sandbox_id}")


def test_requests_pass_as_they_are_and_tell_nothing_of_the_client(
    client: httpx.Client, base: str
) -> None:
    told = client.get(
        f"{base}/http/a%2Fb/../c?x=1&y=%20",
        headers={
            "cookie": "secret=1",
            "x-api-key": "",
            "referer": "http://elsewhere",
            "x-custom": "kept",
        },
    )
    seen = told.json()
    headers = {name.lower(): value for name, value in seen["headers"].items()}

    assert 200 == told.status_code
    assert seen["path"].endswith("?x=1&y=%20")
    assert ("localhost:8000", "kept") == (headers["host"], headers["x-custom"])
    assert not {"cookie", "authorization", "x-api-key", "referer"} & headers.keys()
    assert "kept" == told.headers["x-inner"]
    assert "sandbox" in told.headers["content-security-policy"]
    assert "default-src" not in told.headers["content-security-policy"]
    assert not {"set-cookie", "access-control-allow-origin"} & told.headers.keys()


def test_methods_statuses_and_large_bodies_both_ways(client: httpx.Client, base: str) -> None:
    data = bytes(range(256)) * 8000

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(data), 100_000):
            yield data[start : start + 100_000]

    whole = client.put(f"{base}/http/x", content=data).json()
    chunked = client.post(f"{base}/http/x", content=pieces()).json()

    assert ("PUT", len(data)) == (whole["method"], whole["length"])
    assert whole["sha"] == chunked["sha"]
    assert 418 == client.delete(f"{base}/http/teapot").status_code
    assert b"" == client.head(f"{base}/http/").content
    assert "/" == client.get(f"{base}/http").json()["path"]
    assert f"{base}/http/there?x" == client.get(f"{base}/http/moved").headers["location"]


def test_a_server_that_is_not_there_or_speaks_no_http(client: httpx.Client, base: str) -> None:
    nobody = base.replace("/8000", "/8001")
    for answer in (client.get(f"{nobody}/http/"), client.get(f"{base}/http/garbage")):
        assert (502, "connect_failed") == (answer.status_code, answer.json()["code"])
    not_yet = client.post(nobody)
    assert (409, "connect_failed") == (not_yet.status_code, not_yet.json()["code"])
    for path in ("broken", "cut"):
        with pytest.raises(httpx.RemoteProtocolError):
            client.get(f"{base}/http/{path}")
    assert 422 == client.post(base.replace("/8000", "/70000")).status_code
    assert 404 == client.post("/v1/sandboxes/sbx-none/ports/8000").status_code
    assert f"{base}/http/" == client.post(base).json()["http"]


def test_a_few_interim_answers_are_passed_over_and_many_are_refused(
    client: httpx.Client, base: str
) -> None:
    few, many = (client.get(f"{base}/http/interim/{count}") for count in (8, 9))

    assert 200 == few.status_code
    assert (502, "connect_failed") == (many.status_code, many.json()["code"])
    assert "interim" in many.text


def test_an_answer_ends_with_the_visitor_who_wanted_it(client: httpx.Client, base: str) -> None:
    with client.stream("GET", f"{base}/http/endless") as answer:
        assert {"x"} == set(next(answer.iter_text()))

    execs = f"{base.partition('/ports/')[0]}/execs"
    exec_id = client.get(execs).json()["items"][0]["id"]
    with client.stream("GET", f"{execs}/{exec_id}/output?stream=stdout&follow=true") as output:
        assert any("left" in line for line in output.iter_lines())


def test_a_message_of_endless_frames_ends_its_websocket(daemon: Daemon, base: str) -> None:
    """Frames without content, which no bound on the bytes of a message ever ends."""
    with (
        unix_connect(daemon.socket, f"ws://localhost{base}/ws/fragments") as socket,
        pytest.raises(ConnectionClosed),
    ):
        socket.recv(30)
    with unix_connect(daemon.socket, f"ws://localhost{base}/ws/x", compression=None) as socket:
        with suppress(ConnectionClosed):
            socket.send(iter([b"x"] + [b""] * 2000))
        with pytest.raises(ConnectionClosed):
            socket.recv(30)


def test_websockets_pass_both_ways(daemon: Daemon, base: str) -> None:
    uri = f"ws://localhost{base}/ws/chat?room=1"
    with unix_connect(daemon.socket, uri, compression=None) as socket:
        socket.send("hello")
        assert "hello" == socket.recv(20)
        socket.send(b"\0\1")
        assert b"\0\1" == socket.recv(20)
        socket.close(4321, "done")
    for path in ("ports/8001/ws/", "ports/8001/tcp"):
        nobody = f"ws://localhost{base.replace('ports/8000', path)}"
        with pytest.raises(InvalidStatus) as refused, unix_connect(daemon.socket, nobody):
            pass
        assert 502 == refused.value.response.status_code


def test_bytes_pass_both_ways(daemon: Daemon, base: str) -> None:
    uri = f"ws://localhost{base}/tcp"
    got = b""
    with unix_connect(daemon.socket, uri, compression=None) as socket:
        socket.send(b"GET /raw HTTP/1.1\r\nhost: me\r\nconnection: close\r\n\r\n")
        with suppress(ConnectionClosed):  # who asked for one answer may have it already
            socket.send("eof")
        for message in socket:
            assert isinstance(message, bytes)
            got += message
    told: dict[str, Any] = json.loads(got.partition(b"\r\n\r\n")[2])

    assert ("/raw", "me") == (told["path"], told["headers"]["host"])


def test_places_are_where_the_client_can_go() -> None:
    for given, expected in (
        (b"/x", b"/p/x"),
        (b"http://localhost:8000", b"/p"),
        (b"http://127.0.0.1:8000/a?b", b"/p/a?b"),
        (b"http://[::1]:8000?b", b"/p?b"),
        (b"http://localhost:80001/a", b"http://localhost:80001/a"),
        (b"//evil.example/x", b"//evil.example/x"),
        (b"https://example.com/", b"https://example.com/"),
        (b"next", b"next"),
        (b"/", b"/p/"),
    ):
        assert expected == located(given, 8000, b"/p"), given
