"""Which sockets listen, as the kernel tells by sock_diag."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from ringfence.guest.without_namespaces import inet_diag

ONE, OTHER = (socket.inet_aton(f"127.66.77.{last}") for last in (4, 5))


@pytest.fixture(name="listeners")
def fixture_listeners() -> Iterator[inet_diag.Listeners]:
    found = inet_diag.find(ONE)
    if found is None:
        pytest.skip("the kernel has no CONFIG_INET_DIAG")
    yield found
    found.close()


def _port(sock: socket.socket) -> int:
    port: int = sock.getsockname()[1]
    return port


def test_it_listens_at_that_address_and_port_alone(listeners: inet_diag.Listeners) -> None:
    with socket.create_server((socket.inet_ntoa(ONE), 0)) as server:
        port = _port(server)
        with socket.create_connection(server.getsockname()), server.accept()[0]:
            found = [listeners.has(*each) for each in ((ONE, port), (OTHER, port), (ONE, 1))]

    assert [True, False, False] == found
    assert not listeners.has(ONE, port)


def test_a_server_of_ipv6_at_an_address_of_ipv4_is_found(listeners: inet_diag.Listeners) -> None:
    with socket.socket(socket.AF_INET6) as server:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind((f"::ffff:{socket.inet_ntoa(ONE)}", 0))
        server.listen()
        found = listeners.has(ONE, _port(server)), listeners.has(OTHER, _port(server))

    assert (True, False) == found


def test_a_server_at_every_address_is_not(listeners: inet_diag.Listeners) -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        assert not listeners.has(ONE, _port(server))


def test_a_bound_socket_that_does_not_listen_is_not(listeners: inet_diag.Listeners) -> None:
    with socket.socket() as sock:
        sock.bind((socket.inet_ntoa(ONE), 0))
        assert not listeners.has(ONE, _port(sock))


def test_without_the_facility_there_is_nobody_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        inet_diag, "_BY_FAMILY", 4000
    )  # answered with an error, as one that is missing

    assert inet_diag.find(ONE) is None
