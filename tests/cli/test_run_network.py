"""`ringfence run` with a list of hosts: what is reached, what is not, and the record of both."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.model import NetworkEvent, NetworkPolicy
from tests.cli.command import run, run_json

pytestmark = pytest.mark.anyone

FETCH = (
    "import sys, urllib.request as u;"
    "print(u.build_opener(u.ProxyHandler({})).open(sys.argv[1], timeout=20).read().decode())"
)


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    """Of a server on the host's own loopback."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def fetch(port: int) -> list[str]:
    return ["--", "python3", "-c", FETCH, f"http://127.0.0.1:{port}/"]


def test_what_a_rule_names_is_reached(port: int) -> None:
    assert b"hello\n" == run("--net", f"127.0.0.1:{port}", *fetch(port)).stdout


@pytest.mark.parametrize(
    "net", ["none", "a.test", "127.0.0.0/8", "127.0.0.2:{port}", "127.0.0.1:1"]
)
def test_and_nothing_else(port: int, net: str) -> None:
    """The control is the test above."""
    result = run("--net", net.format(port=port), *fetch(port))

    assert (1, b"") == (result.returncode, result.stdout)
    assert b"refused" in result.stderr


def test_a_policy_from_a_file(port: int, tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    file.write_text(json.dumps(NetworkPolicy.parse(f"127.0.0.1:{port}").to_json()))

    assert b"hello\n" == run("--net-policy", str(file), *fetch(port)).stdout


def test_the_log_has_what_was_asked(port: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    run("--net", f"127.0.0.1:{port}", "--net-log", str(log), *fetch(port))

    [event] = [NetworkEvent.from_json(json.loads(line)) for line in log.read_text().splitlines()]
    assert ("tcp", "127.0.0.1", port, True) == (
        event.kind, event.address, event.port, event.allowed,
    )  # fmt: skip
    assert event.bytes_in >= len("hello")


def test_a_command_that_is_killed_has_a_log_too(port: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    options = ["--net", f"127.0.0.1:{port}", "--net-log", str(log), "--timeout", "20s"]
    slow = FETCH + "; import os; os.kill(os.getpid(), 9)"
    result = run(*options, "--", "python3", "-c", slow, f"http://127.0.0.1:{port}/")

    assert 137 == result.returncode
    assert 1 == len(log.read_text().splitlines())


def test_what_was_learned_can_be_given_again(port: int) -> None:
    options = ["--net", f"127.0.0.1:{port}", "--net-learn"]
    first = run(*options, *fetch(port))
    [said] = first.stderr.decode().splitlines()

    assert f"ringfence: learned: --net 127.0.0.1:{port}" == said
    assert b"hello\n" == first.stdout == run("--net", said.split()[-1], *fetch(port)).stdout


def test_learning_nothing(port: int) -> None:
    """The host's loopback stays out of reach while a policy learns."""
    result = run("--net-learn", *fetch(port))

    assert 1 == result.returncode
    assert result.stderr.endswith(b"ringfence: learned: --net none\n")


def test_json_tells_of_the_network(port: int) -> None:
    result = run_json("--net", f"127.0.0.1:{port}", *fetch(port))

    assert f"127.0.0.1:{port}" in result["network"]["policy"]["allowed_hosts"]
    assert [port] == [event["port"] for event in result["network"]["events"]]
    assert "network" not in run_json("--", "true")
    assert "network" not in run_json("--net", "unrestricted", "--", "true")
