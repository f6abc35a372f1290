"""Protections of the host from a container, read back from the kernel."""

from __future__ import annotations

from ...model import capabilities as can
from ...model.capabilities import BackendReport, Capability, Protection
from ...model.limits import Limits
from ...model.spec import LIGHT, SandboxSpec
from ..local.agents.contained import NO_NAMESPACE_FDS
from ..local.agents.posture import ContainedReader
from ..local.host.readback import NOT_COUNTED, sockets_said
from ..local.netns import of_rules
from ..local.protections import degraded, enforced, missing
from ..local.reports import (
    BASIC,
    FILES,
    GROUP_LIMITS,
    QUOTAS,
    RULES,
    STOPPING,
    each_of,
    never,
    report_of,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..local.protections import Verdict
    from ..local.reports import Provisions
    from .sandbox import DockerSandbox

_CAN = (*BASIC, *STOPPING, *GROUP_LIMITS, can.OPEN_FILES_LIMIT, can.IMAGE)
_KNOWN = (*_CAN, *FILES, *QUOTAS, *RULES, can.SECRETS)
_NOT_YET = "the Docker backend does not have it yet"
_CANNOT = {
    can.NETWORK_UNRESTRICTED: "the Docker backend never shares the host's or the engine's network",
    can.IO_LIMIT: _NOT_YET,
    can.MEMORY_SNAPSHOT: "the engine's checkpoints need CRIU",
    can.FORK: "the engine's checkpoints need CRIU",
    can.PREWARM: _NOT_YET,
    can.GPU: _NOT_YET,
}


def backend_report(backend: Provisions[DockerSandbox]) -> BackendReport:
    """Found by making a real sandbox; where that fails, the report says exactly what refused."""
    spec = SandboxSpec(limits=Limits(cpus=1.0))
    return report_of(backend, spec, LIGHT, _KNOWN, _abilities)


def _abilities(
    sandbox: DockerSandbox, _protections: tuple[Protection, ...]
) -> Iterable[Capability]:
    yield from each_of(_CAN)
    yield from each_of((*FILES, *QUOTAS), "" if sandbox.namespace_fds else NO_NAMESPACE_FDS)
    yield from never(_CANNOT)
    yield from of_rules(RULES, sandbox.apply_network_policy)


class DockerReader(ContainedReader):
    """Reads limits from the container's cgroup."""

    sandbox: DockerSandbox

    def __init__(self, sandbox: DockerSandbox) -> None:
        super().__init__(sandbox, sandbox.namespaces())

    def network(self) -> Verdict:
        return self.of_policy(self.sandbox.network)

    def memory_limit(self) -> Verdict:
        group = self.sandbox.group
        limit = group.memory_limit()
        if limit is None or limit > 1 << 60:
            return missing("the container's cgroup has none")
        text = f"{limit >> 20} MiB by cgroup"
        if group.counts_sockets_apart:
            text += f" v1, {sockets_said(group.sockets_limit(), limit)}"
        return enforced(f"{text}, {NOT_COUNTED}")

    def pids_limit(self) -> Verdict:
        limit = self.sandbox.group.pids_limit()
        if limit is None:
            return missing("the container's cgroup has none")
        return enforced(f"{limit} by cgroup")

    def _of_engine(self, name: str) -> Verdict:
        """Judge a quota that only the engine's storage can have."""
        if name in {can.LIMITED_BY[each] for each in self.sandbox.lacking()}:
            return degraded("none: its files are on the engine's disk")
        if name != can.DISK_QUOTA:
            return None
        wanted = self.sandbox.spec.limits.disk_bytes or 0
        return enforced(f"{wanted >> 20} MiB, by the engine's storage driver")

    def disk_quota(self) -> Verdict:
        if not self.sandbox.has_room:
            return self._of_engine(can.DISK_QUOTA)
        return enforced(f"{self._bounds()[0] >> 20} MiB, the size of a tmpfs")

    def inode_quota(self) -> Verdict:
        if not self.sandbox.has_room:
            return self._of_engine(can.INODE_QUOTA)
        return enforced(f"{self._bounds()[1]} files and directories in a tmpfs")

    def _bounds(self) -> list[int]:
        return [int(word) for word in self.sandbox.ask("bounds")[0].split()[2:]]
