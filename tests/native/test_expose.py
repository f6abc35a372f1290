"""Ways into a sandbox: a connection, and an address on the host that leads to a server inside."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path

import pytest

from ringfence import AsyncSandbox, Sandbox
from ringfence.errors import InvalidRequest, LifecycleError
from ringfence.sandbox.expose import Exposure
from tests.native.conftest import MakeSandbox
from tests.native.outside import until

PATIENCE_S = 60.0
SERVER = (
    "import socket\n"
    "server = socket.create_server(('127.0.0.1', 8080))\n"
    "print('up', flush=True)\n"
    "while True:\n"
    "    client, _ = server.accept()\n"
    "    while data := client.recv(1 << 16): client.sendall(data)\n"
    "    client.close()"
)


def serve(sandbox: Sandbox) -> None:
    process = sandbox.start(["/usr/bin/python3", "-I", "-S", "-c", SERVER])
    assert b"up\n" == next(iter(process.stdout))


def connected(exposure: Exposure) -> socket.socket:
    assert not isinstance(exposure.address, str)
    return socket.create_connection(exposure.address, timeout=PATIENCE_S)


def echoed(sock: socket.socket, data: bytes) -> bytes:
    """What comes back of `data`, and that it ends where ours ended."""
    sock.settimeout(PATIENCE_S)
    sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)
    return b"".join(iter(lambda: sock.recv(1 << 16), b""))


@pytest.mark.parametrize("network", ["none", "a.test"])
def test_an_address_leads_to_a_server_inside(make: MakeSandbox, network: str) -> None:
    sandbox = make(network=network)
    serve(sandbox)

    with sandbox.expose(8080) as exposure:
        assert "127.0.0.1" == exposure.address[0]
        for _ in range(3):
            with connected(exposure) as sock:
                assert b"hello" == echoed(sock, b"hello")


def test_a_unix_socket_that_only_its_owner_may_use(make: MakeSandbox, tmp_path: Path) -> None:
    sandbox = make()
    serve(sandbox)
    path = str(tmp_path / "there.sock")

    with sandbox.expose(8080, unix=path) as exposure:
        assert path == exposure.address
        assert 0o600 == stat.S_IMODE(os.stat(path).st_mode)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(path)
            assert b"hello" == echoed(sock, b"hello")

    assert not os.path.exists(path)


def test_before_the_server_is_up_a_connection_is_reset(make: MakeSandbox) -> None:
    sandbox = make()
    with sandbox.expose(8080) as exposure:
        with pytest.raises(ConnectionResetError), connected(exposure) as sock:
            sock.recv(1)

        serve(sandbox)
        with connected(exposure) as sock:
            assert b"now" == echoed(sock, b"now")


def test_closed_it_takes_nobody_more_and_cuts_nobody(make: MakeSandbox) -> None:
    sandbox = make()
    serve(sandbox)
    exposure = sandbox.expose(8080)
    sock = connected(exposure)
    sock.sendall(b"a")
    assert b"a" == sock.recv(1)

    exposure.close()
    exposure.close()

    with pytest.raises(ConnectionRefusedError):
        connected(exposure)
    with sock:
        assert b"b" == echoed(sock, b"b")


def test_it_ends_with_its_sandbox(make: MakeSandbox) -> None:
    sandbox = make()
    serve(sandbox)
    before = len(os.listdir("/proc/self/fd"))
    exposure = sandbox.expose(8080)
    with connected(exposure) as sock:
        sock.sendall(b"a")
        assert b"a" == sock.recv(1)

        sandbox.terminate()

        try:
            assert b"" == sock.recv(1)
        except ConnectionResetError:
            pass
    with pytest.raises(ConnectionRefusedError):
        connected(exposure)
    assert until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_while_it_is_suspended_nobody_is_let_in_and_later_again(make: MakeSandbox) -> None:
    sandbox = make()
    serve(sandbox)
    with sandbox.expose(8080) as exposure:
        sandbox.suspend()
        with pytest.raises(ConnectionResetError), connected(exposure) as sock:
            sock.recv(1)
        with pytest.raises(LifecycleError):
            sandbox.connect(8080)

        sandbox.resume()
        with connected(exposure) as sock:
            assert b"again" == echoed(sock, b"again")


def test_what_is_refused(make: MakeSandbox, tmp_path: Path) -> None:
    sandbox = make()
    (tmp_path / "taken").write_text("a file")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for field, port, options in (
            ("port", 0, {}),
            ("host", 80, {"host": "localhost."}),
            ("host_port", 80, {"host_port": 65536}),
            ("host_port", 80, {"host_port": taken.getsockname()[1]}),
            ("unix", 80, {"unix": str(tmp_path / "taken")}),
        ):
            with pytest.raises(InvalidRequest) as refusal:
                sandbox.expose(port, **options)
            assert field == refusal.value.field
    assert "a file" == (tmp_path / "taken").read_text()
    sandbox.terminate()
    with pytest.raises(LifecycleError):
        sandbox.expose(80)


def test_asyncio() -> None:
    async def run() -> bytes:
        async with await AsyncSandbox.create() as sandbox:
            serve(sandbox._sandbox)
            exposure = await sandbox.expose(8080)
            reader, writer = await asyncio.open_connection(*exposure.address)
            writer.write(b"one ")
            writer.write_eof()
            first = await reader.read()
            writer.close()
            sock = await sandbox.connect(8080)
            reader, writer = await asyncio.open_connection(sock=sock)
            writer.write(b"two")
            writer.write_eof()
            second = await reader.read()
            writer.close()
            assert [] == await sandbox.network_log()
            return first + second

    assert b"one two" == asyncio.run(run())
