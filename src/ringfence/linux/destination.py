"""Whom a client meant to reach before the kernel led it here: netfilter's original destination."""

from __future__ import annotations

import _socket as socket
import _struct as struct

SO_ORIGINAL_DST = 80  # include/uapi/linux/netfilter_ipv4.h; IP6T_SO_ORIGINAL_DST is 80 as well
_SOL_IPV6 = 41
_MAPPED = bytes(10) + b"\xff\xff"
_V4 = struct.Struct("!2xH4s8x")  # struct sockaddr_in: family, port, address
_V6 = struct.Struct("!2xH4x16s4x")  # struct sockaddr_in6: family, port, flow, address, scope


def destination(sock: socket.socket, peer: str) -> tuple[bytes, int]:
    """(address in network order, port) that a client meant.

    Args:
        peer: Its address, as accept(2) told: on a socket for both families, the kernel's answer for
            the other one would be about some other connection.

    Without an entry of the kernel's it is where the connection arrived: nothing led it here.
    """
    is_v4 = ":" not in peer or peer.startswith("::ffff:")
    level, form = (socket.IPPROTO_IP, _V4) if is_v4 else (_SOL_IPV6, _V6)
    try:
        port, address = form.unpack(sock.getsockopt(level, SO_ORIGINAL_DST, form.size))
    except OSError:  # ENOENT: not redirected
        host, port, *_ = sock.getsockname()
        return packed(host), port
    return plain(address), port


def plain(address: bytes) -> bytes:
    """IPv4 inside IPv6 is that IPv4 address."""
    return address[12:] if address.startswith(_MAPPED) and len(address) == 16 else address


def packed(text: str) -> bytes:
    """An address as text in network order."""
    if ":" in text:
        return plain(socket.inet_pton(socket.AF_INET6, text))
    return socket.inet_pton(socket.AF_INET, text)


def shown(address: bytes) -> str:
    """An address in network order as text."""
    return socket.inet_ntop(socket.AF_INET if len(address) == 4 else socket.AF_INET6, address)


def family_of(text: str) -> int:
    return socket.AF_INET6 if ":" in text else socket.AF_INET
