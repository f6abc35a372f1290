"""Which addresses lead to this machine itself: rtnetlink(7)."""

from __future__ import annotations

import _socket as socket
import _struct as struct

# include/uapi/linux/netlink.h, rtnetlink.h
NETLINK_ROUTE = 0
SOL_NETLINK = 270
NETLINK_GET_STRICT_CHK = 12  # Linux 4.20: the kernel filters, not we
NLM_F_REQUEST, NLM_F_DUMP = 0x1, 0x300
NLMSG_ERROR, NLMSG_DONE = 2, 3
RTM_NEWROUTE, RTM_GETROUTE = 24, 26
RTN_LOCAL = 2
RT_TABLE_LOCAL = 255
RTA_DST = 1
RTMGRP_IPV4_ROUTE, RTMGRP_IPV6_ROUTE = 0x40, 0x400

_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_ROUTE = struct.Struct(
    "=8BI"
)  # rtmsg: family, dst_len, src_len, tos, table, protocol, scope, type, flags
_ATTRIBUTE = struct.Struct("=HH")  # rtattr: length, type
_RECEIVE_BYTES = 1 << 16


def watch_routes() -> socket.socket:
    """A non-blocking socket that becomes readable whenever a route comes or goes.

    Not addresses: the kernel tells of a new one before its route is there.
    Source: rtnetlink(7), RTMGRP_IPV4_ROUTE.
    """
    sock = _open(socket.SOCK_NONBLOCK)
    try:
        sock.bind((0, RTMGRP_IPV4_ROUTE | RTMGRP_IPV6_ROUTE))
    except BaseException:
        sock.close()
        raise
    return sock


def local_networks() -> list[tuple[bytes, int]]:
    """(address in network order, prefix length) of every route of type `local`.

    That is every address of every interface, the loopback networks, and whatever else an
    administrator has routed to this machine itself.

    Raises:
        OSError: The kernel refused.
    """
    found = []
    for family in (socket.AF_INET, socket.AF_INET6):
        sock = _open()
        try:
            found += _dump(sock, family)
        finally:
            sock.close()
    return found


def _open(flags: int = 0) -> socket.socket:
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | flags
    return socket.socket(socket.AF_NETLINK, kind, NETLINK_ROUTE)


def _dump(sock: socket.socket, family: int) -> list[tuple[bytes, int]]:
    try:
        sock.setsockopt(SOL_NETLINK, NETLINK_GET_STRICT_CHK, 1)
    except OSError:
        pass  # an old kernel sends every table
    body = _ROUTE.pack(family, 0, 0, 0, RT_TABLE_LOCAL, 0, 0, 0, 0)
    size = _HEADER.size + len(body)
    sock.send(_HEADER.pack(size, RTM_GETROUTE, NLM_F_REQUEST | NLM_F_DUMP, 1, 0) + body)
    found: list[tuple[bytes, int]] = []
    while True:
        data = sock.recv(_RECEIVE_BYTES)
        while data:
            size, kind, *_ = _HEADER.unpack_from(data)
            if kind == NLMSG_DONE:
                return found
            if kind == NLMSG_ERROR:
                (number,) = struct.unpack_from("=i", data, _HEADER.size)
                raise OSError(-number, "RTM_GETROUTE")
            if kind == RTM_NEWROUTE:
                found += _local(data[_HEADER.size : size], family)
            data = data[(size + 3) & ~3 :]


def _local(body: bytes, family: int) -> list[tuple[bytes, int]]:
    fields = _ROUTE.unpack_from(body)
    if fields[0] != family or fields[7] != RTN_LOCAL:
        return []
    address = bytes(4 if family == socket.AF_INET else 16)
    rest = body[_ROUTE.size :]
    while len(rest) >= _ATTRIBUTE.size:
        size, kind = _ATTRIBUTE.unpack_from(rest)
        if size < _ATTRIBUTE.size:
            break
        if kind == RTA_DST:
            address = rest[_ATTRIBUTE.size : size]
        rest = rest[(size + 3) & ~3 :]
    return [(address, fields[1])]
