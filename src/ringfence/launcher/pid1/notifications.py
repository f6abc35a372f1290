"""System calls of a sandbox that wait for PID 1: a first filter asks, and `Listener` answers.

It asks about netlink sockets, of which there may be few (`netlink_sockets`), and, where a directory of
the host is shown, about each connect(2) (`connects`). A process can have one filter that asks.
Source: seccomp_unotify(2).
"""

from __future__ import annotations

import _struct as struct
import errno

from ...linux import libc, seccomp
from .. import wire
from . import connects, netlink_sockets

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    Verdict = tuple[Sequence[tuple[int, ...]], int]

_AF_UNIX, _AF_NETLINK = 1, 16  # include/linux/socket.h
# include/uapi/linux/bpf_common.h
_LOAD, _JUMP_IF_EQUAL, _RETURN, _AND = 0x20, 0x15, 0x06, 0x54
# struct seccomp_data: nr, arch, instruction_pointer, args[6]; the lower half of each comes first.
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT, _KEY_AT = 0, 4, 16, 16 + 4 * 8
_FAMILY_AT = _FIRST_ARGUMENT_AT


def program(verdicts: Sequence[Verdict]) -> bytes:
    """A filter that gives each verdict to the calls whose words are as listed; all else passes.

    Args:
        verdicts: The first one that fits counts: where in struct seccomp_data, what is there, and, where
            not all of it counts, the mask that it is seen through.
    """
    code: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCH_AT),  # of another one, our main filter ends the process
        (_JUMP_IF_EQUAL, 1, 0, libc.AUDIT_ARCH),
        (_RETURN, 0, 0, seccomp.RET_ALLOW),
    ]
    for words, verdict in verdicts:
        block = [(_RETURN, 0, 0, verdict)]
        for at, value, *mask in reversed(words):
            block.insert(0, (_JUMP_IF_EQUAL, 0, len(block), value))
            block[:0] = [(_LOAD, 0, 0, at), *((_AND, 0, 0, each) for each in mask)]
        code += block
    code.append((_RETURN, 0, 0, seccomp.RET_ALLOW))
    return b"".join(struct.pack("=HBBI", *each) for each in code)


def guard(*, serves: bool, connect_key: int = 0, refused: Sequence[Verdict] = ()) -> int:
    """Put the caller and all that it starts under that filter. Precondition: no_new_privs.

    Args:
        serves: The caller goes on as who answers: see `Listener`.
        connect_key: Ask about connect(2) as well; PID 1's own calls carry this key. 0: do not ask.
        refused: More verdicts of this filter.

    Returns:
        The descriptor at which questions arrive; -1: there is none, no netlink socket, and, where
        connect(2) was to be asked about, no Unix socket either.
    """
    if serves:
        try:
            asked = [(_NETLINK, seccomp.RET_USER_NOTIF), *_asking(connect_key)]
            return seccomp.install_listener(program([*asked, *refused]))
        except OSError:
            pass  # a kernel before 5.5; or the filter of who runs us has a listener already
    unasked: list[Verdict] = [(_NETLINK, seccomp.RET_ERRNO | errno.EAFNOSUPPORT), *refused]
    if connect_key:
        unasked += _WITHOUT_UNIX
    seccomp.install_filter(program(unasked))
    return -1


def protect_agents() -> list[Verdict]:
    """Refuse the user id of agents to a root that may else become anybody in its user namespace."""
    calls = {"setuid": 1, "setreuid": 2, "setresuid": 3}
    return [
        _refusal(name, argument, wire.AGENT_UID)
        for name, arguments in calls.items()
        for argument in range(arguments)
    ]


def protect_scheduling(pid: int) -> list[Verdict]:
    """Refuse to have an agent wait behind what it must kill: the kernel compares effective ids."""
    calls = ("sched_setparam", "sched_setscheduler", "sched_setaffinity", "sched_setattr")
    by_pid = [_refusal(name, 0, pid) for name in calls]
    return [*by_pid, *(_refusal(name, 1, pid) for name in ("setpriority", "ioprio_set"))]


def _refusal(name: str, argument: int, value: int) -> Verdict:
    words = [(_NUMBER_AT, libc.number(name)), (_FIRST_ARGUMENT_AT + 8 * argument, value)]
    return words, seccomp.RET_ERRNO | errno.EPERM


def asking_in_copy(*, connects: bool) -> bytes:
    """The filter of a copied process, into which PID 1 cannot look: its Landlock domain is another one.

    Args:
        connects: PID 1 would connect for it: it gets no Unix socket then.
    """
    refused = _WITHOUT_UNIX if connects else []
    return program([(_NETLINK, seccomp.RET_USER_NOTIF), *refused])


_WITHOUT_UNIX: list[Verdict] = [
    (
        [(_NUMBER_AT, libc.number("socket")), (_FAMILY_AT, _AF_UNIX)],
        seccomp.RET_ERRNO | errno.EAFNOSUPPORT,
    ),
    ([(_NUMBER_AT, libc.number("pidfd_getfd"))], seccomp.RET_ERRNO | errno.EPERM),
]
_NETLINK = [(_NUMBER_AT, libc.number("socket")), (_FAMILY_AT, _AF_NETLINK)]


def _asking(key: int) -> list[tuple[list[tuple[int, int]], int]]:
    """Ask about connect(2), let nobody take descriptors of others; PID 1, with its key, may do both."""
    if not key:
        return []
    with_key = [(_KEY_AT, key & 0xFFFFFFFF), (_KEY_AT + 4, key >> 32)]
    calls = (("connect", seccomp.RET_USER_NOTIF), ("pidfd_getfd", seccomp.RET_ERRNO | errno.EPERM))
    verdicts = []
    for name, verdict in calls:
        number = (_NUMBER_AT, libc.number(name))
        verdicts += [([number, *with_key], seccomp.RET_ALLOW), ([number], verdict)]
    return verdicts


class Listener:
    """Answers each question.

    Args:
        fd: Of `guard`; -1: nobody asks.
        netlink_sockets: So many may be open in the network namespace.
        connect_key: Of `guard`.
    """

    def __init__(self, fd: int, most_netlink_sockets: int, connect_key: int = 0) -> None:
        self.fd = fd
        self._netlink = netlink_sockets.NetlinkSockets(fd, most_netlink_sockets)
        self.connects = connects.Connects(fd, connect_key) if connect_key and fd >= 0 else None

    def serve_one(self) -> None:
        """Answer one question. Precondition: there is one to read."""
        try:
            asked = seccomp.receive(self.fd)
        except OSError:
            return  # who asked has ended, or was interrupted
        if self.connects is not None and asked.number == libc.number("connect"):
            self.connects.answer(asked)
        else:
            self._netlink.answer(asked)
