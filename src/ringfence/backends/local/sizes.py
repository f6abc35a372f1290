"""Limits as they will be set, defaults filled in."""

from __future__ import annotations

import resource

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ...model.spec import SandboxSpec
    from .host.facts import Host

_MIB, _GIB = 1 << 20, 1 << 30
# Locked bytes, bytes of POSIX message queues, pending signals. Hosts allow a user 8 MiB, 800 KiB and
# a quarter of the processes that there may be.
_OF_ITS_OWN = 8 * _MIB, 800 * 1024, 4096
_OF_THE_CALLERS = 2 * _MIB, 200 * 1024, 1024
DEFAULT_PIDS = 512  # each with its open files: a sandbox must not use up the host's file table
DEFAULT_OPEN_FILES = 4096
_MOST_INODES = 1 << 18
DEFAULT_TERMINALS, _MOST_TERMINALS = 24, 256
_LARGEST_DEFAULT_DISK = 8 * _GIB
_DEFAULT_ON_DISK = 4 * _GIB  # reserved on the host's disk when the sandbox starts


def of_user(*, is_own: bool) -> dict[int, int]:
    """Limits of what the kernel counts for each user of the host, by their numbers.

    Args:
        is_own: The sandbox has a user of its own; else what it takes is missing to the caller. Source:
            getrlimit(2).
    """
    kinds = resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE, resource.RLIMIT_SIGPENDING
    return dict(zip(kinds, _OF_ITS_OWN if is_own else _OF_THE_CALLERS, strict=True))


class Sizes:
    """Limits as they will be set.

    Attributes:
        on_disk: The files do not count as memory.
    """

    def __init__(
        self,
        *,
        memory_bytes: int,
        disk_bytes: int,
        inodes: int,
        pids: int,
        open_files: int,
        on_disk: bool,
    ) -> None:
        self.memory_bytes, self.disk_bytes, self.inodes = memory_bytes, disk_bytes, inodes
        self.pids, self.open_files = pids, open_files
        self.on_disk = on_disk

    @property
    def terminals(self) -> int:
        """Most terminals: a 16th of the process limit where that exceeds its default; 0: the default."""
        return min(_MOST_TERMINALS, self.pids // 16) if self.pids > DEFAULT_PIDS else 0


def sizes(spec: SandboxSpec, host: Host, *, most_pids: int = DEFAULT_PIDS) -> Sizes:
    """Every limit, defaults filled in: half the memory, and files that fit into it.

    Args:
        most_pids: Of the default, where the backend cannot promise as many.
    """
    limits = spec.limits
    memory = limits.memory_bytes or host.memory_bytes // 2
    disk = limits.disk_bytes or min(_LARGEST_DEFAULT_DISK, host.memory_bytes // 4, memory // 4 * 3)
    if spec.disk_root:
        disk = limits.disk_bytes or _DEFAULT_ON_DISK
    return Sizes(
        memory_bytes=memory,
        disk_bytes=disk,
        inodes=limits.inodes or max(4096, min(_MOST_INODES, disk // 4096)),
        pids=limits.pids or min(DEFAULT_PIDS, most_pids),
        open_files=limits.open_files or DEFAULT_OPEN_FILES,
        on_disk=spec.disk_root or disk > memory,
    )
