"""The traffic that egress is measured by, and the peers that carry it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from ringfence.bench import traffic
from ringfence.bench.peers import networks
from ringfence.bench.peers.peer import PeerMissingError

pytestmark = [pytest.mark.full, pytest.mark.anyone]


@pytest.fixture(scope="module", name="server")
def fixture_server() -> Iterator[traffic.Server]:
    with traffic.Server() as server:
        yield server


def run(server: traffic.Server, verb: str, *counts: int) -> list[float]:
    argv = traffic.client(verb, "127.0.0.1", server.port, *counts)
    done = subprocess.run(argv, capture_output=True, timeout=60, check=True)
    return traffic.seconds(done.stdout)


@pytest.mark.parametrize(
    ("verb", "counts", "results"),
    [
        ("connections", [20], 20),
        ("down", [10_000_001], 1),
        ("up", [10_000_001], 1),
        ("many", [50, 70_000], 50),
    ],
)
def test_traffic_is_timed(
    server: traffic.Server, verb: str, counts: list[int], results: int
) -> None:
    taken = run(server, verb, *counts)

    assert results == len(taken)
    assert taken == sorted(taken)
    assert all(each > 0 for each in taken)


def test_a_stream_that_breaks_off_is_no_result(server: traffic.Server) -> None:
    """The control: a client that does not get its bytes says so, and measures nothing."""
    argv = traffic.client("down", "127.0.0.1", server.port, 2**40)
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with traffic.Server() as other:
        assert other.port != server.port
        dying = subprocess.Popen(
            traffic.client("down", "127.0.0.1", other.port, 2**40),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    out, err = dying.communicate(timeout=60)
    process.kill()
    process.communicate()

    assert (b"", False) == (out, 0 == dying.returncode)
    assert err


@pytest.mark.parametrize("name", networks.OPENERS)
def test_a_peer_carries_the_same_traffic(server: traffic.Server, name: str) -> None:
    try:
        peer = networks.OPENERS[name](server.port)
    except PeerMissingError as exc:
        pytest.skip(f"{name}: {exc}")
    try:
        assert 5 == len(peer.run("connections", server.port, 5))
        assert 1 == len(peer.run("down", server.port, 5_000_000))
    finally:
        peer.close()


def test_quantiles() -> None:
    ordered = [float(n) for n in range(200)]

    assert (100.0, 198.0) == (traffic.quantile(ordered, 0.5), traffic.quantile(ordered, 0.99))
    assert 7.0 == traffic.quantile([7.0], 0.99)
