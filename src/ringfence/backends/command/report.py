"""Protections of the host from a launcher's sandbox: read back where the kernel reports them, else
as declared.
"""

from __future__ import annotations

from ...model import capabilities as can
from ...model.capabilities import ENFORCED, BackendReport, Capability, Protection
from ...model.spec import LIGHT, SandboxSpec
from ..local.agents.contained import NO_NAMESPACE_FDS
from ..local.agents.guest_granted import status_of_agent
from ..local.agents.posture import TREES, ContainedReader
from ..local.host.readback import cpu_limit, memory_limit_bytes, memory_said, pids_limit
from ..local.netns import of_rules
from ..local.protections import degraded, enforced, missing
from ..local.reports import BASIC, FILES, GROUP_LIMITS, RULES, STOPPING, each_of, never, report_of
from .sandbox import NO_STOP

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..local.protections import Verdict
    from .backend import CommandBackend
    from .sandbox import CommandSandbox

_CAN = (*BASIC, can.OPEN_FILES_LIMIT)
_NONE_DOES = "no launcher does"
_NO_LIMIT = 1 << 60  # version 1 has a number for it
_ON_DISK = "a launcher's files are in a directory of the host, which has no quota for them"
_CANNOT = {
    can.NETWORK_UNRESTRICTED: "the command backend gives its launchers no network",
    **dict.fromkeys((*RULES, can.SECRETS), "a launcher does not go through the egress engine"),
    can.MOUNT: "files go in and out by the files API; a launcher opens host paths by name",
    can.ATTACH: "mounts are made before anything runs",
    can.PROTECTED_PATHS: "there are no mounts in which they could lie",
    can.DENIED_PATHS: "no launcher hides them",
    can.MEMORY_SNAPSHOT: _NONE_DOES,
    can.FORK: _NONE_DOES,
    can.PREWARM: _NONE_DOES,
    can.IMAGE: "the command backend shows the host's programs",
    can.GPU: _NONE_DOES,
    can.DISK_QUOTA: _ON_DISK,
    can.INODE_QUOTA: _ON_DISK,
    can.IO_LIMIT: "what files move is not counted around a launcher",
}


def lacking(backend: CommandBackend) -> dict[str, str]:
    """List the capabilities this launcher lacks, name to reason."""
    lacks = {**_CANNOT, **backend.launcher.lacks}
    if backend.lets_in:
        for name in (*FILES, *RULES, can.SECRETS):
            lacks.pop(name, None)
    backend.layout()
    held = [can.LIMITED_BY[name] for name in backend.held]
    lacks |= {name: backend.no_limits for name in GROUP_LIMITS if name not in held}
    if not backend.can_stop:
        lacks |= dict.fromkeys(STOPPING, NO_STOP)
    if not backend.saves:
        why = NO_STOP if backend.lets_in else NO_NAMESPACE_FDS
        lacks |= dict.fromkeys((can.SNAPSHOT, can.RESTORE), why)
    return lacks


def backend_report(backend: CommandBackend) -> BackendReport:
    """Found by making a real sandbox; where that fails, the report says exactly what refused."""

    def abilities(
        sandbox: CommandSandbox, _protections: tuple[Protection, ...]
    ) -> Iterable[Capability]:
        why, lacks = "" if sandbox.namespace_fds else NO_NAMESPACE_FDS, lacking(backend)
        yield from each_of(n for n in (*_CAN, *GROUP_LIMITS, *STOPPING) if n not in lacks)
        yield from each_of((name for name in FILES if name not in lacks), why)
        yield from never(lacks)
        if backend.lets_in:
            yield from of_rules(RULES, sandbox.apply_network_policy)

    return report_of(
        backend,
        SandboxSpec(),
        LIGHT,
        _CAN,
        abilities,
        reason=lambda _sandbox: backend.launcher.describe(),
    )


class CommandReader(ContainedReader):
    """Also knows what a launcher declares, where nothing can be read back."""

    sandbox: CommandSandbox

    def __init__(self, sandbox: CommandSandbox) -> None:
        super().__init__(sandbox, sandbox.namespaces())
        self._seals = sandbox.owner.launcher.seals

    def read(self) -> tuple[Protection, ...]:
        found = {each.name: each for each in super().read()}
        for name, why in self._seals.items():
            found.setdefault(name, Protection(name, ENFORCED, f"as its documentation says: {why}"))
        return tuple(found.values())

    def _read_or_declared(self, name: str, verdict: Verdict) -> Verdict:
        """Leave out what is read without namespaces of the agent's and is declared instead."""
        is_declared = name in self._seals and not self.sandbox.namespaces()
        return None if is_declared else verdict

    def root_file_system(self) -> Verdict:
        return self._read_or_declared("root_file_system", super().root_file_system())

    def read_only_mounts(self) -> Verdict:
        return super().read_only_mounts() if self.sandbox.namespace_fds else None

    def kernel_interfaces(self) -> Verdict:
        return self._read_or_declared("kernel_interfaces", super().kernel_interfaces())

    def nested_user_namespaces(self) -> Verdict:
        return self._read_or_declared("nested_user_namespaces", super().nested_user_namespaces())

    def seccomp(self) -> Verdict:
        verdict = super().seccomp()
        if verdict and verdict[0] == ENFORCED:
            return verdict
        if status_of_agent(self.sandbox).get("Seccomp") == "2":
            return enforced("mode 2 on the agent, and so on all that it starts")
        return verdict

    def network(self) -> Verdict:
        network = self.sandbox.network
        if self.sandbox.namespace_fds and network is not None:
            return self.of_policy(network)
        return super().network()

    def process_trees(self) -> Verdict:
        return super().process_trees() if self.sandbox.owner.launcher.filtered else TREES

    def disk_quota(self) -> Verdict:
        return degraded(f"none: {_ON_DISK}")

    inode_quota = disk_quota

    def _held(self, value: int | None, text: str) -> Verdict:
        if not self.sandbox.group.version:
            return degraded(f"sampled every 50 ms: {self.sandbox.owner.no_limits}")
        if value is None or value >= _NO_LIMIT:
            return missing("the cgroup has none")
        return enforced(text)

    def memory_limit(self) -> Verdict:
        group = self.sandbox.group
        found = memory_limit_bytes(group)
        return self._held(found, f"{(found or 0) >> 20} MiB {memory_said(group, found or 0)}")

    def pids_limit(self) -> Verdict:
        group = self.sandbox.group
        if not group.version:
            return degraded(
                f"none but samples, which a fork bomb outruns: {self.sandbox.owner.no_limits}"
            )
        found, own = pids_limit(group), "the launcher's own included"
        return self._held(found, f"{found}, {own}, by cgroup v{group.version}")

    def cpu_limit(self) -> Verdict:
        group, found = self.sandbox.group, cpu_limit(self.sandbox.group)
        if not group.version:
            return degraded(f"none: {self.sandbox.owner.no_limits}")
        if not self.sandbox.spec.limits.cpus:
            return None
        if found is None:
            return degraded("none: its controller is not there")
        return enforced(f"{found:g} cores by cgroup v{group.version}")
