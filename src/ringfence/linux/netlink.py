"""netlink(7): messages, and batches of them sent at once."""

from __future__ import annotations

import _socket as socket
import _struct as struct
import errno

# include/uapi/linux/netlink.h
NETLINK_ROUTE, NETLINK_NETFILTER = 0, 12
NLM_F_REQUEST, NLM_F_ACK = 0x1, 0x4
NLM_F_EXCL, NLM_F_CREATE, NLM_F_APPEND = 0x200, 0x400, 0x800
_NLMSG_ERROR = 2
_NLA_F_NESTED = 0x8000

_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr: length, type, flags, sequence, port
_ERROR = struct.Struct("=i")  # struct nlmsgerr: minus errno, then the header it is about
_ATTRIBUTE = struct.Struct("=HH")
_RECEIVE_BYTES = 1 << 16


def message(kind: int, flags: int, number: int, body: bytes) -> bytes:
    """Pack a message; the kernel's reply carries the same `number`."""
    return _HEADER.pack(_HEADER.size + len(body), kind, flags | NLM_F_REQUEST, number, 0) + body


def attribute(kind: int, payload: bytes) -> bytes:
    """Pack an attribute, padded to the four bytes that the next one needs."""
    size = _ATTRIBUTE.size + len(payload)
    return _ATTRIBUTE.pack(size, kind) + payload + bytes(-size % 4)


def nested(kind: int, *attributes: bytes) -> bytes:
    return attribute(kind | _NLA_F_NESTED, b"".join(attributes))


def send_batch(protocol: int, batch: bytes, last: int) -> list[tuple[int, int]]:
    """Send finished messages to one facility of this network namespace; all is done on return.

    Args:
        batch: Whole messages; only the one numbered `last` has NLM_F_ACK.

    Returns:
        The number and errno of each that was refused. In a batch of NETLINK_NETFILTER then none
        has had an effect; in one of NETLINK_ROUTE all the others have.

    Raises:
        OSError: Nothing could be sent; EPROTO if the kernel left `last` unanswered.

    Source: netlink(7). The kernel works during sendmsg(2), so its answers are there after it.
    """
    refused: list[tuple[int, int]] = []
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
    try:
        sock.send(batch)
        while not _read(sock.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT), last, refused):
            continue
    except BlockingIOError:
        # A transaction that failed has its errors answered, and nothing else.
        if not refused:
            raise OSError(errno.EPROTO, "netlink: no answer") from None
    finally:
        sock.close()
    return refused


def _read(answers: bytes, last: int, refused: list[tuple[int, int]]) -> bool:
    """Note what was refused; returns whether `last` was among the answered."""
    start, done = 0, False
    while start < len(answers):
        size, kind, _flags, number, _port = _HEADER.unpack_from(answers, start)
        if kind == _NLMSG_ERROR:
            code = -_ERROR.unpack_from(answers, start + _HEADER.size)[0]
            if code:
                refused.append((number, code))
            done = done or number == last
        start += max(size + -size % 4, _HEADER.size)
    return done
