"""The limit of processes where no cgroup and no RLIMIT_NPROC holds it: each fork waits for the agent.

RLIMIT_NPROC counts all processes of a user on the host, and those of root not at all.
"""

from __future__ import annotations

import errno

from ...linux import namespaces, seccomp

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container


class Forks:
    """Lets a program fork while the sandbox has fewer processes and threads than it may have.

    Between two counts only forks are counted, so that processes that end make no room before the next. Calls
    that were let through and have not been made yet are in no count: each is of a thread that is, so that there
    are never more than twice as many. The watchdog ends those.

    Args:
        fd: Of `asking.guard`.
        calls: Numbers of calls that make a process or a thread.
        key: That of the agent's own calls.
        count: How many processes and threads there are, with those that nobody has waited for.
    """

    def __init__(
        self, fd: int, calls: Container[int], key: int, most: int, count: Callable[[], int]
    ) -> None:
        self._fd, self.calls, self._key, self._most, self._count = fd, calls, key, most, count
        self._room = 0

    def serve(self, asked: seccomp.Notification) -> None:
        """Answer one call: that it may be made, or EAGAIN, as the kernel's limits do."""
        if self._room <= 0:
            self._room = self._most - self._count()
        if self._room <= 0:
            seccomp.answer(self._fd, asked, errno.EAGAIN)
            return
        self._room -= 1
        # The decision is about no argument: nothing that changes meanwhile matters.
        seccomp.go_on(self._fd, asked)

    def fork(self) -> int:
        """Fork the agent, which cannot wait for its own answer."""
        self._room -= 1
        return namespaces.fork_with(self._key)
