"""A sandbox under a launcher, seen from the host."""

from __future__ import annotations

import os
import signal
import subprocess
import time

from ...errors import Unsupported
from ...guest.isolation import NAMESPACES
from ...launcher.cgroups import remove
from ...model import capabilities as can
from ...model.state import State
from ...model.stats import SandboxStats
from ..local.agents.contained import AGENT, Changes, ContainedNetwork, ContainedSandbox
from ..local.host.facts import host
from ..local.sandbox import InCgroup
from ..local.sizes import sizes

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from ...launcher import wire
    from ...model.session import ResolvedMount, Snapshot
    from ...model.spec import SandboxSpec
    from ...snapshots.catalogue import Catalogue
    from ..local.host.cgroups import Group
    from ..local.mounts.trusted import Trusted
    from ..local.protections import Reader
    from .backend import CommandBackend
    from .place import Place

_PATIENCE_S = 10.0
NO_STOP = "suspend and snapshot need a cgroup to freeze the processes, and none is usable here"
_OTHERS = ("/dev", "/proc", "/sys", "/etc", AGENT)


class CommandSandbox(InCgroup, ContainedSandbox):
    """See `BackendSandbox`.

    Attributes:
        pid: Of the agent, as the host sees it.
        launcher: The process that was started; it may be another.
    """

    def __init__(
        self,
        backend: CommandBackend,
        spec: SandboxSpec,
        sandbox_id: str,
        uid: int,
        mounts: list[ResolvedMount],
        control: wire.Socket,
        namespace_fds: list[int],
        first: int,
        pid: int,
        inodes: dict[str, int] | None,
        launcher: subprocess.Popen[bytes],
        group: Group,
        place: Place,
        host_ids: int,
        trusted: Trusted | None,
    ) -> None:
        super().__init__(backend, spec, sandbox_id, uid, mounts, control, os.pidfd_open(first))
        self.owner: CommandBackend = backend
        self.namespace_fds, self.pid, self.place, self.host_ids = (
            namespace_fds,
            pid,
            place,
            host_ids,
        )
        self.sizes = sizes(spec, host())
        self._launcher, self.group, self.inodes = launcher, group, inodes
        self.can_suspend = group.can_freeze
        self.network: ContainedNetwork = ContainedNetwork(self, trusted)

    def _read_stats(self, state: State) -> SandboxStats:
        pids = memory = None
        if state in (State.PROVISIONED, State.RUNNING):
            pids, memory, *_disk = (int(word) for word in self.ask("usage")[0].split())
        return SandboxStats(
            state=state,
            cpu_ns=self.group.cpu_ns(),
            memory_bytes=memory if memory is not None else self.group.memory_bytes(),
            peak_memory_bytes=self.group.peak_memory_bytes(),
            pids=pids,
            uptime_s=time.monotonic() - self._created,
            execs=self._execs,
            degraded=self.owner.degraded(self.spec),
        )

    def _reader(self) -> Reader:
        from .report import CommandReader

        return CommandReader(self)

    def _freeze(self, frozen: bool) -> None:
        if not self.group.can_freeze:
            raise self.owner.refusal("suspend", "", NO_STOP)
        self.group.freeze() if frozen else self.group.thaw()

    def namespaces(self) -> dict[str, int] | None:
        """As the agent has told, where nobody comes in by them."""
        return super().namespaces() or self.inodes

    def snapshot(self, metadata: Mapping[str, str], catalogue: Catalogue | None = None) -> Snapshot:
        if not self.owner.saves:
            raise self.owner.refusal("snapshot", "", NO_STOP)
        return super().snapshot(metadata, catalogue)

    def changes(self) -> Changes:
        """All that is not shown to it, or mounted, is its own."""
        others = {*_OTHERS, *(target for _source, target in self.place.shown)}
        own = [f"/{name}" for name in os.listdir(self.place.words["root"])]
        return Changes([], [], [path for path in own if path not in others])

    def connect(self, port: int) -> socket.socket:
        why = self.owner.launcher.lacks.get(can.CONNECT)
        if why is not None:
            self.require_awake()
            raise Unsupported(why, backend=self.backend.name, operation="connect")
        return super().connect(port)

    def _let_go(self) -> None:
        super()._let_go()
        end(self._launcher)
        remove(self.group.directories)
        self.place.remove()
        self.owner.released(self)


def inodes_of(namespace_fds: list[int]) -> dict[str, int]:
    """Which namespaces these descriptors are of."""
    return {name: os.fstat(fd).st_ino for name, fd in zip(NAMESPACES, namespace_fds, strict=True)}


def end(launcher: subprocess.Popen[bytes]) -> None:
    """Nothing that it started is left; itself it may still be about to notice that."""
    try:
        launcher.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
