"""One container, seen from the host."""

from __future__ import annotations

import os
import time

from ...errors import ExecError
from ...model.state import State
from ...model.stats import SandboxStats
from ..local.guest import GuestSandbox
from . import groups

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ...launcher import wire
    from ...model.capabilities import Protection
    from ...model.granted import SandboxCapabilities
    from ...model.session import ResolvedMount
    from ...model.spec import SandboxSpec
    from .backend import DockerBackend


class DockerSandbox(GuestSandbox):
    """See `BackendSandbox`.

    Attributes:
        pid: Of the container's PID 1, the agent, as the host sees it.
        first_host_id: Of ids that it shares with nobody; 0: it has the host's own.
    """

    def __init__(
        self,
        backend: DockerBackend,
        spec: SandboxSpec,
        sandbox_id: str,
        uid: int,
        mounts: list[ResolvedMount],
        control: wire.Socket,
        pid: int,
        container: Any,
        place: str,
        first_host_id: int,
    ) -> None:
        super().__init__(backend, spec, sandbox_id, uid, mounts, control, os.pidfd_open(pid))
        self.owner, self.pid, self.container, self.place = backend, pid, container, place
        self.first_host_id = first_host_id
        self.group = groups.Group(pid)

    def _read_stats(self, state: State) -> SandboxStats:
        pids = None
        if state in (State.PROVISIONED, State.RUNNING):
            pids = int(self.ask("usage")[0].split()[0])
        return SandboxStats(
            state=state,
            cpu_ns=self.group.cpu_ns(),
            memory_bytes=self.group.memory_bytes(),
            peak_memory_bytes=self.group.peak_memory_bytes(),
            pids=pids,
            uptime_s=time.monotonic() - self._created,
            execs=self._execs,
            degraded=self.owner.degraded(self.spec),
        )

    def oom_kills(self) -> int | None:
        return self.group.oom_kills()

    def protections(self) -> tuple[Protection, ...]:
        from .report import sandbox_protections

        return sandbox_protections(self)

    def granted(self) -> SandboxCapabilities:
        from ..local.guest_granted import granted

        return granted(self)

    def _freeze(self, frozen: bool) -> None:
        from docker.errors import DockerException

        try:
            self.container.pause() if frozen else self.container.unpause()
        except DockerException as exc:
            raise ExecError(f"{'pause' if frozen else 'unpause'}: {exc}") from exc

    def _end(self, was_suspended: bool) -> None:
        super()._end(was_suspended)
        if was_suspended:  # older kernels hold even SIGKILL back until the thaw
            from docker.errors import DockerException

            try:
                self.container.unpause()
            except DockerException:
                pass  # newer ones do not, and it is gone

    def _let_go(self) -> None:
        self.owner.released(self)
