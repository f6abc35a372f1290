"""Who the agent and its children are: root inside, the guest's user for a moment, or that user for good."""

from __future__ import annotations

import os
import resource

from ..linux import mounts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# The agent's own file; beside it the program that writes down which ids it has, or, for a still, what
# there is to write.
AGENT, MAPPER = "agent", "map-ids"
_proc = -1  # a /proc that can be written to, where the one that everybody sees cannot
is_root = os.getuid() == 0  # whoever is may become other users


def look() -> None:
    """See again who we are: elsewhere we were somebody else."""
    global is_root
    is_root = os.getuid() == 0


class As:
    """Another user's effective ids for a moment: what the kernel refuses them, it refuses us."""

    def __init__(self, uid: int) -> None:
        self._uid = uid

    def __enter__(self) -> None:
        if not is_root:
            return
        os.setresgid(-1, self._uid, -1)
        os.setresuid(-1, self._uid, -1)

    def __exit__(self, *_exc: object) -> None:
        if not is_root:
            return
        os.setresuid(-1, 0, -1)
        os.setresgid(-1, 0, -1)


def become_root() -> None:
    """Root inside: a guest of another user, and without capabilities, cannot signal or trace us."""
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def become_for_good(uid: int) -> Callable[[], None]:
    def become() -> None:
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)

    return become


def keep_proc() -> None:
    """Keep what `prefer_for_oom` writes to, before /proc is made read-only."""
    global _proc
    _proc = mounts.open_tree("/proc", recursive=False)


def prefer_for_oom() -> None:
    """Where memory runs out it is a program of the guest's that dies, and not we."""
    place = "/proc/self/oom_score_adj" if _proc < 0 else "self/oom_score_adj"
    try:
        fd = os.open(place, os.O_WRONLY | os.O_CLOEXEC, dir_fd=None if _proc < 0 else _proc)
        os.write(fd, b"500")
        os.close(fd)
    except OSError:
        pass  # its kernel has none, or somebody has forbidden it


def keep_only(fds: list[int]) -> None:
    last = 3
    for fd in sorted(fds):
        os.closerange(last, fd)
        last = fd + 1
    os.closerange(last, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    null = os.open("/dev/null", os.O_RDWR)
    for standard in range(3):
        if standard not in fds:
            os.dup2(null, standard)
