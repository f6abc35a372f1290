"""Servers inside, reached from the host: published ports and single streams."""

from __future__ import annotations

import http.client
import os
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ringfence import AsyncSandbox, Sandbox
from ringfence.errors import RingfenceError
from tests.egress.inside.conftest import MakeSandbox
from tests.egress.world import World, places

pytestmark = [pytest.mark.anyone, pytest.mark.in_world]

SERVER = """
import http.server, socketserver, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        size = int(self.path[1:] or 0)
        self.send_response(200)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        self.wfile.write(bytes(size))
    def log_message(self, *words):
        pass
class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    address_family = __import__("socket").AF_INET6 if ":" in sys.argv[1] else 2
    daemon_threads = True
    request_queue_size = 128
server = Server((sys.argv[1], 8000), Handler)
print("listening", flush=True)
server.serve_forever()
"""


def serve(sandbox: Sandbox, host: str = "127.0.0.1") -> None:
    process = sandbox.start(["python3", "-c", SERVER, host])
    assert "listening" == next(process.stdout.lines())


Address = tuple[str, int] | str


def tcp(address: Address) -> tuple[str, int]:
    assert isinstance(address, tuple)
    return address


def fetch(address: Address, size: int = 100) -> int:
    host, port = tcp(address)
    connection = http.client.HTTPConnection(host, port, timeout=10)
    try:
        connection.request("GET", f"/{size}")
        return len(connection.getresponse().read())
    finally:
        connection.close()


@pytest.mark.parametrize("network", ["none", "a.test"])
@pytest.mark.parametrize("inside", ["127.0.0.1", "::1", "0.0.0.0"])
def test_a_published_port_reaches_the_server(make: MakeSandbox, network: str, inside: str) -> None:
    sandbox = make(network=network)
    serve(sandbox, inside)

    with sandbox.expose(8000) as exposure:
        assert "127.0.0.1" == tcp(exposure.address)[0]
        assert 100 == fetch(exposure.address)
        assert 5_000_000 == fetch(exposure.address, 5_000_000)


def test_a_published_unix_socket(make: MakeSandbox, tmp_path: Path) -> None:
    sandbox = make()
    serve(sandbox)
    path = str(tmp_path / "s")

    exposure = sandbox.expose(8000, unix=path)
    assert stat.S_ISSOCK(os.stat(path).st_mode)
    assert 0 == stat.S_IMODE(os.stat(path).st_mode) & 0o077
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        sock.sendall(b"GET /3 HTTP/1.0\r\n\r\n")
        assert sock.makefile("rb").read().endswith(b"\r\n\r\n\0\0\0")
    exposure.close()

    assert not os.path.exists(path)


def test_a_stream_of_ones_own(make: MakeSandbox) -> None:
    sandbox = make()
    serve(sandbox)

    with sandbox.connect(8000) as sock:
        sock.sendall(b"GET /3 HTTP/1.0\r\n\r\n")
        assert sock.makefile("rb").read().endswith(b"\r\n\r\n\0\0\0")


async def test_the_same_for_asyncio() -> None:
    async with await AsyncSandbox.create() as sandbox:
        process = await sandbox.start(["python3", "-c", SERVER, "127.0.0.1"])
        await process.stdout.read()
        with await sandbox.connect(8000) as sock:
            assert sock.getpeername()[1] == 8000


def test_a_port_that_nobody_listens_on_is_refused(make: MakeSandbox) -> None:
    sandbox = make()

    with pytest.raises((RingfenceError, ConnectionError)):
        sandbox.connect(8000)
    with sandbox.expose(8000) as exposure, pytest.raises(OSError):
        fetch(exposure.address)
    serve(sandbox)
    with sandbox.expose(8000) as exposure:
        assert 1 == fetch(exposure.address, 1)


def test_a_published_port_ends_with_its_sandbox(make: MakeSandbox) -> None:
    sandbox = make()
    serve(sandbox)
    exposure = sandbox.expose(8000)
    assert 1 == fetch(exposure.address, 1)

    sandbox.terminate()

    with pytest.raises(OSError):
        fetch(exposure.address)
    exposure.close()


def test_a_closed_exposure_is_closed(make: MakeSandbox) -> None:
    sandbox = make()
    serve(sandbox)
    exposure = sandbox.expose(8000)
    address = exposure.address

    exposure.close()
    exposure.close()

    with pytest.raises(OSError):
        fetch(address)


def test_many_at_once(make: MakeSandbox) -> None:
    sandbox = make()
    serve(sandbox)

    with sandbox.expose(8000) as exposure, ThreadPoolExecutor(32) as pool:
        sizes = list(pool.map(lambda n: fetch(exposure.address, n * 1000), range(100)))

    assert [n * 1000 for n in range(100)] == sizes


def test_a_port_inside_is_never_one_of_the_hosts(make: MakeSandbox, world: World) -> None:
    """The host serves port 8000 itself; the sandbox's is another network's."""
    mark = world.mark()

    with pytest.raises((RingfenceError, ConnectionError)):
        make().connect(places.HOST_PORT)

    assert [] == world.left(mark)


@pytest.mark.parametrize("port", [0, -1, 65536, "80", True, 1021])
def test_a_port_that_is_none_is_refused(make: MakeSandbox, port: object) -> None:
    with pytest.raises((RingfenceError, ConnectionError)):
        make().connect(port)  # type: ignore[arg-type]


def test_half_a_stream_stays_open(make: MakeSandbox) -> None:
    """A client that has said everything still hears the answer."""
    sandbox = make()
    script = """
import socket
server = socket.create_server(("127.0.0.1", 8000))
print("listening", flush=True)
client, _ = server.accept()
data = client.makefile("rb").read()
client.sendall(str(len(data)).encode())
client.close()
"""
    process = sandbox.start(["python3", "-c", script])
    assert "listening" == next(process.stdout.lines())

    with (
        sandbox.expose(8000) as exposure,
        socket.create_connection(tcp(exposure.address), 5) as sock,
    ):
        sock.sendall(b"x" * 300_000)
        sock.shutdown(socket.SHUT_WR)
        assert b"300000" == sock.makefile("rb").read()
