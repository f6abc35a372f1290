"""Users of the agent and its children: root inside, the guest's user for a moment, or that user for good."""

from __future__ import annotations

import os
import resource

from ..linux import mounts, privileges

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# The agent's own file; beside it the program that writes down which ids it has, or, for a process image, what
# there is to write.
AGENT, MAPPER = "agent", "map-ids"
score_fd = (
    -1
)  # of our own file that says how likely the kernel kills us for memory: see `keep_score`
is_root = os.getuid() == 0  # whoever is may become other users
confine: Callable[[], None] | None = None  # called in the child of each exec, before its program
# Opens the master and the slave of a terminal, given rows and columns, where the agent itself may not.
new_terminal: Callable[[int, int], tuple[int, int]] | None = None
fork: Callable[[], int] = os.fork  # how the agent forks


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
        if not is_root:
            return  # there is one user; its group may have another number
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)

    return become


def keep_score(*, walled: bool) -> None:
    """Keep hold of how likely we die where memory runs out, before /proc is made read-only.

    Of that one file: a directory could be entered, by a link of the guest's to our /proc/self/fd, as the one
    to start a program in (CVE-2024-21626).
    """
    global score_fd
    try:
        # Else it belongs to the root of whoever made our user namespace; no program runs yet.
        privileges.set_dumpable(True)
        # By a mount of its own: one with a file that is open for writing cannot be made read-only.
        # With all below: the kernel copies no mount without those that LXC has locked on it.
        proc = mounts.open_tree("/proc") if walled else -1
        try:
            where = "self/oom_score_adj" if walled else "/proc/self/oom_score_adj"
            how = os.O_RDWR | os.O_CLOEXEC
            score_fd = os.open(where, how, dir_fd=proc if walled else None)
        finally:
            if walled:
                os.close(proc)
    except OSError:
        score_fd = -1  # its kernel has none, or somebody has forbidden it


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
