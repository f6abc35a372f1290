"""The world itself: what it promises to the tests that live in it."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import urllib.request
from pathlib import Path

import pytest

from ringfence import NetworkPolicy, Sandbox, SandboxSpec
from tests.egress.inside.conftest import MakeSandbox
from tests.egress.world import World, places
from tests.features import has

pytestmark = pytest.mark.in_world


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=5) as answer:
        body: bytes = answer.read()
        return body


@pytest.mark.parametrize("name", ["a.test", "v6.test", "filed.test", "x.y.wild.test", "cname.test"])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_names_lead_to_servers(world: World, name: str, scheme: str) -> None:
    mark = world.internet.mark()
    context = ssl.create_default_context(cafile=str(world.ca))
    context.check_hostname = "wild" not in name
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))

    with opener.open(f"{scheme}://{name}/here", timeout=5) as answer:
        assert 200 == answer.status

    (seen,) = world.internet.seen(mark, kind="request")
    assert (name, "/here") == (seen["host"], seen["target"])
    assert (name if "https" == scheme else None) == seen["sni"]


def test_rebinding(world: World) -> None:
    world.internet.zone("twice.test", [{"A": [places.WEB_V4]}, {"A": ["127.0.0.1"]}])

    found = [socket.gethostbyname("twice.test") for _ in range(3)]

    assert [places.WEB_V4, "127.0.0.1", "127.0.0.1"] == found


def test_a_black_hole_answers_nothing(world: World) -> None:
    with pytest.raises(TimeoutError):
        socket.create_connection(("blackhole.test", 80), timeout=0.3)


def test_a_closed_port_is_refused(world: World) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("a.test", 81), timeout=5)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_host_has_services_of_its_own(world: World, address: str) -> None:
    with socket.create_connection((address, places.HOST_PORT), timeout=5) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert b'"server": "host"' in connection.makefile("rb").read()


def test_who_speaks_first(world: World) -> None:
    with socket.create_connection(("ssh.test", places.BANNER), timeout=5) as connection:
        assert connection.recv(100).startswith(b"SSH-2.0-")


def test_datagrams_come_back(world: World) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(5)
        sock.connect((places.WEB_V4, places.ECHO))
        sock.send(b"ping")
        assert b"ping" == sock.recv(10)


def test_programs_run_on_the_internet(world: World, tmp_path: Path) -> None:
    listen = "import http.server as h; h.HTTPServer(('', 4000), h.SimpleHTTPRequestHandler)"
    with world.internet.spawn(["python3", "-c", f"{listen}.serve_forever()"], tmp_path / "log"):
        world.await_server("a.test", 4000)
        assert b"Directory listing" in fetch("http://a.test:4000/")


def test_only_root_keeps_capabilities() -> None:
    effective = Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0]

    assert bool(int(effective, 16)) == (0 == os.geteuid())


def test_a_sandbox_starts_here(make: MakeSandbox) -> None:
    assert make().exec(["true"]).ok


def test_an_unrestricted_sandbox_sees_the_world(make: MakeSandbox) -> None:
    """The control of every refusal: what is refused elsewhere works here."""
    sandbox = make(network=NetworkPolicy.unrestricted())

    result = sandbox.exec(
        ["python3", "-c", f"import socket; socket.create_connection(('{places.WEB_V4}', 80), 5)"]
    )

    assert result.ok, result.stderr_text


def test_an_unrestricted_sandbox_knows_the_names_of_the_host(
    world: World, make: MakeSandbox
) -> None:
    """Its name servers, and its list of hosts; a sandbox without network knows neither."""
    names = ("a.test", "v6.test", "filed.test", "nobody.invalid")

    found = {
        network: [make(network=network).exec(["getent", "hosts", name]).ok for name in names]
        for network in ("unrestricted", "none")
    }

    assert {"unrestricted": [True, True, True, False], "none": [False] * 4} == found


def test_a_restored_sandbox_has_the_names_of_its_own_network(
    world: World, make: MakeSandbox
) -> None:
    """Not those of the sandbox that was saved."""
    policies = {
        "unrestricted": NetworkPolicy.unrestricted(),
        "rules": NetworkPolicy.parse("a.test"),
    }
    resolves = ["getent", "hosts", "a.test"]
    for was, wanted in (("unrestricted", "rules"), ("rules", "unrestricted")):
        snapshot = make(network=policies[was]).snapshot()
        try:
            spec = SandboxSpec(network=policies[wanted])
            with Sandbox.restore(snapshot.id, spec) as restored:
                assert restored.exec(resolves, timeout_s=10).ok, (was, wanted)
        finally:
            Sandbox.delete_snapshot(snapshot.id)


@pytest.mark.full
@pytest.mark.skipif(not has("git"), reason="needs git")
def test_git_clones_here(world: World, tmp_path: Path) -> None:
    url = "https://git.test/lab.git"
    env = {**os.environ, **world.program_environment()}
    subprocess.run(
        ["git", "clone", "-q", url, str(tmp_path / "x")], check=True, timeout=20, env=env
    )

    assert "from the repository\n" == (tmp_path / "x" / "README").read_text()
