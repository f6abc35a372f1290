"""Unix sockets of a network namespace, and which are connected to which: sock_diag(7)."""

from __future__ import annotations

import _socket as socket
import _struct as struct

from . import netlink

_SOCK_DIAG = 4  # include/uapi/linux/netlink.h, NETLINK_SOCK_DIAG
_BY_FAMILY = 20  # include/uapi/linux/sock_diag.h, SOCK_DIAG_BY_FAMILY
_DUMP = 0x300  # NLM_F_ROOT | NLM_F_MATCH
_DONE, _ERROR = 3, 2
_SHOW_PEER, _SHOW_QUEUE = 4, 16  # include/uapi/linux/unix_diag.h
_PEER, _QUEUE = 2, 4
_REQUEST = struct.Struct("=BBHIII8x")  # struct unix_diag_req, without its cookie
_MESSAGE = struct.Struct("=BBBxI8x")  # struct unix_diag_msg, without its cookie
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_EVERY_STATE = 0xFFFFFFFF
_MOST_SOCKETS = 10_000


class UnixSocket:
    """A Unix socket.

    Attributes:
        kind: SOCK_STREAM, SOCK_DGRAM or SOCK_SEQPACKET.
        peer: Inode of the one that it is connected to; 0: none.
        waiting: What has come and was not read: bytes, of a listening one connections.
    """

    def __init__(self, kind: int) -> None:
        self.kind, self.peer, self.waiting = kind, 0, 0


def sockets() -> dict[int, UnixSocket]:
    """Return all of our network namespace, by inode.

    Raises:
        OSError: ENOENT where the kernel has no CONFIG_UNIX_DIAG.
    """
    found: dict[int, UnixSocket] = {}
    request = _REQUEST.pack(socket.AF_UNIX, 0, 0, _EVERY_STATE, 0, _SHOW_PEER | _SHOW_QUEUE)
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
    sock = socket.socket(socket.AF_NETLINK, kind, _SOCK_DIAG)
    try:
        sock.send(netlink.message(_BY_FAMILY, _DUMP, 1, request))
        while _read(sock.recv(1 << 16), found) and len(found) < _MOST_SOCKETS:
            continue
    finally:
        sock.close()
    return found


def _read(data: bytes, found: dict[int, UnixSocket]) -> bool:
    """Take the messages of one datagram; False: that was all."""
    at = 0
    while at + _HEADER.size <= len(data):
        size, kind, _flags, _number, _port = _HEADER.unpack_from(data, at)
        if kind == _DONE:
            return False
        if kind == _ERROR:
            (code,) = struct.unpack_from("=i", data, at + _HEADER.size)
            raise OSError(-code, "sock_diag of Unix sockets")
        _take(data[at + _HEADER.size : at + size], found)
        at += size + -size % 4
    return bool(data)


def _take(body: bytes, found: dict[int, UnixSocket]) -> None:
    _family, kind, _state, inode = _MESSAGE.unpack_from(body)
    each = found[inode] = UnixSocket(kind)
    at = _MESSAGE.size
    while at + _ATTRIBUTE.size <= len(body):
        size, name = _ATTRIBUTE.unpack_from(body, at)
        if size < _ATTRIBUTE.size:
            return
        if name in (_PEER, _QUEUE):
            (value,) = struct.unpack_from("=I", body, at + _ATTRIBUTE.size)
            if name == _PEER:
                each.peer = value
            else:
                each.waiting = value
        at += size + -size % 4
