"""What protects the host from what a launcher runs: read back where the kernel tells, else as declared."""

from __future__ import annotations

from ...errors import RingfenceError
from ...model import capabilities as can
from ...model.capabilities import DEGRADED, ENFORCED, BackendReport, Capability, Protection
from ...model.spec import LIGHT, SandboxSpec
from ..local import posture
from ..local.agents import wants_filter
from ..local.contained import NO_WAYS
from ..local.guest_granted import status_of_agent
from ..local.mountinfo import read_text
from ..local.netns import NetworkTables, of_network, of_rules
from ..local.posture_inside import of_walls
from ..local.reports import read_or_last, unavailable
from .sandbox import NO_STOP

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .backend import CommandBackend
    from .sandbox import CommandSandbox

_TAKES_WAYS = (can.MOUNT, can.PROTECTED_PATHS)
_OF_RULES = (can.NETWORK_HOSTS, can.NETWORK_CHANGE, can.NETWORK_OPEN, can.NETWORK_LIMIT)
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
    can.ATTACH: "mounts are made before anything runs",
    can.PROTECTED_PATHS: "there are no mounts in which they could lie",
    can.DENIED_PATHS: "no launcher hides them",
    can.SNAPSHOT: NO_STOP,
    can.RESTORE: NO_STOP,
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
    lacks = {**_CANNOT, **backend.launcher.lacks}
    if backend.lets_in:
        for name in (*_TAKES_WAYS, *_OF_RULES, can.SECRETS):
            lacks.pop(name, None)
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
        why = "" if sandbox.ways else NO_WAYS
    finally:
        sandbox.terminate()
    lacks = lacking(backend)
    able = tuple(Capability(name, True) for name in _CAN if name not in lacks)
    unable = tuple(Capability(name, False, reason) for name, reason in lacks.items())
    let_in = [Capability(name, not why, why) for name in _TAKES_WAYS if name not in lacks]
    return BackendReport(
        backend=backend.name,
        available=True,
        tiers=(LIGHT,),
        capabilities=(*able, *let_in, *unable, *rules),
        protections=protections,
    )


def sandbox_protections(sandbox: CommandSandbox) -> tuple[Protection, ...]:
    """Of a live sandbox; of one that has ended, what was last read."""
    return read_or_last(sandbox, _read)


def _read(sandbox: CommandSandbox) -> tuple[Protection, ...]:
    plain = posture.of_process(sandbox.pid, sandbox.namespaces())
    found = {each.name: each for each in plain}
    if sandbox.ways:
        seen = NetworkTables(lambda name: read_text(f"/proc/{sandbox.pid}/net/{name}"))
        network = of_network(seen, sandbox.network, sandbox.spec.network)
        found |= {each.name: each for each in (network, *of_walls(sandbox))}
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
