"""The same rules without a network namespace: the agent connects for its programs, and the egress decides."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from ringfence import Credential, NetworkPolicy, NetworkRule, Sandbox
from ringfence.errors import NetworkPolicyError, Unsupported
from tests.egress.inside.conftest import MakeSandbox
from tests.egress.world import World, places
from tests.features import require

pytestmark = [pytest.mark.in_world, pytest.mark.anyone]

PYTHON = "/usr/bin/python3"
NAME, SECRET = "API_TOKEN", "sk-live-5e1f77"
CONNECT = """
import errno, socket, sys
for host, port in zip(sys.argv[1::2], map(int, sys.argv[2::2])):
    try:
        with socket.create_connection((host, port), 10) as sock:
            sock.sendall(b"GET / HTTP/1.0\\r\\nHost: %s\\r\\n\\r\\n" % host.encode())
            print(sock.recv(12).decode())
    except OSError as exc:
        print(errno.errorcode.get(exc.errno, type(exc).__name__))
"""


@pytest.fixture(scope="module", autouse=True)
def _landlock() -> None:
    require("landlock")


@pytest.fixture
def make(world: World) -> Iterator[MakeSandbox]:
    with ExitStack() as stack:

        def create(**options: Any) -> Sandbox:
            return stack.enter_context(Sandbox.create(backend="landlock", **options))

        yield create


def says(sandbox: Sandbox, *places: Any) -> list[str]:
    ran = sandbox.exec([PYTHON, "-c", CONNECT, *map(str, places)], timeout_s=60)
    assert ran.ok, ran
    return ran.text.split("\n")[:-1]


OK = "HTTP/1.1 200"


def test_what_a_rule_names_is_reached_and_nothing_else(make: MakeSandbox, world: World) -> None:
    sandbox = make(network=["a.test", f"127.0.0.1:{places.HOST_PORT_EVERYWHERE}"])
    mark = world.mark()
    refused = says(
        *(sandbox, "b.test", 80, "10.0.0.5", 80, places.METADATA_V4, 80, "2606:4700::1111", 80),
        *("127.0.0.1", places.HOST_PORT, "::1", places.HOST_PORT, "198.18.7.9", 80),
    )

    assert [] == world.left(mark)
    assert not any("HTTP" in each for each in refused), refused
    assert [OK, OK] == says(sandbox, "a.test", 80, "127.0.0.1", places.HOST_PORT_EVERYWHERE)
    log = {(each.host, each.allowed) for each in sandbox.network_log()}
    assert {("a.test", True), ("b.test", False)} <= log


def test_the_policy_changes_while_it_runs(make: MakeSandbox, world: World) -> None:
    sandbox = make()
    assert [OK] != says(sandbox, "a.test", 80)
    for policy, reached in (("a.test", True), ("b.test", False), ("a.test", True), ("none", False)):
        sandbox.apply_network_policy(policy)
        assert reached is ([OK] == says(sandbox, "a.test", 80)), policy
    with pytest.raises((NetworkPolicyError, Unsupported)):
        sandbox.apply_network_policy("unrestricted")


def test_a_secret_is_written_outside(make: MakeSandbox, world: World) -> None:
    rule = NetworkRule("a.test", "443", credential=Credential(NAME))
    sandbox = make(network=NetworkPolicy(rules=(rule,)), secrets={NAME: SECRET})
    mark = world.internet.mark()
    ran = sandbox.exec(["curl", "-sS", "--max-time", "20", "https://a.test/"], timeout_s=30)
    assert ran.ok, ran
    assert SECRET.encode() not in ran.stdout + sandbox.exec(["env"]).stdout
    requests = world.internet.seen(mark, kind="request")
    sent = [value for each in requests for key, value in each["headers"] if "Bearer" in value]
    assert [f"Bearer {SECRET}"] == sent


def test_who_does_not_know_the_token_gets_nothing_of_the_listener(
    make: MakeSandbox, world: World
) -> None:
    """Programs of the host reach the listener, as it is on their loopback."""
    sandbox = make(network=["a.test"])
    network: Any = sandbox._inner.network  # type: ignore[attr-defined]
    mark = world.mark()
    target = socket.inet_pton(socket.AF_INET, places.WEB_V4)
    for token in (bytes(16), b""):
        with socket.create_connection(network._at, 10) as sock:
            sock.sendall(token + bytes(10) + b"\xff\xff" + target + b"\0\x50GET / HTTP/1.0\r\n\r\n")
            try:
                heard = sock.recv(99)
            except ConnectionResetError:
                heard = b""
        assert b"" == heard
    assert [] == world.left(mark)


PIP = (
    "python3 -m venv v; v/bin/pip install -q --index-url http://pypi.test/simple "
    "--trusted-host pypi.test lab-wheel; v/bin/pip list"
)


@pytest.mark.full
def test_pip_installs_from_an_index(make: MakeSandbox, world: World) -> None:
    del world
    sandbox = make(network=["pypi.test"])
    ran = sandbox.exec(["sh", "-ec", PIP], timeout_s=120)
    assert "lab-wheel" in ran.text, ran


LISTENS = """
import socket, sys
server = socket.create_server(("", 8000))
print("up", flush=True)
while True:
    server.accept()[0].sendall(b"from inside")
"""


def test_a_server_inside_is_reached_inside_and_by_the_host(make: MakeSandbox) -> None:
    sandbox, other = make(), make()
    process = sandbox.start([PYTHON, "-uc", LISTENS])
    assert b"up" in process.stdout.read()

    with sandbox.connect(8000) as sock:
        assert b"from inside" == sock.recv(99)
    assert ["from inside"] == says(sandbox, "127.0.0.1", 8000)
    assert ["ECONNREFUSED"] == says(other, "127.0.0.1", 8000)
    process.kill()
    process.wait(timeout_s=60)
    assert ["ECONNREFUSED"] == says(sandbox, "127.0.0.1", 8000)


def test_servers_of_the_host_are_out_of_reach(make: MakeSandbox) -> None:
    """On each loopback address, and where one of the sandbox's own has ended at that port."""
    sandbox = make()
    code = (
        "import socket\nserver = socket.create_server(('', 8000))\nprint(server.getsockname()[1])"
    )
    port = int(sandbox.exec([PYTHON, "-c", code]).text)
    with socket.create_server(("0.0.0.0", port)):  # as a careless server of the host's
        own = socket.inet_ntoa(sandbox._inner._loopback.v4)  # type: ignore[attr-defined]
        control = subprocess.run(
            [PYTHON, "-c", "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])))",
             own, str(port)], check=False,
        )  # fmt: skip
        found = says(sandbox, "127.0.0.1", 8000, "127.0.0.1", port, own, port, "::1", port)

    assert 0 == control.returncode
    assert {"ECONNREFUSED"} == set(found)
