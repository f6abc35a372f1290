"""The network: in a sandbox without one there is `lo`, and behind it nobody but itself."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct

from .kit import (
    BOTH,
    HOST,
    HOST_ROOT,
    HOST_USERNS,
    MOUNTED,
    NETWORK,
    NO_SECCOMP,
    PATIENCE_S,
    Outcome,
    attempt,
    call,
    cannot_open,
    escaped,
    first_escape,
    held,
    inconclusive,
    probe,
    read,
    said,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def _tcp(host: str, port: int) -> Outcome:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.settimeout(PATIENCE_S)
            sock.connect((host, port))
    except TimeoutError:
        return escaped(f"{host}:{port}: a packet left, and nobody answered")
    except OSError as exc:
        name = errno.errorcode.get(exc.errno or 0, str(exc))
        # Refused by a host that is not ours would mean that a packet went there and came back.
        if exc.errno == errno.ECONNREFUSED and not _is_loopback(host):
            return escaped(f"{host}:{port}: refused by somebody")
        return held(f"{host}:{port}: {name}")
    return escaped(f"{host}:{port}: connected")


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host in ("::1", "0.0.0.0", "::", "::ffff:127.0.0.1")


def _route(host: str) -> Outcome:
    """Test for a route to `host`: a datagram socket is connected, no packet is sent."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((host, 53))
            return escaped(f"a route to {host}, from {sock.getsockname()[0]}")
    except OSError as exc:
        return held(f"{host}: {errno.errorcode.get(exc.errno or 0, str(exc))}")


# -- the host itself --------------------------------------------------------------------------

_LOOPBACK = {
    "v4": "127.0.0.1",
    "v4-other": "127.3.2.1",
    "v4-any": "0.0.0.0",
    "v6": "::1",
    "v6-any": "::",
    "mapped": "::ffff:127.0.0.1",
}


def _listener(host: str, kind: str) -> Callable[[dict[str, Any]], Outcome]:
    def run(context: dict[str, Any]) -> Outcome:
        port = context["tcp"]["v6" if host in ("::1", "::") else "v4"]
        return _tcp(host, port) if port else inconclusive(f"the host has no {kind} to listen on")

    return run


for _name, _host in _LOOPBACK.items():
    probe(
        f"network.loopback-{_name}",
        "critical",
        NETWORK,
        where=BOTH if _name in ("v4", "v6") else "plain",
        about=f"A service that the host keeps to itself must not be reachable at {_host}.",
    )(_listener(_host, _name))


@probe("network.host-addresses", "critical", NETWORK)
def host_addresses(context: dict[str, Any]) -> Outcome:
    """The host must not be reachable at its own addresses."""
    outcomes = [_tcp(address, context["tcp"]["any"]) for address in context["addresses"]]
    return (
        first_escape(outcomes) if outcomes else inconclusive("the host has no address but loopback")
    )


