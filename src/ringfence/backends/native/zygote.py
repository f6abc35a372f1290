"""The host's side of the zygote."""

from __future__ import annotations

import os
import select

from ...errors import SandboxLost
from ...launcher import cgroups
from ...launcher.spawn import ZYGOTE
from ..local.host import owner
from ..local.launched import Launched

_MOST_UNREAD = 512  # more than its socket holds
_AT_ONCE = 64  # forgotten together: each one alone would move all the others
TYPE_CHECKING = False
if TYPE_CHECKING:
    from ...launcher.spawn import Started


class Zygote(Launched):
    """A zygote process of this process; see `Launched`."""

    def __init__(self, started: Started | None = None, *, outlives: bool = False) -> None:
        super().__init__("zygote", ZYGOTE, started, outlives=outlives)
        self._told: list[tuple[str, tuple[str, ...]]] = []  # what it was asked to clear up, lately
        self._started, self._label = 0, ""
        self._watched = select.epoll()
        self._watched.register(self._pidfd, select.EPOLLIN)
        self.alarm_fd = -1

    @property
    def started(self) -> int:
        """When it did: see `owner.start_time`."""
        self._started = self._started or owner.start_time(self.pid)
        return self._started

    @property
    def label(self) -> str:
        self._label = self._label or owner.label(self.pid, self.started)
        return self._label

    def watch(self, fd: int) -> None:
        """Have `wait_or_hear` return when the other end of this socket closes."""
        try:
            self._watched.register(fd, 0)
        except ValueError:
            pass  # we have ended ourselves, and all others with us

    def unwatch(self, fd: int) -> None:
        try:
            self._watched.unregister(fd)
        except (ValueError, FileNotFoundError):
            pass

    def set_alarm(self, after_s: float) -> None:
        """Have `wait_or_hear` return `alarm_fd` then.

        Raises:
            OSError: There is no descriptor for it.
        """
        from ...linux import timers

        if self.alarm_fd < 0:
            self.alarm_fd = timers.timerfd()
            self._watched.register(self.alarm_fd, select.EPOLLIN | select.EPOLLET)
        timers.settime(self.alarm_fd, after_s)

    def wait_or_hear(self) -> list[int]:
        """Wait until it ends, a watched socket does, or the alarm comes.

        Returns these descriptors; none: it has ended.
        """
        while not (found := self._watched.poll()):
            continue
        ready = [fd for fd, _ in found]
        return [] if self._pidfd in ready else ready

    def release(self) -> None:
        super().release()
        self._watched.close()
        if self.alarm_fd >= 0:
            os.close(self.alarm_fd)
            self.alarm_fd = -1

    def clear_up(self, sandbox_id: str, directories: list[str], fds: list[int]) -> None:
        """Have it remove the cgroups of a sandbox that is no more, and close its copies of `fds`.

        It does so soon, and before anything else that it is told; where it is gone, it is done here.
        """
        try:
            self._tell_of("release", sandbox_id, directories, fds)
        except SandboxLost:
            cgroups.remove(directories)

    def drop(self, sandbox_id: str, directories: list[str]) -> None:
        """Have it end a prebuilt sandbox, before anything else that it is told.

        Raises:
            SandboxLost: It is gone.
        """
        self._tell_of("drop", sandbox_id, directories, [])

    def _tell_of(self, verb: str, sandbox_id: str, directories: list[str], fds: list[int]) -> None:
        self._told.append((sandbox_id, tuple(directories)))
        if len(self._told) >= _MOST_UNREAD + _AT_ONCE:
            del self._told[:_AT_ONCE]
        self.note(verb, sandbox_id, fds)

    def finish(self, living: set[str]) -> None:
        """It has died: clear up what it was asked to, for it may not have read that any more.

        Args:
            living: Ids that have been given again since.
        """
        for sandbox_id, directories in self._told:
            if sandbox_id not in living:
                cgroups.remove(list(directories))
