"""Netlink sockets, of which PID 1 lets the programs of a sandbox have few.

What the kernel answers about the network waits in such a socket, and no memory limit counts it. A filter
has PID 1 asked for each one: it lets the call go on, or says that there are too many. The kernel counts
all that are open in the network namespace, also those passed on and those not yet bound.
Source: seccomp_unotify(2); net/core/sock.c, proto_seq_show.
"""

from __future__ import annotations

import _struct as struct
import errno

from ..linux import libc, seccomp
from . import processes

MOST = 64  # of some 208 KiB each, the default of net.core.rmem_default
_AF_NETLINK = 16  # include/linux/socket.h
# include/uapi/linux/bpf_common.h
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
# struct seccomp_data: nr, arch, instruction_pointer, args[6]; the lower half of each comes first.
_NUMBER_AT, _ARCH_AT, _FAMILY_AT = 0, 4, 16


def program(verdict: int) -> bytes:
    """A filter that gives `verdict` to netlink sockets, and lets all else through."""
    tests = [
        (_ARCH_AT, libc.AUDIT_ARCH),  # of another one, our main filter ends the process
        (_NUMBER_AT, libc.number("socket")),
        (_FAMILY_AT, _AF_NETLINK),  # of a C int the kernel ignores the upper half
    ]
    code: list[tuple[int, int, int, int]] = []
    for i, (at, value) in enumerate(tests):
        code += [(_LOAD, 0, 0, at), (_JUMP_IF_EQUAL, 0, 2 * (len(tests) - i) - 1, value)]
    code += [(_RETURN, 0, 0, verdict), (_RETURN, 0, 0, seccomp.RET_ALLOW)]
    return b"".join(struct.pack("=HBBI", *each) for each in code)


def guard(*, serves: bool) -> int:
    """Put the caller and all that it starts under that filter. Precondition: no_new_privs.

    Args:
        serves: The caller goes on as who answers, and makes no such socket itself: see `NetlinkSockets`.

    Returns:
        The descriptor at which questions arrive; -1: there is none, and no netlink socket either.
    """
    if serves:
        try:
            return seccomp.install_listener(program(seccomp.RET_USER_NOTIF))
        except OSError:
            pass  # a kernel before 5.5; or the filter of who runs us has a listener already
    seccomp.install_filter(program(seccomp.RET_ERRNO | errno.EAFNOSUPPORT))
    return -1


def count() -> int:
    """How many are open in our network namespace; more than there may be where that is not told."""
    with open("/proc/net/protocols", "rb") as file:
        for line in file:
            if line.startswith(b"NETLINK "):
                return int(line.split()[2])
    return 1 << 31


class NetlinkSockets:
    """Answers who asks for one.

    Args:
        listener_fd: Of `guard`.
        most: So many may be open in the network namespace.
    """

    def __init__(self, listener_fd: int, most: int) -> None:
        self.listener_fd, self._most = listener_fd, most
        # By thread: how often it had been switched when it was let go on. PID 1 waits for nobody, so
        # the socket of one that has not run since is on its way, and counts before the kernel counts it.
        self._on_their_way: dict[int, bytes] = {}

    def serve_one(self) -> None:
        """Answer one question. Precondition: there is one to read."""
        try:
            asked = seccomp.receive(self.listener_fd)
        except OSError:
            return  # who asked has ended, or was interrupted
        self._on_their_way.pop(asked.pid, None)  # its last call is over
        if self._is_full():
            seccomp.refuse(self.listener_fd, asked, errno.ENOBUFS)
            return
        self._on_their_way[asked.pid] = switches(asked.pid)
        seccomp.go_on(self.listener_fd, asked)

    def _is_full(self) -> bool:
        # First those on their way: what arrives meanwhile counts twice, and never not at all.
        if len(self._on_their_way) + count() < self._most:
            return False
        waiting = self._on_their_way.items()
        self._on_their_way = {
            pid: before for pid, before in waiting if switches(pid) == before > b""
        }
        return len(self._on_their_way) + count() >= self._most


def switches(pid: int) -> bytes:
    """How often a thread has given up its processor, or lost it: proc(5), status; empty when it is gone."""
    return processes.read(f"/proc/{pid}/status").partition(b"\nvoluntary_ctxt_switches:")[2]
