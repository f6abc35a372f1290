"""A sandbox in a program of its own, in a hull: counted by the host, and by the guest's kernel."""

from __future__ import annotations

import os
import time

from ...model.state import State
from ...model.stats import SandboxStats
from .guest import GuestSandbox
from .sandbox import InCgroup

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from .launched import Launched


class HulledSandbox(InCgroup, GuestSandbox):
    """The part of `BackendSandbox` that is the same for all of them.

    Attributes:
        keeper: Who has started the program, and can let somebody in to it.
    """

    keeper: Launched

    def _read_stats(self, state: State) -> SandboxStats:
        """The host's counters for all of the program; the guest's for what is inside."""
        pids = memory = disk = inodes = None
        if state in (State.PROVISIONED, State.RUNNING):
            pids, memory, disk, inodes = (int(word) for word in self.ask("usage")[0].split())
        return SandboxStats(
            state=state,
            cpu_ns=self.group.cpu_ns(),
            memory_bytes=memory if memory is not None else self.group.memory_bytes(),
            peak_memory_bytes=self.group.peak_memory_bytes(),
            pids=pids,
            disk_bytes=disk,
            inodes=inodes,
            uptime_s=time.monotonic() - self._created,
            execs=self._execs,
            degraded=self._degraded(),
        )

    def enter(self, op: str, request: Mapping[str, Any], fds: list[int]) -> tuple[bytes, list[int]]:
        """Let a helper of the keeper's go into the hull; see `launcher.aboard`.

        Raises:
            Refused: As the kernel told the helper.
            SandboxLost: The sandbox ended meanwhile.
        """
        pidfd = self.borrow_pidfd()
        try:
            return self.keeper.ask("enter", {"op": op, **request}, [pidfd, *fds], timeout_s=None)
        finally:
            os.close(pidfd)

    def _degraded(self) -> tuple[str, ...]:
        """Limits that were asked for, and do not hold."""
        asked = self.spec.limits.cpus and not self.group.holds_cpus
        return ("cpu_limit",) if asked else ()
