"""Everything that is neither TCP nor our DNS: datagrams, raw and odd sockets, unix sockets, the tables."""

from __future__ import annotations

import socket
import struct

import pytest

from ringfence import Sandbox
from tests.egress.inside.conftest import MakeSandbox, attempt
from tests.egress.world import World, places

pytestmark = pytest.mark.in_world

POLICY = ("a.test", "203.0.113.0/24", f"127.0.0.1:{places.HOST_PORT_EVERYWHERE}")
DATAGRAMS = {
    "QUIC to an allowed name": ("a.test", places.QUIC),
    "QUIC to an allowed address": (places.WEB_V4, places.QUIC),
    "QUIC to an allowed address, v6": (places.WEB_V6, places.QUIC),
    "an echo": (places.WEB_V4, places.ECHO),
    "an echo of the host": ("127.0.0.1", places.HOST_PORT),
    "an echo of the host, v6": ("::1", places.HOST_PORT),
    "DNS elsewhere": (places.WEB_V4, places.DNS),
    "DNS of the host": (places.DNS_V4, places.DNS),
    "metadata": (places.METADATA_V4, places.ECHO),
    "private": ("10.0.0.5", places.ECHO),
}


@pytest.mark.parametrize("what", DATAGRAMS)
def test_no_datagram_leaves(limited: Sandbox, world: World, what: str) -> None:
    host, port = DATAGRAMS[what]
    if "a.test" == host:
        host = attempt(limited, "resolve", name=host)["addresses"][0]
    mark = world.mark()

    found = attempt(limited, "udp", host=host, port=port)

    assert "" == found["heard"]
    assert [] == world.left(mark)


@pytest.mark.parametrize("what", DATAGRAMS)
def test_the_control_sends_datagrams(unrestricted: Sandbox, world: World, what: str) -> None:
    host, port = DATAGRAMS[what]
    if "a.test" == host:
        host = places.WEB_V4
    mark = world.mark()

    attempt(unrestricted, "udp", host=host, port=port)

    assert world.left(mark)


def test_quic_fails_at_once_so_that_programs_fall_back(limited: Sandbox) -> None:
    for address in attempt(limited, "resolve", name="a.test")["addresses"]:
        found = attempt(limited, "udp", host=address, port=places.QUIC)
        assert found["error"] in ("ECONNREFUSED", "ENETUNREACH", "EHOSTUNREACH"), found


# -- odd sockets ----------------------------------------------------------------------------------

AF_PACKET, AF_XDP, AF_SMC, AF_ALG, AF_VSOCK, AF_CAN, AF_TIPC, AF_RDS, AF_KCM = (
    *(17, 44, 43, 38, 40, 29, 30, 21, 41),
)
INET, INET6, STREAM, DGRAM, RAW = (
    *(int(socket.AF_INET), int(socket.AF_INET6)),
    *(int(socket.SOCK_STREAM), int(socket.SOCK_DGRAM), int(socket.SOCK_RAW)),
)
SCTP, DCCP, UDPLITE, MPTCP, L2TP, ICMP, ICMP6 = 132, 33, 136, 262, 115, 1, 58
ODD = [
    *[
        [family, RAW, protocol]
        for family in (INET, INET6)
        for protocol in (6, 17, 255, ICMP, ICMP6)
    ],
    *[[INET, DGRAM, ICMP], [INET6, DGRAM, ICMP6]],
    *[[family, STREAM, protocol] for family in (INET, INET6) for protocol in (MPTCP, SCTP)],
    *[[family, DGRAM, protocol] for family in (INET, INET6) for protocol in (UDPLITE, L2TP)],
    *[[INET, 5, SCTP], [INET, 6, DCCP]],  # SOCK_SEQPACKET, SOCK_DCCP
    *[[family, kind, 0] for family in range(2, 46) for kind in (STREAM, DGRAM, RAW, 5)],
]
USUAL = [
    *[[family, kind, 0] for family in (INET, INET6) for kind in (STREAM, DGRAM)],
    *[[int(socket.AF_NETLINK), kind, 0] for kind in (DGRAM, RAW)],  # NETLINK_ROUTE, read-only
]


def test_only_the_usual_sockets_can_be_opened(limited: Sandbox) -> None:
    opened = attempt(limited, "sockets", kinds=ODD)["opened"]

    assert [] == [kind for kind in opened if kind not in USUAL]


def test_the_control_opens_odd_sockets(world: World) -> None:
    """On the host, without any filter, some of them open."""
    opened = 0
    for family, kind, protocol in ODD:
        try:
            socket.socket(family, kind, protocol).close()
            opened += [family, kind, protocol] not in USUAL
        except OSError:
            continue
    assert opened


# -- unix sockets of the host ---------------------------------------------------------------------


def test_an_abstract_socket_of_the_host_is_out_of_reach(limited: Sandbox, world: World) -> None:
    mark = world.mark()

    found = attempt(limited, "unix", path="\0ringfence-world")

    assert found["error"] in ("ECONNREFUSED", "EPERM", "EAFNOSUPPORT", "EACCES")
    assert [] == world.left(mark, server="host-unix")


def test_the_control_reaches_the_abstract_socket(world: World) -> None:
    from tests.egress.inside import attempts

    assert "the host\n" == attempts.unix("\0ringfence-world")["heard"]


# -- taking over ----------------------------------------------------------------------------------

