"""Netlink sockets, of which PID 1 lets the programs of a sandbox have few.

What the kernel answers about the network waits in such a socket, and no memory limit counts it. A filter
has PID 1 asked for each one: it lets the call go on, or says that there are too many. The kernel counts
all that are open in the network namespace, also those passed on and those not yet bound.
Source: seccomp_unotify(2); net/core/sock.c, proto_seq_show.
"""

from __future__ import annotations

import errno

from ...linux import seccomp
from . import processes


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
        listener_fd: Of `notifications.guard`.
        most: So many may be open in the network namespace.
    """

    def __init__(self, listener_fd: int, most: int) -> None:
        self.listener_fd, self._most = listener_fd, most
        # By thread: how often it had been switched when it was let go on. PID 1 waits for nobody, so
        # the socket of one that has not run since is on its way, and counts before the kernel counts it.
        self._on_their_way: dict[int, bytes] = {}

    def answer(self, asked: seccomp.Notification) -> None:
        """Let a call go on, or say that there are too many."""
        self._on_their_way.pop(asked.pid, None)  # its last call is over
        if self._is_full():
            seccomp.answer(self.listener_fd, asked, errno.ENOBUFS)
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
    try:
        place = processes.directory(pid)
    except OSError:
        return b"not told"  # its socket then counts as on its way, until it asks for another one
    return processes.read(f"{place}/status").partition(b"\nvoluntary_ctxt_switches:")[2]
