"""Protections of the host from a launcher's sandbox: read back where the kernel reports them, else
as declared.
"""

from __future__ import annotations

from ...errors import RingfenceError
from ...model import capabilities as can
from ...model.capabilities import DEGRADED, ENFORCED, MISSING, BackendReport, Capability, Protection
from ...model.spec import LIGHT, SandboxSpec
from ..local.agents import posture
from ..local.agents.agents import wants_filter
from ..local.agents.contained import NO_NAMESPACE_FDS
from ..local.agents.guest_granted import status_of_agent
from ..local.agents.posture_inside import of_isolation
from ..local.host.mountinfo import read_text
from ..local.host.readback import cpu_limit, memory_limit_bytes, memory_said, pids_limit
from ..local.netns import NetworkTables, of_network, of_rules
from ..local.reports import read_or_last, unavailable
from .sandbox import NO_STOP

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .backend import CommandBackend
    from .sandbox import CommandSandbox

_TAKES_NAMESPACE_FDS = (
    *(can.MOUNT, can.ATTACH, can.PROTECTED_PATHS, can.DENIED_PATHS, can.SNAPSHOT, can.RESTORE),
)
_OF_RULES = (can.NETWORK_HOSTS, can.NETWORK_CHANGE, can.NETWORK_OPEN, can.NETWORK_LIMIT)
_CAN = (can.LOCAL_PROCESS_SANDBOX, can.NETWORK_NONE, can.PTY, can.CONNECT, can.OPEN_FILES_LIMIT)
_STOPPING = (can.SUSPEND, can.RESUME, can.SUSPEND_ON_IDLE)
_NONE_DOES = "no launcher does"
_NO_LIMIT = 1 << 60  # version 1 has a number for it
_ON_DISK = "a launcher's files are in a directory of the host, which has no quota for them"
_LIMITS = (can.MEMORY_LIMIT, can.CPU_LIMIT, can.PIDS_LIMIT)
_CANNOT = {
    can.NETWORK_UNRESTRICTED: "the command backend gives its launchers no network",
    can.NETWORK_HOSTS: "a launcher does not go through the egress engine",
    can.NETWORK_CHANGE: "a launcher does not go through the egress engine",
    can.NETWORK_OPEN: "a launcher does not go through the egress engine",
    can.NETWORK_LIMIT: "a launcher does not go through the egress engine",
    can.SECRETS: "a launcher does not go through the egress engine",
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
        for name in (*_TAKES_NAMESPACE_FDS, *_OF_RULES, can.SECRETS):
            lacks.pop(name, None)
    backend.layout()
    held = [can.LIMITED_BY[name] for name in backend.held]
    lacks |= {name: backend.no_limits for name in _LIMITS if name not in held}
    if not backend.can_stop:
        lacks |= dict.fromkeys(_STOPPING, NO_STOP)
    if not backend.saves:
        why = NO_STOP if backend.lets_in else NO_NAMESPACE_FDS
        lacks |= dict.fromkeys((can.SNAPSHOT, can.RESTORE), why)
    return lacks


def backend_report(backend: CommandBackend) -> BackendReport:
    """Found by making a real sandbox; where that fails, the report says exactly what refused."""
    try:
        sandbox = backend.provision(SandboxSpec())
    except (RingfenceError, OSError) as exc:
        return unavailable(backend.name, exc, _CAN)
    try:
        protections = sandbox_protections(sandbox)
        rules = of_rules(_OF_RULES, sandbox.apply_network_policy) if backend.lets_in else []
        why = "" if sandbox.namespace_fds else NO_NAMESPACE_FDS
    finally:
        sandbox.terminate()
    lacks = lacking(backend)
    may = (*_CAN, *_LIMITS, *_STOPPING)
    able = tuple(Capability(name, True) for name in may if name not in lacks)
    unable = tuple(Capability(name, False, reason) for name, reason in lacks.items())
    let_in = [Capability(name, not why, why) for name in _TAKES_NAMESPACE_FDS if name not in lacks]
    return BackendReport(
        backend=backend.name,
        available=True,
        reason=backend.launcher.describe(),
        tiers=(LIGHT,),
        capabilities=(*able, *let_in, *unable, *rules),
        protections=protections,
        profiles=backend.profile_names,
    )


def sandbox_protections(sandbox: CommandSandbox) -> tuple[Protection, ...]:
    """Of a live sandbox; of one that has ended, what was last read."""
    return read_or_last(sandbox, _read)


def _read(sandbox: CommandSandbox) -> tuple[Protection, ...]:
    plain = posture.of_process(sandbox.pid, sandbox.namespaces())
    found = {each.name: each for each in plain}
    if sandbox.namespace_fds:
        seen = NetworkTables(lambda name: read_text(f"/proc/{sandbox.pid}/net/{name}"))
        network = of_network(seen, sandbox.network, sandbox.spec.network)
        found[network.name] = network
    # Without namespace fds, read_only_mounts (and the seals, without namespaces) are as declared,
    # not as read back.
    seals = () if sandbox.namespaces() else tuple(sandbox.owner.launcher.seals)
    said = () if sandbox.namespace_fds else ("read_only_mounts", *seals)
    found |= {each.name: each for each in of_isolation(sandbox) if each.name not in said}
    if found["seccomp"].status != ENFORCED and status_of_agent(sandbox).get("Seccomp") == "2":
        why = "mode 2 on the agent, and so on all that it starts"
        found["seccomp"] = Protection("seccomp", ENFORCED, why)
    for name, why in sandbox.owner.launcher.seals.items():
        declared = Protection(name, ENFORCED, f"as its documentation says: {why}")
        found.setdefault(name, declared)
    for name in (can.DISK_QUOTA, can.INODE_QUOTA):
        found[name] = Protection(name, DEGRADED, f"none: {_ON_DISK}")
    found |= {each.name: each for each in _limits(sandbox)}
    filtered = sandbox.owner.launcher.filtered and wants_filter(sandbox.spec)
    return (*found.values(), *(() if filtered else (posture.TREES,)))


def _limits(sandbox: CommandSandbox) -> list[Protection]:
    group, why = sandbox.group, sandbox.owner.no_limits
    if not group.version:
        return [Protection(name, DEGRADED, f"none: {why}") for name in _LIMITS]
    memory, pids, cpus = memory_limit_bytes(group), pids_limit(group), cpu_limit(group)
    how = f"by cgroup v{group.version}"
    found = []
    for name, value, text in (
        (
            can.MEMORY_LIMIT,
            memory,
            f"{(memory or 0) >> 20} MiB {memory_said(group, memory or 0)}",
        ),
        (can.PIDS_LIMIT, pids, f"{pids}, the launcher's own included, {how}"),
    ):
        is_held = value is not None and value < _NO_LIMIT
        found.append(
            Protection(name, ENFORCED, text)
            if is_held
            else Protection(name, MISSING, "the cgroup has none")
        )
    if sandbox.spec.limits.cpus:
        found.append(
            Protection(can.CPU_LIMIT, ENFORCED, f"{cpus:g} cores {how}")
            if cpus is not None
            else Protection(can.CPU_LIMIT, DEGRADED, "none: its controller is not there")
        )
    return found
