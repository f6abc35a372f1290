"""One container, seen from the host."""

from __future__ import annotations

import os
import time

from ...errors import ExecError, IoError
from ...model.state import State
from ...model.stats import SandboxStats
from ..local.contained import Changes, ContainedNetwork, ContainedSandbox
from . import groups

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ...launcher import wire
    from ...model.capabilities import Protection
    from ...model.session import ResolvedMount
    from ...model.spec import SandboxSpec
    from ..local.sizes import Sizes
    from ..local.trusted import Trusted
    from .backend import DockerBackend

_MODIFIED, _ADDED, _DELETED = 0, 1, 2  # of the engine's list of changes


class DockerSandbox(ContainedSandbox):
    """See `BackendSandbox`.

    Args:
        made_in: Directories that the engine has made for it, in memory.

    Attributes:
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
        ways: list[int],
        pid: int,
        container: Any,
        place: str,
        first_host_id: int,
        sizes: Sizes,
        made_in: list[str],
        trusted: Trusted | None,
    ) -> None:
        super().__init__(backend, spec, sandbox_id, uid, mounts, control, os.pidfd_open(pid))
        self.owner: DockerBackend = backend
        self.ways, self.pid, self.container, self.place = ways, pid, container, place
        self.first_host_id, self.sizes, self.made_in = first_host_id, sizes, made_in
        self.group = groups.Group(pid)
        self.network: ContainedNetwork = ContainedNetwork(self, trusted)

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

    def changes(self) -> Changes:
        """As the engine tells, which keeps the container's files, in whatever way."""
        from docker.errors import DockerException

        try:
            told = self.container.diff() or []
        except DockerException as exc:
            raise IoError(f"the engine does not say what was changed: {exc}") from exc
        kinds: dict[int, list[str]] = {_MODIFIED: [], _ADDED: [], _DELETED: []}
        for each in told:
            kinds[each["Kind"]].append(each["Path"])
        return Changes([*kinds[_MODIFIED], *kinds[_ADDED]], kinds[_DELETED], self.made_in)

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
        super()._let_go()
        self.owner.released(self)
