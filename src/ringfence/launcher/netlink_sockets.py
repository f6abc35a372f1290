"""Netlink sockets, which PID 1 makes for the programs of a sandbox, so that there are few of them.

What the kernel answers about the network waits in such a socket, and no memory limit counts it. A filter
has PID 1 asked for each one: it makes the socket and puts it into the program, or says that there are too
many. The kernel counts all that are open in the network namespace, also those passed on; as nobody but
PID 1 makes any, the count cannot change between the question and the answer.
Source: seccomp_unotify(2); net/core/sock.c, proto_seq_show.
"""

from __future__ import annotations

import _struct as struct
import errno
import posix as os

from ..linux import libc, seccomp

MOST = 64  # of some 208 KiB each, the default of net.core.rmem_default
_AF_NETLINK, _SOCK_CLOEXEC = 16, 0o2000000  # include/linux/socket.h, net.h
# include/uapi/linux/bpf_common.h
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
# struct seccomp_data: nr, arch, instruction_pointer, args[6]; the lower half of each comes first.
_NUMBER_AT, _ARCH_AT, _FAMILY_AT, _PROTOCOL_AT = 0, 4, 16, 32


def program(tag_key: int, verdict: int) -> bytes:
    """A filter that gives `verdict` to netlink sockets, and lets all else through.

    Args:
        tag_key: Who has its halves in the upper halves of family and protocol, which the kernel ignores,
            makes the socket: PID 1, under the same filter.
    """
    high, low = divmod(tag_key, 1 << 32)
    rows = [
        (_ARCH_AT, libc.AUDIT_ARCH),  # of another one, our main filter ends the process
        (_NUMBER_AT, libc.number("socket")),
        (_FAMILY_AT, _AF_NETLINK),
    ]
    code: list[tuple[int, int, int, int]] = []
    for i, (at, value) in enumerate(rows):
        code += [(_LOAD, 0, 0, at), (_JUMP_IF_EQUAL, 0, 2 * (len(rows) - i) + 3, value)]
    code += [(_LOAD, 0, 0, _FAMILY_AT + 4), (_JUMP_IF_EQUAL, 0, 2, high)]
    code += [(_LOAD, 0, 0, _PROTOCOL_AT + 4), (_JUMP_IF_EQUAL, 1, 0, low)]
    code += [(_RETURN, 0, 0, verdict), (_RETURN, 0, 0, seccomp.RET_ALLOW)]
    return b"".join(struct.pack("=HBBI", *each) for each in code)


def guard(tag_key: int, *, serves: bool) -> int:
    """Put the caller and all that it starts under that filter. Precondition: no_new_privs.

    Args:
        serves: The caller goes on as who makes them: see `NetlinkSockets`.

    Returns:
        The descriptor at which questions arrive; -1: there is none, and no netlink socket either.
    """
    if serves:
        try:
            return seccomp.install_listener(program(tag_key, seccomp.RET_USER_NOTIF))
        except OSError:
            pass  # a kernel before 5.14; or the filter of who runs us has a listener already
    refusal = seccomp.RET_ERRNO | errno.EAFNOSUPPORT
    seccomp.install_filter(program(tag_key, refusal))
    return -1


def count() -> int:
    """How many are open in our network namespace; more than there may be where that is not told."""
    with open("/proc/net/protocols", "rb") as file:
        for line in file:
            if line.startswith(b"NETLINK "):
                return int(line.split()[2])
    return 1 << 31


class NetlinkSockets:
    """Makes them for who asks.

    Args:
        listener_fd: Of `guard`.
        most: So many may be open in the network namespace.
    """

    def __init__(self, listener_fd: int, tag_key: int, most: int) -> None:
        self.listener_fd, self._tag_key, self._most = listener_fd, tag_key, most

    def serve_one(self) -> None:
        """Answer one question. Precondition: there is one to read."""
        try:
            asked = seccomp.receive(self.listener_fd)
        except OSError:
            return  # who asked has ended, or was interrupted
        try:
            self._make(asked)
        except OSError as exc:
            seccomp.refuse(self.listener_fd, asked, exc.errno or errno.EIO)

    def _make(self, asked: seccomp.Notification) -> None:
        family, kind, protocol = asked.arguments[:3]
        if count() >= self._most:
            raise OSError(errno.ENOBUFS, "too many netlink sockets")
        high, low = divmod(self._tag_key, 1 << 32)
        word = 0xFFFFFFFF
        made = libc.socket(high << 32 | family & word, kind & word, low << 32 | protocol & word)
        try:
            seccomp.put_descriptor(self.listener_fd, asked, made, kind & _SOCK_CLOEXEC)
        finally:
            os.close(made)
