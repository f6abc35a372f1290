"""The library's side of egress processes: which is started, what is told of whom, what is left at the end."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from ringfence import NetworkPolicy, NetworkRule
from ringfence.egress.host.client import Egress
from ringfence.errors import NetworkPolicyError

ONE, OTHER = "sbx-one", "sbx-other"


@pytest.fixture(name="egress")
def fixture_egress() -> Iterator[Egress]:
    egress = Egress()
    yield egress
    egress.close()


def serve(egress: Egress, sandbox_id: str) -> int:
    """Let a sandbox reach nothing; return the port on loopback that its connections come to."""
    tcp, udp = socket.create_server(("127.0.0.1", 0)), socket.socket(type=socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    port: int = tcp.getsockname()[1]
    policy = NetworkPolicy.parse("a.test")
    egress.serve(sandbox_id, policy, {}, None, [tcp.detach(), udp.detach()])
    return port


def refused(port: int) -> None:
    """Connect to what is at no address of the sandbox's own names."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.settimeout(30)
        try:
            assert b"" == client.recv(1)
        except ConnectionResetError:
            pass


def test_only_a_sandbox_that_has_a_network_is_served(egress: Egress) -> None:
    serve(egress, ONE)

    egress.check(ONE)
    with pytest.raises(NetworkPolicyError, match="has no network"):
        egress.check(OTHER)


def test_events_are_told_of_the_one_sandbox_to_its_end(egress: Egress) -> None:
    ports = [serve(egress, each) for each in (ONE, OTHER)]
    egress.check(ONE)
    refused(ports[0])
    assert 1 == egress.totals(ONE)["refused"]
    assert 0 == egress.totals(OTHER)["refused"]

    assert [] == egress.drop(OTHER)
    assert [False] == [each.allowed for each in egress.drop(ONE)]
    assert [] == egress.drop(ONE)
    with pytest.raises(NetworkPolicyError, match="has no network"):
        egress.check(ONE)


def test_what_ends_tls_is_started_where_a_policy_needs_it(egress: Egress) -> None:
    egress.expect(NetworkPolicy.parse("a.test"))
    assert [] == egress.processes
    egress.expect(NetworkPolicy(rules=(NetworkRule("a.test", methods=("GET",)),)))
    assert 1 == len(egress.processes)
