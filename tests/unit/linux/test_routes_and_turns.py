"""What the kernel of a network namespace makes of our messages: addresses, routes, and what is turned where."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

import pytest
from tests.unit.linux.child import alone, result_of

from ringfence.launcher import build
from ringfence.linux import namespaces, netlink, nftables, routes, rtnetlink
from ringfence.linux.destination import destination, packed, shown

_PORT = 1021
_NAMES, _NAMES6 = ("198.18.0.0", 15), ("2001:2::", 48)
_OWN, _OWN6 = "198.18.0.1", "2001:2::1"


def own_network() -> None:
    alone(namespaces.CLONE_NEWNET)
    build.leave_host_network(namespaces.CLONE_NEWNET)


def send(messages: list[tuple[int, bytes]]) -> list[tuple[int, int]]:
    return netlink.send_batch(netlink.NETLINK_ROUTE, *rtnetlink.batch(messages))


def routed(*, remove: bool = False) -> list[tuple[int, bytes]]:
    route = rtnetlink.RTM_DELROUTE if remove else rtnetlink.RTM_NEWROUTE
    address = rtnetlink.RTM_DELADDR if remove else rtnetlink.RTM_NEWADDR
    found = []
    for (network, bits), own in ((_NAMES, _OWN), (_NAMES6, _OWN6)):
        both = [
            rtnetlink.address(address, packed(own)),
            rtnetlink.local_route(route, packed(network), bits, packed(own)),
        ]
        found += both[::-1] if remove else both
    return found


def local() -> list[tuple[str, int]]:
    return [(shown(address), bits) for address, bits in routes.local_networks()]


def test_routes_come_and_go() -> None:
    def steps() -> list[Any]:
        own_network()
        before = local()
        refused = [send(routed())]
        after = local()
        refused.append(send(routed(remove=True)))
        return [before, after, local(), *refused]

    *told, first, last = result_of(steps)
    # The kernel makes the route to an IPv6 address itself, a little later.
    before, after, again = ({tuple(each) for each in some} - {(_OWN6, 128)} for some in told)
    assert {("127.0.0.0", 8), ("::1", 128)} <= before
    assert ("127.255.255.255", 32) not in before, "to it everybody is meant"
    assert {_NAMES, _NAMES6, (_OWN, 32)} == after - before
    assert before == again
    assert [[], []] == [first, last]


def test_what_goes_there_comes_from_the_address_that_the_route_names() -> None:
    def sources() -> list[str]:
        own_network()
        send(routed())
        found = []
        for host, family in (("198.18.7.9", socket.AF_INET), ("2001:2::79", socket.AF_INET6)):
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect((host, 1))
                found.append(sock.getsockname()[0])
        return found

    assert [_OWN, _OWN6] == result_of(sources)


def test_everything_of_a_family_can_be_routed_here() -> None:
    def routed_here() -> list[Any]:
        own_network()
        every = [
            rtnetlink.local_route(rtnetlink.RTM_NEWROUTE, bytes(size), 0, packed(loopback))
            for size, loopback in ((4, "127.0.0.1"), (16, "::1"))
        ]
        return [send(every), local()]

    refused, found = result_of(routed_here)
    assert [] == refused
    assert ["0.0.0.0", 0] in found
    assert ["::", 0] in found


def test_what_is_refused_is_told_by_its_number_and_the_others_are_done() -> None:
    def refused() -> list[Any]:
        own_network()
        messages = [
            rtnetlink.address(rtnetlink.RTM_NEWADDR, packed(_OWN)),
            rtnetlink.address(rtnetlink.RTM_DELADDR, packed("198.18.0.9")),
            rtnetlink.address(rtnetlink.RTM_NEWADDR, packed("198.18.0.2")),
        ]
        return [send(messages), send(messages[1:2]), local()]

    some, last, found = result_of(refused)
    assert [[2, errno.EADDRNOTAVAIL]] == some
    assert [[1, errno.EADDRNOTAVAIL]] == last
    assert ["198.18.0.2", 32] in found


def test_a_batch_whose_last_message_is_not_answered_has_failed() -> None:
    """Else it would be taken for done, or waited for without end."""

    def unanswered() -> list[Any]:
        own_network()
        before = os.listdir("/proc/self/fd")
        kind, body = rtnetlink.address(rtnetlink.RTM_NEWADDR, packed(_OWN))
        silent = netlink.message(kind, netlink.NLM_F_CREATE, 1, body)
        try:
            netlink.send_batch(netlink.NETLINK_ROUTE, silent, 1)
        except OSError as exc:
            return [exc.errno, before == os.listdir("/proc/self/fd")]
        return []

    assert [errno.EPROTO, True] == result_of(unanswered)


def test_answers_that_come_together_are_all_read() -> None:
    """Whichever of them is about the last message, and whatever their sizes are."""

    def answer(number: int, code: int, extra: bytes = b"") -> bytes:
        body = (-code).to_bytes(4, "little", signed=True) + bytes(16) + extra
        made = netlink.message(2, 0, number, body)
        return made + bytes(-len(made) % 4)

    told = answer(1, errno.EEXIST, b"odd") + answer(3, 0) + answer(2, errno.EPERM)
    refused: list[tuple[int, int]] = []
    assert netlink._read(told, 3, refused)
    assert [(1, errno.EEXIST), (2, errno.EPERM)] == refused
    assert not netlink._read(told, 4, [])


def test_a_change_of_routes_of_either_family_is_heard_and_nobody_waits_for_it() -> None:
    def heard() -> list[bool]:
        own_network()
        sock = routes.watch_routes()
        found = [not os.get_blocking(sock.fileno()), not os.get_inheritable(sock.fileno())]
        for messages in (routed()[:2], routed()[2:]):
            send(messages)
            found.append(bool(sock.recv(1 << 16)))
            try:
                while sock.recv(1 << 16):
                    pass
            except BlockingIOError:
                pass
        return found

    assert [True] * 4 == result_of(heard)


# -- what is turned to the listener -------------------------------------------------------------------


def apply(messages: list[tuple[int, bytes]]) -> list[tuple[int, int]]:
    return netlink.send_batch(netlink.NETLINK_NETFILTER, *nftables.batch(messages))


def turn(network: str, bits: int, first: int = 1, last: int = 65535) -> tuple[bytes, int, int, int]:
    return packed(network), bits, first, last


class Turned:
    """A listener, to which connections are turned; where each was to go."""

    def __init__(self) -> None:
        self._listener = socket.create_server(
            ("::", _PORT), family=socket.AF_INET6, dualstack_ipv6=True
        )
        self._listener.settimeout(20)

    def asked(self, host: str, port: int) -> str:
        """Where the kernel says it was to go; an errno's name where it came to nobody."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as client:
            client.settimeout(20)
            try:
                client.connect((host, port))
            except OSError as exc:
                return errno.errorcode[exc.errno or 0]
            sock, peer = self._listener.accept()
            with sock:
                address, to = destination(sock, peer[0])
            return f"{shown(address)} {to}"


