"""Protections of the host from a container, read back from the kernel."""

from __future__ import annotations

from ...errors import RingfenceError
from ...model import capabilities as can
from ...model.capabilities import DEGRADED, ENFORCED, MISSING, BackendReport, Capability, Protection
from ...model.limits import Limits
from ...model.spec import LIGHT, SandboxSpec
from ..local.agents import posture
from ..local.agents.agents import wants_filter
from ..local.agents.contained import NO_NAMESPACE_FDS
from ..local.agents.posture_inside import of_isolation
from ..local.host.mountinfo import read_text
from ..local.host.readback import NOT_COUNTED, sockets_said
from ..local.netns import NetworkTables, of_network, of_rules
from ..local.reports import read_or_last, unavailable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .sandbox import DockerSandbox

_CAN = (
    can.LOCAL_PROCESS_SANDBOX,
    can.NETWORK_NONE,
    can.PTY,
    can.CONNECT,
    can.SUSPEND,
    can.RESUME,
    can.SUSPEND_ON_IDLE,
    can.MEMORY_LIMIT,
    can.CPU_LIMIT,
    can.PIDS_LIMIT,
    can.OPEN_FILES_LIMIT,
    can.IMAGE,
)
_TAKES_NAMESPACE_FDS = (
    *(can.MOUNT, can.ATTACH, can.PROTECTED_PATHS, can.DENIED_PATHS, can.SNAPSHOT, can.RESTORE),
    *(can.DISK_QUOTA, can.INODE_QUOTA),
)
_OF_RULES = (can.NETWORK_HOSTS, can.NETWORK_CHANGE, can.NETWORK_OPEN, can.NETWORK_LIMIT)
_NOT_YET = "the Docker backend does not have it yet"
_CANNOT = {
    can.NETWORK_UNRESTRICTED: "the Docker backend never shares the host's or the engine's network",
    can.IO_LIMIT: _NOT_YET,
    can.MEMORY_SNAPSHOT: "the engine's checkpoints need CRIU",
    can.FORK: "the engine's checkpoints need CRIU",
    can.PREWARM: _NOT_YET,
    can.GPU: _NOT_YET,
}


def backend_report(
    name: str, profiles: tuple[str, ...], provision: Callable[[SandboxSpec], DockerSandbox]
) -> BackendReport:
    """Found by making a real sandbox; where that fails, the report says exactly what refused."""
    try:
        sandbox = provision(SandboxSpec(limits=Limits(cpus=1.0)))
    except (RingfenceError, OSError) as exc:
        return unavailable(name, exc, (*_CAN, *_TAKES_NAMESPACE_FDS, *_OF_RULES, can.SECRETS))
    try:
        protections = sandbox_protections(sandbox)
        rules = of_rules(_OF_RULES, sandbox.apply_network_policy)
        why = "" if sandbox.namespace_fds else NO_NAMESPACE_FDS
    finally:
        sandbox.terminate()
    return BackendReport(
        backend=name,
        available=True,
        tiers=(LIGHT,),
        capabilities=(
            *(Capability(name, True) for name in _CAN),
            *(Capability(name, not why, why) for name in _TAKES_NAMESPACE_FDS),
            *(Capability(name, False, lacks) for name, lacks in _CANNOT.items()),
            *rules,
        ),
        protections=protections,
        profiles=profiles,
    )


def sandbox_protections(sandbox: DockerSandbox) -> tuple[Protection, ...]:
    """Of a live sandbox; of one that stands still or has ended, what was last read."""
    return read_or_last(sandbox, _read)


def _read(sandbox: DockerSandbox) -> tuple[Protection, ...]:
    plain = posture.of_process(sandbox.pid, sandbox.namespaces())
    seen = NetworkTables(lambda name: read_text(f"/proc/{sandbox.pid}/net/{name}"))
    found = [
        *(each for each in plain if each.name != "network"),
        *of_isolation(sandbox),
        of_network(seen, sandbox.network, sandbox.spec.network),
        _memory(sandbox),
        _pids(sandbox),
    ]
    found += _quotas(sandbox)
    return (*found, *(() if wants_filter(sandbox.spec) else (posture.TREES,)))


def _quotas(sandbox: DockerSandbox) -> list[Protection]:
    if not sandbox.has_room:
        lacking = [can.LIMITED_BY[name] for name in sandbox.lacking()]
        why = "none: its files are on the engine's disk"
        found = [Protection(name, DEGRADED, why) for name in lacking]
        if can.DISK_QUOTA not in lacking:
            of = (
                f"{(sandbox.spec.limits.disk_bytes or 0) >> 20} MiB, by the engine's storage driver"
            )
            found.append(Protection(can.DISK_QUOTA, ENFORCED, of))
        return found
    disk, inodes = (int(word) for word in sandbox.ask("bounds")[0].split()[2:])
    return [
        Protection(can.DISK_QUOTA, ENFORCED, f"{disk >> 20} MiB, the size of a tmpfs"),
        Protection(can.INODE_QUOTA, ENFORCED, f"{inodes} files and directories in a tmpfs"),
    ]


def _memory(sandbox: DockerSandbox) -> Protection:
    limit = sandbox.group.memory_limit()
    if limit is None or limit > 1 << 60:
        return Protection(can.MEMORY_LIMIT, MISSING, "the container's cgroup has none")
    text = f"{limit >> 20} MiB by cgroup"
    if sandbox.group.counts_sockets_apart:
        text += f" v1, {sockets_said(sandbox.group.sockets_limit(), limit)}"
    return Protection(can.MEMORY_LIMIT, ENFORCED, f"{text}, {NOT_COUNTED}")


def _pids(sandbox: DockerSandbox) -> Protection:
    limit = sandbox.group.pids_limit()
    if limit is None:
        return Protection(can.PIDS_LIMIT, MISSING, "the container's cgroup has none")
    return Protection(can.PIDS_LIMIT, ENFORCED, f"{limit} by cgroup")