@probe("network.udp-to-host", "high", NETWORK)
def udp_to_host(context: dict[str, Any]) -> Outcome:
    """A datagram service of the host must not be reachable."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(PATIENCE_S)
        try:
            sock.connect(("127.0.0.1", context["udp"]))
            sock.send(b"ping")
            answer = sock.recv(16)
        except TimeoutError:
            return inconclusive("nobody answers, and nobody refuses")
        except OSError as exc:
            return held(
                f"127.0.0.1:{context['udp']}: {errno.errorcode.get(exc.errno or 0, str(exc))}"
            )
        return escaped(f"127.0.0.1:{context['udp']}: answered {answer!r}")


# -- elsewhere --------------------------------------------------------------------------------

WITHOUT_MOUNTS = "the sandbox without mounts"
ROUTED = "the host's network, asked for by name, where it has a default route"
_ELSEWHERE = {
    "metadata": ("critical", "169.254.169.254", "The cloud's metadata service"),
    "metadata-v6": ("critical", "fd00:ec2::254", "The cloud's metadata service"),
    "public-resolver": ("high", "8.8.8.8", "A resolver outside, the quiet way out"),
    "nat-alias": ("critical", "10.0.2.2", "The host behind a user-mode network"),
    "docker-bridge": ("critical", "172.17.0.1", "The host behind a bridge"),
    "private-network": ("high", "192.168.1.1", "The private network"),
    "internet": ("high", "1.1.1.1", "The internet"),
    "internet-v6": ("high", "2606:4700:4700::1111", "The internet"),
    "multicast": ("medium", "224.0.0.251", "Neighbours on the network"),
    "broadcast": ("medium", "255.255.255.255", "Neighbours on the network"),
}


def _elsewhere(host: str) -> Callable[[dict[str, Any]], Outcome]:
    return lambda _context: _route(host)


for _name, (_severity, _host, _who) in _ELSEWHERE.items():
    _control = "none: the kernel asks for a permission first" if _name == "broadcast" else ROUTED
    probe(
        f"network.{_name}",
        _severity,
        _control,
        about=f"{_who} must not be reachable: there is no route to {_host}.",
    )(_elsewhere(_host))


@probe("network.names", "high", "none: a control would need a resolver that answers")
def names(_context: dict[str, Any]) -> Outcome:
    """No name outside may be resolved: a query is enough to carry secrets out."""
    socket.setdefaulttimeout(1)
    return attempt(lambda: socket.getaddrinfo("example.com", 80), "getaddrinfo of example.com")


@probe("network.interfaces", "high", NETWORK)
def interfaces(_context: dict[str, Any]) -> Outcome:
    """There must be no interface but lo."""
    found = sorted(name for _, name in socket.if_nameindex() if name != "lo")
    routes = read("/proc/net/route").decode().splitlines()[1:]
    if found or routes:
        return escaped(f"interfaces {found}, {len(routes)} routes")
    return held("only lo, no routes")


@probe("network.add-address", "high", HOST_USERNS)
def add_address(_context: dict[str, Any]) -> Outcome:
    """Interfaces must not be changeable, nor any made."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sHH4s8x", b"lo", socket.AF_INET, 0, socket.inet_aton("127.0.0.1"))
        return first_escape(
            [
                attempt(lambda: fcntl.ioctl(sock, 0x8916, request), "SIOCSIFADDR"),
                attempt(lambda: fcntl.ioctl(sock, 0x89A0, b"ringfence0"), "SIOCBRADDBR"),
            ]
        )


@probe("network.add-link", "high", HOST_USERNS)
def add_link(_context: dict[str, Any]) -> Outcome:
    """No interface may be made by netlink."""
    name = b"rf0\0"
    kind = struct.pack("=HH5s3x", 9, 1, b"dummy")
    attributes = (
        struct.pack("=HH", 4 + len(name), 3) + name + struct.pack("=HH", 4 + len(kind), 18) + kind
    )
    body = struct.pack("=BxHiII", 0, 0, 0, 0, 0) + attributes
    message = struct.pack("=IHHII", 16 + len(body), 16, 0x605, 1, 0) + body
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as sock:
        sock.settimeout(PATIENCE_S)
        sock.send(message)
        answer = sock.recv(4096)
    code = struct.unpack("=i", answer[16:20])[0]
    return escaped("RTM_NEWLINK: worked") if code == 0 else held(f"RTM_NEWLINK: {said(code)}")


@probe("network.network-settings", "medium", HOST_ROOT)
def network_settings(_context: dict[str, Any]) -> Outcome:
    """Network settings must not be writable."""
    paths = ("/proc/sys/net/ipv4/ip_unprivileged_port_start", "/proc/sys/net/ipv4/ping_group_range")
    return first_escape([cannot_open(path, os.O_WRONLY) for path in paths])


# -- families of sockets ----------------------------------------------------------------------