_LOOPBACK = [
    turn("127.0.0.53", 32, 53, 53),
    turn("127.0.0.1", 32, 8000, 8002),
    turn("::1", 128, 8000, 8002),
]
_OTHERS = [
    turn("198.18.0.0", 15, 443, 443), turn("2001:2::", 48, 443, 443),
    turn("198.18.0.0", 15, 90, 95), turn("0.0.0.0", 0, 22, 22), turn("::", 0, 22, 22),
    turn("198.19.4.0", 23), turn("198.19.8.0", 24, 60000, 65535),
]  # fmt: skip


@pytest.fixture(scope="module")
def asked() -> dict[str, str]:
    """What became of connections to each of these, in a network of their own."""
    places = [
        ("198.18.7.9", 443), ("2001:2::79", 443), ("198.19.255.9", 443), ("198.18.7.9", 444),
        ("198.18.7.9", 89), ("198.18.7.9", 90), ("198.18.7.9", 95), ("198.18.7.9", 96),
        ("2001:2::79", 90), ("198.18.7.9", 22), ("2001:2::79", 22), ("198.19.4.1", 1),
        ("198.19.5.255", 65535), ("198.19.6.0", 5), ("198.19.8.1", 59999), ("198.19.8.1", 65535),
        ("198.19.3.255", 5),
        ("127.0.0.53", 53), ("127.0.0.53", 54), ("127.0.0.54", 53), ("127.0.0.1", 7999),
        ("127.0.0.1", 8000), ("127.0.0.1", 8002), ("127.0.0.1", 8003), ("127.9.9.9", 22),
        ("127.0.0.1", 22), ("::1", 22), ("::1", 8001), ("127.0.0.1", _PORT),
    ]  # fmt: skip

    def tried() -> dict[str, str]:
        own_network()
        assert [] == send(routed())
        assert [] == apply(nftables.turn_to_listener(_LOOPBACK, _OTHERS, _PORT))
        turned = Turned()
        return {f"{host} {port}": turned.asked(host, port) for host, port in places}

    found: dict[str, str] = result_of(tried)
    return found


