"""Routes and addresses of a network namespace's loopback interface: rtnetlink(7)."""

from __future__ import annotations

import _socket as socket
import _struct as struct

from . import netlink

# include/uapi/linux/rtnetlink.h, if_addr.h
RTM_NEWADDR, RTM_DELADDR, RTM_NEWROUTE, RTM_DELROUTE = 20, 21, 24, 25
_RTA_DST, _RTA_OIF, _RTA_PREFSRC = 1, 4, 7
_RT_TABLE_LOCAL, _RTPROT_STATIC, _RTN_LOCAL = 255, 4, 2
_RT_SCOPE_UNIVERSE, _RT_SCOPE_HOST = 0, 254
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_IFA_F_NODAD = 0x02  # IPv6: usable at once, not when a duplicate was looked for in vain
_LO = 1  # the first interface of every network namespace, made with it

_ROUTE = struct.Struct("=8BI")  # struct rtmsg
_ADDRESS = struct.Struct("=4BI")  # struct ifaddrmsg
_INDEX = struct.Struct("=I")


def local_route(kind: int, network: bytes, bits: int, source: bytes) -> tuple[int, bytes]:
    """Add (RTM_NEWROUTE) or remove a route that makes `network` addresses of this machine itself.

    Args:
        network: 4 or 16 bytes.
        source: The address that connections to it come from.

    Returns:
        The message's type and body.
    """
    family = socket.AF_INET if len(network) == 4 else socket.AF_INET6
    scope = _RT_SCOPE_HOST if family == socket.AF_INET else _RT_SCOPE_UNIVERSE
    head = _ROUTE.pack(family, bits, 0, 0, _RT_TABLE_LOCAL, _RTPROT_STATIC, scope, _RTN_LOCAL, 0)
    body = head + netlink.attribute(_RTA_OIF, _INDEX.pack(_LO))
    body += netlink.attribute(_RTA_PREFSRC, source)
    if bits:
        body += netlink.attribute(_RTA_DST, network)
    return kind, body


def address(kind: int, value: bytes) -> tuple[int, bytes]:
    """Give (RTM_NEWADDR) the loopback interface one address more, or take it away."""
    family = socket.AF_INET if len(value) == 4 else socket.AF_INET6
    head = _ADDRESS.pack(family, 8 * len(value), _IFA_F_NODAD, _RT_SCOPE_UNIVERSE, _LO)
    body = head + netlink.attribute(_IFA_LOCAL, value) + netlink.attribute(_IFA_ADDRESS, value)
    return kind, body


def batch(messages: list[tuple[int, bytes]]) -> tuple[bytes, int]:
    """Messages to send at once. Returns the bytes, and the number that is acknowledged."""
    last = len(messages)
    parts = []
    for number, (kind, body) in enumerate(messages, 1):
        new = kind in (RTM_NEWADDR, RTM_NEWROUTE)
        flags = netlink.NLM_F_CREATE | netlink.NLM_F_APPEND if new else 0
        acknowledge = netlink.NLM_F_ACK if number == last else 0
        parts.append(netlink.message(kind, flags | acknowledge, number, body))
    return b"".join(parts), last