SO_REUSEADDR, SO_REUSEPORT, SO_BINDTODEVICE, IP_TRANSPARENT = 2, 15, 25, 19
LISTENERS = {
    "the resolver": (INET, DGRAM, "127.0.0.53", 53),
    "the resolver, TCP": (INET, STREAM, "127.0.0.53", 53),
    "the listener": (INET, STREAM, "0.0.0.0", 1021),
    "the listener, v6": (INET6, STREAM, "::", 1021),
    "the listener on loopback": (INET, STREAM, "127.0.0.1", 1021),
    "everybody's resolver": (INET, DGRAM, "0.0.0.0", 53),
}


@pytest.mark.parametrize(
    "options", [[], [[1, SO_REUSEADDR, 1]], [[1, SO_REUSEPORT, 1], [1, SO_REUSEADDR, 1]]]
)
@pytest.mark.parametrize("what", LISTENERS)
def test_nobody_inside_takes_a_listeners_place(
    limited: Sandbox, what: str, options: list[list[int]]
) -> None:
    family, kind, host, port = LISTENERS[what]

    found = attempt(
        limited, "bind", family=family, kind=kind, host=host, port=port, options=options
    )

    assert found["error"] in ("EACCES", "EADDRINUSE", "EPERM")


def test_the_control_listens_elsewhere(limited: Sandbox) -> None:
    found = attempt(
        limited, "bind", family=INET, kind=STREAM, host="127.0.0.1", port=1024, options=[]
    )

    assert found["error"] is None


def test_a_server_inside_is_its_own_affair(limited: Sandbox, world: World) -> None:
    """Loopback inside is never redirected, whatever a rule says of the port."""
    script = """
import socket
server = socket.create_server(("127.0.0.1", 8080))
with socket.create_connection(("127.0.0.1", 8080), 20) as client:
    server.accept()[0].sendall(b"own")
    print(client.recv(3).decode())
"""
    mark = world.mark()

    assert "own\n" == limited.exec(["python3", "-c", script], timeout_s=60).stdout_text
    assert [] == world.left(mark)


@pytest.mark.parametrize("bound", ["a.test", "evil"])
def test_binding_to_somebody_elses_address_deceives_nobody(
    limited: Sandbox, world: World, bound: str
) -> None:
    """A source address of one's choice does not change what is asked for."""
    addresses = attempt(limited, "resolve", name="a.test")["addresses"]
    script = """
import socket, sys
sock = socket.socket()
sock.settimeout(4)
try:
    sock.bind((sys.argv[2], 0))
except OSError as exc:
    print("bind", exc.errno)
sock.connect((sys.argv[1], 80))
sock.sendall(b"GET /bound HTTP/1.1\\r\\nHost: evil.test\\r\\n\\r\\n")
print(sock.recv(15))
"""
    v4 = next(address for address in addresses if ":" not in address)
    source = v4 if "a.test" == bound else places.OTHER_V4
    mark = world.mark()

    limited.exec(["python3", "-c", script, v4, source], timeout_s=10)

    assert [] == world.left(mark, kind="request")


def _netlink(kind: int, flags: int, body: bytes) -> str:
    return (struct.pack("=IHHII", 16 + len(body), kind, flags | 5, 1, 0) + body).hex()


RTM_NEWLINK, RTM_NEWADDR, RTM_NEWROUTE, RTM_DELROUTE, RTM_NEWRULE = 16, 20, 24, 25, 32
CREATE = 0x600
_DEFAULT = struct.pack("=BBBBBBBBI", INET, 0, 0, 0, 254, 3, 0, 2, 0) + struct.pack("=HHI", 8, 4, 1)
CHANGES = {
    "a route": _netlink(RTM_NEWROUTE, CREATE, _DEFAULT),
    "no route": _netlink(RTM_DELROUTE, 0, _DEFAULT),
    "an address": _netlink(
        RTM_NEWADDR,
        CREATE,
        struct.pack("=BBBBI", INET, 32, 0, 0, 1) + struct.pack("=HH4s", 8, 2, b"\xcb\0q\n"),
    ),
    "a dummy device": _netlink(
        RTM_NEWLINK,
        CREATE,
        bytes(16)
        + struct.pack("=HH", 20, 18)
        + struct.pack("=HH", 9, 1)
        + b"dummy\0\0\0"
        + bytes(4),
    ),
    "lo down": _netlink(RTM_NEWLINK, 0, struct.pack("=BxHiII", 0, 0, 1, 0, 1)),
}


def test_the_tables_cannot_be_changed(limited: Sandbox) -> None:
    errors = attempt(limited, "netlink", messages=list(CHANGES.values()))["errors"]

    assert [] == [pair for pair in zip(CHANGES, errors, strict=True) if "EPERM" != pair[1]]


def test_the_filter_tables_cannot_be_reached(limited: Sandbox) -> None:
    netfilter = 12
    opened = attempt(limited, "sockets", kinds=[[16, RAW, netfilter], [16, DGRAM, netfilter]])[
        "opened"
    ]

    assert [] == opened


@pytest.mark.parametrize("network", ["none", "a.test"])
def test_there_is_no_interface_but_lo(make: MakeSandbox, network: str) -> None:
    found = attempt(make(network=network), "interfaces")

    assert ["lo"] == found["listed"]
    assert {"lo"} >= set(found["names"]) - {"sit0", "tunl0", "ip6tnl0", "gre0"}


def test_the_control_has_more_interfaces(unrestricted: Sandbox) -> None:
    assert "eth0" in attempt(unrestricted, "interfaces")["listed"]