def test_what_is_named_is_turned_and_known_by_where_it_was_to_go(asked: dict[str, str]) -> None:
    for place in (
        "198.18.7.9 443", "2001:2::79 443", "198.19.255.9 443", "198.18.7.9 90", "198.18.7.9 95",
        "198.18.7.9 22", "2001:2::79 22", "198.19.4.1 1", "198.19.5.255 65535", "198.19.8.1 65535",
    ):  # fmt: skip
        assert place == asked[place]


def test_beside_its_ports_and_networks_nothing_is(asked: dict[str, str]) -> None:
    for place in (
        "198.18.7.9 444", "198.18.7.9 89", "198.18.7.9 96", "2001:2::79 90", "198.19.6.0 5",
        "198.19.3.255 5", "198.19.8.1 59999",
    ):  # fmt: skip
        assert "ECONNREFUSED" == asked[place]


def test_of_loopback_only_what_is_named_is_turned_however_wide_the_others_are(
    asked: dict[str, str],
) -> None:
    for place in ("127.0.0.53 53", "127.0.0.1 8000", "127.0.0.1 8002", "::1 8001"):
        assert place == asked[place]
    for place in (
        "127.0.0.53 54", "127.0.0.54 53", "127.0.0.1 7999", "127.0.0.1 8003", "127.9.9.9 22",
        "127.0.0.1 22", "::1 22",
    ):  # fmt: skip
        assert "ECONNREFUSED" == asked[place]
    assert f"127.0.0.1 {_PORT}" == asked[f"127.0.0.1 {_PORT}"]


def test_what_stays_inside_takes_no_room_in_the_connection_table() -> None:
    """What is turned does: the control."""

    def counted() -> list[int]:
        own_network()
        send(routed())
        apply(nftables.turn_to_listener(_LOOPBACK, _OTHERS, _PORT))
        turned = Turned()
        found = []
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname()).close()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"x", ("198.18.7.9", 443))
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
            socket.create_connection(server.getsockname()[:2]).close()
        found.append(_tracked())
        turned.asked("198.18.7.9", 443)
        turned.asked("127.0.0.53", 53)
        return [*found, _tracked()]

    assert [0, 2] == result_of(counted)


def _tracked() -> int:
    with open("/proc/sys/net/netfilter/nf_conntrack_count", encoding="ascii") as file:
        return int(file.read())


def test_a_table_is_replaced_in_one_step_or_not_at_all() -> None:
    def replaced() -> list[Any]:
        own_network()
        send(routed())
        apply(nftables.turn_to_listener([], [turn("198.18.0.0", 15, 443, 443)], _PORT))
        turned = Turned()
        other = nftables.turn_to_listener([], [turn("198.18.0.0", 15, 80, 80)], _PORT)
        wrong = (other[-1][0], other[-1][1][:8])
        bad = [*nftables.remove_table(), *other[:-1], wrong, other[-1]]
        refused = apply(bad)
        found = [bool(refused), turned.asked("198.18.7.9", 443), turned.asked("198.18.7.9", 80)]
        found += [apply([*nftables.remove_table(), *other])]
        found += [turned.asked("198.18.7.9", 443), turned.asked("198.18.7.9", 80)]
        apply(nftables.remove_table())
        return [*found, turned.asked("198.18.7.9", 80), bool(apply(nftables.remove_table()))]

    assert [
        *(True, "198.18.7.9 443", "ECONNREFUSED"),
        *([], "ECONNREFUSED", "198.18.7.9 80"),
        *("ECONNREFUSED", True),
    ] == result_of(replaced)


def test_a_message_is_padded_to_four_bytes() -> None:
    for size in range(9):
        made = netlink.attribute(7, bytes(size))
        assert 0 == len(made) % 4
        assert 4 + size == int.from_bytes(made[:2], "little")
    head = netlink.message(20, netlink.NLM_F_ACK, 3, b"body")
    assert (20, 20, 5, 3) == (
        int.from_bytes(head[:4], "little"),
        *(int.from_bytes(head[at : at + 2], "little") for at in (4, 6, 8)),
    )
