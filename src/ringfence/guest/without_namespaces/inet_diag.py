"""Which TCP sockets listen in a network namespace: sock_diag(7).

/proc/net/tcp answers the same by way of every bucket of the table of connections: 5 ms on a calm machine.
"""

from __future__ import annotations

import _socket as socket
import _struct as struct

from ...linux import netlink

_SOCK_DIAG = 4  # include/uapi/linux/netlink.h, NETLINK_SOCK_DIAG
_BY_FAMILY = 20  # include/uapi/linux/sock_diag.h, SOCK_DIAG_BY_FAMILY
_LISTEN = 10  # include/net/tcp_states.h
# struct inet_diag_sockid: ports, addresses, interface, cookie. Behind family, protocol and states, or
# behind family, state, timer and retransmissions.
_REQUEST = struct.Struct("=BB2xI2s2x4s28xI8s")
_REPLY = struct.Struct("=BB2x2s2x16s")
_HEADER = struct.Struct("=IHHII")
_NO_COOKIE = b"\xff" * 8
_MAPPED = bytes(10) + b"\xff\xff"


def find(place: bytes) -> Listeners | None:
    """Return who can be asked; None where no such socket is to be had, or the kernel has no CONFIG_INET_DIAG.

    Without it the kernel answers as of a socket that is not there: so one is made, at an own address of IPv4.
    """
    try:
        listeners = Listeners()
    except OSError:
        return None
    probe = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        probe.bind((socket.inet_ntoa(place), 0))
        probe.listen(1)
        if listeners.has(place, probe.getsockname()[1]):
            return listeners
    except OSError:
        pass
    finally:
        probe.close()
    listeners.close()
    return None


class Listeners:
    """Asks the kernel about single sockets.

    Raises:
        OSError: No such socket is to be had.
    """

    def __init__(self) -> None:
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
        self._sock = socket.socket(socket.AF_NETLINK, kind, _SOCK_DIAG)
        self._sock.connect((0, 0))

    def close(self) -> None:
        self._sock.close()

    def has(self, place: bytes, port: int) -> bool:
        """Return whether a socket listens at just that address of IPv4, itself of IPv4 or IPv6."""
        wanted = port.to_bytes(2, "big")
        request = _REQUEST.pack(
            socket.AF_INET, socket.IPPROTO_TCP, 1 << _LISTEN, wanted, place, 0, _NO_COOKIE
        )
        self._sock.send(netlink.message(_BY_FAMILY, 0, 1, request))
        body = self._sock.recv(4096)
        if _HEADER.unpack_from(body)[1] != _BY_FAMILY:
            return False
        # One that listens at every address is an answer as well.
        family, state, at, address = _REPLY.unpack_from(body, _HEADER.size)
        found = address[:4] if family == socket.AF_INET else address
        return (state, at) == (_LISTEN, wanted) and found in (place, _MAPPED + place)
