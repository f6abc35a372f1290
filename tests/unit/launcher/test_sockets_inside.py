"""The two sockets of a sandbox's network, and namespaces that carry a map: also where they cannot be made."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.native.outside import same_descriptors

from ringfence.launcher import idmap, network
from ringfence.launcher.newroot import BuildError
from ringfence.linux import netlink


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    with same_descriptors():
        yield


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """One that has the resolver's place already."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        monkeypatch.setattr(network, "_RESOLVER", sock.getsockname())
        yield sock


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.anyone
def test_the_listener_hears_both_families_and_nobody_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network, "_RESOLVER", ("127.0.0.1", 0))
    fds = network.set_up({"batches": [], "port": free_port()})
    listener, datagrams = (socket.socket(fileno=fd) for fd in fds)
    with listener, datagrams:
        kinds = [
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) for sock in (listener, datagrams)
        ]
        assert [socket.SOCK_STREAM, socket.SOCK_DGRAM] == kinds
        for sock in (listener, datagrams):
            assert not os.get_blocking(sock.fileno())
            assert not sock.get_inheritable()
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        assert not datagrams.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        with socket.create_connection(("127.0.0.1", listener.getsockname()[1])):
            pass


@pytest.mark.anyone
def test_a_taken_place_of_the_resolver_leaves_no_listener(resolver: socket.socket) -> None:
    port = free_port()
    with pytest.raises(BuildError) as refusal:
        network.set_up({"batches": [], "port": port})

    assert errno.EADDRINUSE == refusal.value.cause.errno
    socket.create_server(("127.0.0.1", port)).close()
    assert resolver.fileno() >= 0


@pytest.mark.anyone
def test_without_a_plan_or_a_port_there_is_no_socket() -> None:
    assert [] == network.set_up(None)
    assert [] == network.set_up({"batches": [], "port": 0})


@pytest.mark.anyone
@pytest.mark.parametrize(
    ("number", "code", "is_refused"),
    [
        (2, errno.EAFNOSUPPORT, False),
        (2, errno.EOPNOTSUPP, False),
        (2, errno.EACCES, False),
        (2, errno.EADDRNOTAVAIL, False),
        (2, errno.EPERM, True),
        (1, errno.EAFNOSUPPORT, True),
    ],
)
def test_only_a_step_of_ipv6_may_have_no_family(
    monkeypatch: pytest.MonkeyPatch, number: int, code: int, is_refused: bool
) -> None:
    """All batches are tried before the first problem is told."""
    tried: list[int] = []

    def send(protocol: int, _data: bytes, _last: int) -> list[tuple[int, int]]:
        tried.append(protocol)
        return [(number, code)] if protocol == 1 else []

    monkeypatch.setattr(netlink, "send_batch", send)
    plan = {"batches": [("routes", 1, b"", 2, 2), ("filter", 2, b"", 2, 3)], "port": 0}
    told: tuple[str, int | None] | None = None
    try:
        network.set_up(plan)  # type: ignore[arg-type]
    except BuildError as exc:
        told = (exc.step, exc.cause.errno)

    assert told == ((f"network routes {number}", code) if is_refused else None)
    assert [1, 2] == tried


def children() -> list[str]:
    return sorted(
        each
        for path in Path("/proc/self/task").glob("*/children")
        for each in path.read_text().split()
    )


@pytest.mark.root
def test_a_namespace_for_a_map_outlives_its_process_which_is_gone() -> None:
    before = children()
    fd = idmap.user_namespace("0 1000 1\n", "0 1000 1\n")
    try:
        assert os.readlink(f"/proc/self/fd/{fd}").startswith("user:[")
        assert os.fstat(fd).st_ino != os.stat("/proc/self/ns/user").st_ino
    finally:
        os.close(fd)
    with pytest.raises(OSError, match="Invalid argument"):
        idmap.user_namespace("no map", "0 1000 1\n")
    assert before == children()
