"""What protects the host from what a launcher runs: read back where the kernel tells, else as declared."""

from __future__ import annotations

from ...errors import RingfenceError
from ...model import capabilities as can
from ...model.capabilities import DEGRADED, ENFORCED, BackendReport, Capability, Protection
from ...model.spec import LIGHT, SandboxSpec
from ..local import posture
from ..local.agents import wants_filter
from ..local.guest_granted import status_of_agent
from ..local.reports import read_or_last, unavailable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .backend import CommandBackend
    from .sandbox import CommandSandbox

_CAN = (can.LOCAL_PROCESS_SANDBOX, can.NETWORK_NONE, can.PTY, can.CONNECT, can.OPEN_FILES_LIMIT)
_NONE_DOES = "no launcher does"
_CANNOT = {
    can.NETWORK_UNRESTRICTED: "the command backend gives its launchers no network",
    can.NETWORK_HOSTS: "a launcher does not go through the egress engine",
    can.NETWORK_CHANGE: "a launcher does not go through the egress engine",
    can.NETWORK_OPEN: "a launcher does not go through the egress engine",
    can.NETWORK_LIMIT: "a launcher does not go through the egress engine",
    can.SECRETS: "a launcher does not go through the egress engine",
    can.MOUNT: "files go in and out by the files API; a launcher opens host paths by name",
    can.ATTACH: "a launcher decides at its start what is shown",
    can.PROTECTED_PATHS: "there are no mounts in which they could lie",
    can.DENIED_PATHS: "there are no mounts in which they could lie",
    can.SNAPSHOT: _NONE_DOES,
    can.RESTORE: _NONE_DOES,
    can.MEMORY_SNAPSHOT: _NONE_DOES,
    can.FORK: _NONE_DOES,
    can.SUSPEND: _NONE_DOES,
    can.RESUME: _NONE_DOES,
    can.SUSPEND_ON_IDLE: _NONE_DOES,
    can.PREWARM: _NONE_DOES,
    can.IMAGE: "the command backend shows the host's programs",
    can.GPU: _NONE_DOES,
    can.MEMORY_LIMIT: "launchers set no limits",
    can.CPU_LIMIT: "launchers set no limits",
    can.PIDS_LIMIT: "launchers set no limits",
    can.DISK_QUOTA: "launchers set no limits",
    can.INODE_QUOTA: "launchers set no limits",
    can.IO_LIMIT: "launchers set no limits",
}


def lacking(backend: CommandBackend) -> dict[str, str]:
    """What this launcher cannot do, name to reason."""
    return {**_CANNOT, **backend.launcher.lacks}


def backend_report(backend: CommandBackend) -> BackendReport:
    """Found by making a real sandbox; where that fails, the report says exactly what refused."""
    try:
        sandbox = backend.provision(SandboxSpec())
    except (RingfenceError, OSError) as exc:
        return unavailable(backend.name, exc, _CAN)
    try:
        protections = sandbox_protections(sandbox)
    finally:
        sandbox.terminate()
    lacks = lacking(backend)
    able = tuple(Capability(name, True) for name in _CAN if name not in lacks)
    unable = tuple(Capability(name, False, why) for name, why in lacks.items())
    return BackendReport(
        backend=backend.name,
        available=True,
        tiers=(LIGHT,),
        capabilities=(*able, *unable),
        protections=protections,
    )


def sandbox_protections(sandbox: CommandSandbox) -> tuple[Protection, ...]:
    """Of a live sandbox; of one that has ended, what was last read."""
    return read_or_last(sandbox, _read)


def _read(sandbox: CommandSandbox) -> tuple[Protection, ...]:
    found = {each.name: each for each in posture.of_process(sandbox.pid)}
    if found["seccomp"].status != ENFORCED and status_of_agent(sandbox).get("Seccomp") == "2":
        why = "mode 2 on the agent, and so on all that it starts"
        found["seccomp"] = Protection("seccomp", ENFORCED, why)
    for name, why in sandbox.owner.launcher.seals.items():
        declared = Protection(name, ENFORCED, f"as its documentation says: {why}")
        found.setdefault(name, declared)
    for name in (can.MEMORY_LIMIT, can.CPU_LIMIT, can.PIDS_LIMIT, can.DISK_QUOTA, can.INODE_QUOTA):
        found[name] = Protection(name, DEGRADED, "none: launchers set no limits")
    filtered = sandbox.owner.launcher.filtered and wants_filter(sandbox.spec)
    return (*found.values(), *(() if filtered else (posture.TREES,)))