_STREAM, _DGRAM, _RAW, _SEQPACKET = 1, 2, 3, 5
# name, severity, control, (family, type, protocol) that must not be had
_SOCKETS: tuple[tuple[str, str, str, tuple[tuple[int, int, int], ...]], ...] = (
    ("raw", "high", HOST_ROOT, ((2, _RAW, 1), (2, _RAW, 255), (10, _RAW, 58))),
    ("packet", "high", HOST_ROOT, ((17, _RAW, 0x300), (17, _DGRAM, 0x300))),
    (
        "ping",
        "medium",
        "none: each host allows it to groups of its choice",
        ((2, _DGRAM, 1), (10, _DGRAM, 58)),
    ),
    ("vsock", "critical", NO_SECCOMP, ((40, _STREAM, 0), (40, _DGRAM, 0), (40, _SEQPACKET, 0))),
    ("crypto", "critical", NO_SECCOMP, ((38, _SEQPACKET, 0),)),
    ("netlink-audit", "high", NO_SECCOMP, ((16, _RAW, 9),)),
    ("netlink-netfilter", "high", NO_SECCOMP, ((16, _RAW, 12),)),
    ("netlink-uevent", "medium", NO_SECCOMP, ((16, _RAW, 15),)),
    ("netlink-generic", "high", NO_SECCOMP, ((16, _RAW, 16),)),
    ("netlink-diag", "medium", NO_SECCOMP, ((16, _RAW, 4),)),
    ("netlink-xfrm", "high", NO_SECCOMP, ((16, _RAW, 6),)),
    ("netlink-crypto", "high", NO_SECCOMP, ((16, _RAW, 21),)),
    ("mptcp", "high", NO_SECCOMP, ((2, _STREAM, 262), (10, _STREAM, 262))),
    ("sctp", "high", NO_SECCOMP, ((2, _STREAM, 132), (2, _SEQPACKET, 132))),
    ("udplite", "medium", NO_SECCOMP, ((2, _DGRAM, 136),)),
    ("dccp", "high", NO_SECCOMP, ((2, 6, 33),)),
    ("rxrpc", "high", NO_SECCOMP, ((33, _DGRAM, 2),)),
    ("xdp", "high", HOST_ROOT, ((44, _RAW, 0),)),
    ("key", "high", HOST_ROOT, ((15, _RAW, 2),)),
    ("bluetooth", "high", NO_SECCOMP, ((31, _RAW, 1), (31, _SEQPACKET, 0))),
    ("can", "high", NO_SECCOMP, ((29, _RAW, 1), (29, _DGRAM, 2))),
    ("tipc", "high", NO_SECCOMP, ((30, _DGRAM, 0), (30, _STREAM, 0))),
    ("rds", "high", NO_SECCOMP, ((21, _SEQPACKET, 0),)),
    ("kcm", "high", NO_SECCOMP, ((41, _DGRAM, 0), (41, _SEQPACKET, 0))),
    ("smc", "high", NO_SECCOMP, ((43, _STREAM, 0),)),
    ("qipcrtr", "high", NO_SECCOMP, ((42, _DGRAM, 0),)),
    ("mctp", "high", NO_SECCOMP, ((45, _DGRAM, 0),)),
    ("nfc", "high", NO_SECCOMP, ((39, _SEQPACKET, 0), (39, _RAW, 0))),
    ("phonet", "high", NO_SECCOMP, ((35, _DGRAM, 0),)),
    (
        "old-families",
        "medium",
        NO_SECCOMP,
        tuple((family, _DGRAM, 0) for family in (3, 4, 5, 6, 8, 9, 11, 12, 19, 24)),
    ),
)


def _family(kinds: tuple[tuple[int, int, int], ...]) -> Callable[[dict[str, Any]], Outcome]:
    def run(_context: dict[str, Any]) -> Outcome:
        outcomes = []
        for kind in kinds:
            result = call("socket", *kind)
            outcomes.append(
                escaped(f"socket{kind}") if result >= 0 else held(f"socket{kind}: {said(result)}")
            )
        return first_escape(outcomes)

    return run


for _name, _severity, _control, _kinds in _SOCKETS:
    probe(
        f"network.socket-{_name}",
        _severity,
        _control,
        about=f"No {_name} socket may be made: it reaches past the network, or into the kernel.",
    )(_family(_kinds))


@probe("network.unix-socket", "high", WITHOUT_MOUNTS, where=MOUNTED)
def unix_socket(_context: dict[str, Any]) -> Outcome:
    """With a host directory shown, no Unix datagram socket: sendmsg(2) could name any path."""
    outcomes = []
    for name, kind in (("DGRAM", _DGRAM), ("RAW", _RAW)):
        result = call("socket", 1, kind, 0)
        what = f"socket(AF_UNIX, SOCK_{name})"
        outcomes.append(
            escaped(f"{what}: worked") if result >= 0 else held(f"{what}: {said(result)}")
        )
    return first_escape(outcomes)


@probe("network.host-connections", "medium", HOST)
def host_connections(context: dict[str, Any]) -> Outcome:
    """The host's connections must not be listed."""
    port = f"{context['tcp']['v4']:04X}"
    for line in read("/proc/net/tcp", 1 << 20).decode().splitlines()[1:]:
        if line.split()[1].endswith(f":{port}"):
            return escaped("/proc/net/tcp lists the host's listener")
    return held("the host's listener is not listed")
