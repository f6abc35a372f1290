"""Assignment of processes to execs where the guest has no cgroups of its own.

Every process of an exec carries the same hard RLIMIT_RTTIME, as the native backend's do. Without a filter
of ours nothing keeps a process from lowering it: who does is no longer told apart from others, and ends
with the sandbox, not with its exec.
"""

from __future__ import annotations

import os

from ..launcher import wire
from ..launcher.pid1 import processes


class Tags:
    is_alone = True

    def __init__(self, key: int) -> None:
        self._key = key

    def count(self) -> int:
        """How many processes there are now, without us."""
        return sum(not processes.is_zombie(pid) for pid in _others())

    def most(self) -> int:
        """How many there may be: nobody counts, so 0."""
        return 0

    def memory_bytes(self) -> int:
        """Add up the memory of all processes; shared memory counts once for each."""
        return sum(processes.resident_bytes(pid) for pid in self._all())

    def own_bytes(self) -> int:
        """Add it up with a closer look, which divides what forked processes share."""
        resident = {pid: processes.resident_bytes(pid) for pid in self._all()}
        return sum(processes.look_closer(resident).values())

    def _all(self) -> list[int]:
        return _others()

    def prepare(self) -> None:
        """Nothing."""

    def enter(self, number: int) -> None:
        """Carry the tag of one exec: what we start next has it too. Numbers grow, so it only falls."""
        processes.set_tag(self._key, processes.TAG_BASE - number)

    def leave(self) -> None:
        """Nothing: we are never counted among the members."""

    def members(self, number: int) -> list[int]:
        """The processes of one exec that have not ended."""
        wanted = processes.TAG_BASE - number
        return [pid for pid in _others() if tag_of(pid) == wanted and not processes.is_zombie(pid)]

    def cpu_ns(self, number: int) -> tuple[int, int]:
        """Return unknown values: nothing adds up the time of an exec."""
        del number
        return wire.UNKNOWN, wire.UNKNOWN

    def lacked_memory(self, number: int) -> bool:
        """Return False: the host's kernel does not report whether it killed a process for memory."""
        del number
        return False

    def remove(self, number: int) -> bool:
        """Forget an exec; false while it has members."""
        return not self.members(number)


def _others() -> list[int]:
    me = os.getpid()
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != me]


def tag_of(pid: int) -> int:
    for line in _lines(f"/proc/{pid}/limits"):
        if line.startswith("Max realtime timeout"):
            word = line.split()[4]
            return int(word) if word.isdigit() else 0
    return 0


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []
