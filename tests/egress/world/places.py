"""The world's map: its names, addresses and ports, as its DNS server and its servers know them."""

from __future__ import annotations

# The host's own place in the world, and its way out.
HOST_V4, GATEWAY_V4, LINK_V4 = "198.51.100.254", "198.51.100.253", 30
HOST_V6, GATEWAY_V6, LINK_V6 = "2001:db8:ff::2", "2001:db8:ff::1", 64
LAN_V4 = "10.77.0.1"
"""A second address of the host's own, private."""

DNS_V4 = "198.51.100.53"
METADATA_V4, METADATA_V6 = "169.254.169.254", "fd00:ec2::254"
BLACK_HOLE_V4, BLACK_HOLE_V6 = "203.0.113.66", "2001:db8:0:66::1"
"""What is sent there is lost: a connection waits until its caller gives up."""

WEB_V4, WEB_V6 = "203.0.113.10", "2001:db8::10"
OTHER_V4, OTHER_V6 = "203.0.113.200", "2001:db8::200"

# Ports on which every address of the internet answers, each with the protocol spoken there.
HTTP_PORTS = (80, 8080)
HTTPS_PORTS = (443, 8443)
EARLY = "203.0.113.80"
"""Here a server that speaks first is on the ports of HTTP and HTTPS instead."""
ECHO, DISCARD, SOURCE, BANNER, SMTP, DNS = 7, 9, 19, 22, 25, 53
"""Echo (TCP and UDP), a sink, a source of endless bytes, two that speak first, DNS (TCP and UDP)."""
QUIC = 443  # UDP

HOST_PORT = 8000
"""Only the host's loopback, v4 and v6: HTTP on TCP, an echo on UDP."""
HOST_PORT_EVERYWHERE = 8001
"""HTTP on every address of the host's own."""

SERVER_UID = 54321
"""Who servers run as that refuse to be root."""

Records = dict[str, list[str]]
_WEB: Records = {"A": [WEB_V4], "AAAA": [WEB_V6]}
_OTHER: Records = {"A": [OTHER_V4], "AAAA": [OTHER_V6]}


def _both(number: int) -> Records:
    return {"A": [f"203.0.113.{number}"], "AAAA": [f"2001:db8::{number}"]}


SPECIAL: dict[str, Records] = {
    "loopback.test": {"A": ["127.0.0.1"]},
    "loopback6.test": {"AAAA": ["::1"]},
    "zero.test": {"A": ["0.0.0.0"]},
    "zero6.test": {"AAAA": ["::"]},
    "private.test": {"A": ["10.0.0.5"]},
    "private172.test": {"A": ["172.16.0.5"]},
    "private192.test": {"A": ["192.168.1.5"]},
    "cgnat.test": {"A": ["100.64.0.5"]},
    "linklocal.test": {"A": ["169.254.1.5"]},
    "metadata.test": {"A": [METADATA_V4]},
    "metadata6.test": {"AAAA": [METADATA_V6]},
    "ula.test": {"AAAA": ["fc00::5"]},
    "mapped.test": {"AAAA": ["::ffff:127.0.0.1"]},
    "mapped-private.test": {"AAAA": ["::ffff:10.0.0.5"]},
    "compatible.test": {"AAAA": ["::10.0.0.5"]},
    "nat64.test": {"AAAA": ["64:ff9b::10.0.0.5"]},
    "nat64-local.test": {"AAAA": ["64:ff9b:1::10.0.0.5"]},
    "sixtofour.test": {"AAAA": ["2002:a00:5::1"]},
    "teredo.test": {"AAAA": ["2001:0:a00:5::1"]},
    "benchmark.test": {"A": ["198.18.0.5"]},
    "multicast.test": {"A": ["224.0.0.5"]},
    "broadcast.test": {"A": ["255.255.255.255"]},
    "reserved.test": {"A": ["240.0.0.5"]},
    "host.test": {"A": [HOST_V4]},
    "host6.test": {"AAAA": [HOST_V6]},
    "lan.test": {"A": [LAN_V4]},
    "cname-private.test": {"CNAME": ["private.test"]},
}
"""Public names for what must not be reached by name: only a rule with an address may allow it."""

# `*.` stands for any number of labels. A list of several sets is answered in turn, the last one for
# good: see `rebind.test`.
ZONE: dict[str, Records | list[Records]] = {
    # Many names on one address, as behind a content delivery network.
    **dict.fromkeys(("a.test", "www.a.test", "deep.www.a.test", "b.test", "c.test"), _WEB),
    **dict.fromkeys(("plain.test", "untrusted.test", "wrongname.test", "1.test"), _WEB),
    "*.wild.test": _WEB,
    "v4.test": {"A": [WEB_V4]},
    "v6.test": {"AAAA": [WEB_V6]},
    "cname.test": {"CNAME": ["a.test"]},
    # Programs' servers.
    "git.test": _both(20),
    "pypi.test": _both(30),
    "npm.test": _both(40),
    "db.test": _both(50),
    "ssh.test": _both(60),
    "echo.test": _both(70),
    "early.test": {"A": [EARLY]},
    # What no test's policy allows.
    **dict.fromkeys(("evil.test", "nota.test", "a.test.evil.test", "*.tunnel.test"), _OTHER),
    # Resolvers that are slow, broken, or lie.
    "slow.test": _WEB,  # after SLOW_S
    "silent.test": {},  # never
    "servfail.test": {},
    "rebind.test": [{"A": [WEB_V4]}, {"A": ["127.0.0.1"]}],
    "mixed.test": {"A": [WEB_V4, "127.0.0.1"]},
    # Hosts that do not answer.
    "blackhole.test": {"A": [BLACK_HOLE_V4], "AAAA": [BLACK_HOLE_V6]},
    "half.test": {"A": [BLACK_HOLE_V4, WEB_V4]},
    **SPECIAL,
}
SLOW_S = 2.0

HOSTS_FILE = f"""127.0.0.1 localhost
::1 localhost ip6-localhost
{WEB_V4} filed.test
{WEB_V6} filed.test
127.0.0.1 filed-loopback.test
"""
