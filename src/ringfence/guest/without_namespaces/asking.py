"""System calls of a sandbox without namespaces that wait for the agent: a first filter asks."""

from __future__ import annotations

import errno

from ...launcher.pid1 import connects, notifications
from ...linux import seccomp
from .shared_memory import ASKED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    from .forks import Forks
    from .metadata import Metadata
    from .shared_memory import Segments, SharedMemory
    from .sockets import Sockets

    Words = list[tuple[int, ...]]

# struct seccomp_data: nr, args[0]; the key of the agent's own calls is in args[4], in args[5] of metadata
# and forks.
_NUMBER_AT, _FAMILY_AT, _KEY_AT, _METADATA_KEY_AT = 0, 16, 16 + 4 * 8, 16 + 5 * 8
_AT_FDCWD = -100 & 0xFFFFFFFF
_INET = (2, 10)  # AF_INET, AF_INET6: the other families ask nobody


def guard(
    metadata: Iterable[int],
    sockets: dict[int, str],
    shared: dict[int, str],
    segments: Iterable[int],
    scheduling: Iterable[int],
    forks: Iterable[int],
    key: int,
) -> int:
    """Put the caller and all that it starts under that filter. Precondition: no_new_privs.

    Args:
        metadata: Numbers of calls about metadata; each is EPERM where nobody can be asked.
        sockets: Numbers of calls about sockets, with their names: likewise.
        shared: Numbers of calls that may be about shared memory: where nobody can be asked, the kernel
            refuses those.
        segments: Numbers of calls about System V shared memory: as those about sockets.
        scheduling: Numbers of calls that read how a thread is scheduled: EPERM for others than the caller.
        forks: Numbers of calls that make a process: the kernel does them where nobody can be asked.

    Returns:
        The descriptor at which questions arrive; -1: a filter above has a listener.
    """
    own: list[tuple[Words, int]] = []
    asked: list[Words] = []
    for number in metadata:
        own.append(([(_NUMBER_AT, number), *_halves(_METADATA_KEY_AT, key)], seccomp.RET_ALLOW))
        asked.append([(_NUMBER_AT, number)])
    for number, name in sockets.items():
        own.append(([(_NUMBER_AT, number), *_halves(_KEY_AT, key)], seccomp.RET_ALLOW))
        families = _INET if name == "socket" else ()
        asked += [[(_NUMBER_AT, number), (_FAMILY_AT, family)] for family in families]
        if name != "socket":
            asked.append([(_NUMBER_AT, number)])
    for number in segments:
        own.append(([(_NUMBER_AT, number), *_halves(_KEY_AT, key)], seccomp.RET_ALLOW))
        asked.append([(_NUMBER_AT, number)])
    for number in scheduling:
        own.append(([(_NUMBER_AT, number), (_FAMILY_AT, 0)], seccomp.RET_ALLOW))
        asked.append([(_NUMBER_AT, number)])
    unlimited: list[Words] = []
    for number in forks:
        own.append(([(_NUMBER_AT, number), *_halves(_METADATA_KEY_AT, key)], seccomp.RET_ALLOW))
        unlimited.append([(_NUMBER_AT, number)])
    opens: list[Words] = []
    for number, name in shared.items():
        flags_at = _FAMILY_AT + (16 if name.endswith("at") else 8)
        # The agent's own calls name another directory, with absolute paths (`looking.NO_DIRECTORY`).
        call = [(_NUMBER_AT, number), *([(_FAMILY_AT, _AT_FDCWD)] if name.endswith("at") else [])]
        asks: list[Words] = [[(flags_at, *flags)] for flags in ASKED]
        opens += [[*call, *each] for each in (asks if "open" in name else [[]])]
    try:
        asking = [(words, seccomp.RET_USER_NOTIF) for words in [*asked, *unlimited, *opens]]
        return seccomp.install_listener(notifications.program([*own, *asking]))
    except OSError:
        refused = [(words, seccomp.RET_ERRNO | errno.EPERM) for words in asked]
        seccomp.install_filter(notifications.program([*own, *refused]))
        return -1


def _halves(at: int, key: int) -> Words:
    return [(at, key & 0xFFFFFFFF), (at + 4, key >> 32)]


class Questions:
    """Hands each question to its part, as a listener of the agent.

    Args:
        fd, scheduling: Of `guard`.
        is_member: Tells whether a thread is the sandbox's.
    """

    def __init__(
        self,
        fd: int,
        metadata: Metadata,
        sockets: Sockets,
        shared: SharedMemory,
        segments: Segments,
        scheduling: Container[int],
        is_member: Callable[[int], bool],
        forks: Forks,
    ) -> None:
        self.fd, self._metadata, self._sockets, self._shared = fd, metadata, sockets, shared
        self._segments = segments
        self._scheduling, self._is_member, self._forks = scheduling, is_member, forks

    def serve_one(self) -> None:
        """Answer one question. Precondition: there is one to read."""
        try:
            asked = seccomp.receive(self.fd)
        except OSError:
            return  # the caller has ended, or was interrupted
        if asked.number in self._forks.calls:
            self._forks.serve(asked)
        elif asked.number in self._sockets.network["calls"]:
            self._sockets.serve(asked)
        elif asked.number in self._shared.calls:
            self._shared.serve(asked)
        elif asked.number in self._segments.calls:
            self._segments.serve(asked)
        elif asked.number in self._scheduling:
            # A number in a register: nothing can change it meanwhile.
            if self._is_member(connects.signed(asked.arguments[0])):
                seccomp.go_on(self.fd, asked)
            else:
                seccomp.answer(self.fd, asked, errno.EPERM)
        else:
            self._metadata.serve(asked)
