"""Protections of the host: of one sandbox, or tested by making a sandbox."""

from __future__ import annotations

from ...errors import RingfenceError
from ...model import capabilities as can
from ...model.capabilities import ENFORCED, MISSING, BackendReport, Capability, Protection
from ...model.limits import Limits
from ...model.mount import Mount
from ...model.spec import STRONG, SandboxSpec
from ..local.host.facts import host
from ..local.netns import of_rules
from ..local.reports import read_or_last, unavailable
from .asked import NEVER, NO_MEMORY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .backend import GvisorBackend
    from .sandbox import GvisorSandbox


def sandbox_protections(sandbox: GvisorSandbox) -> tuple[Protection, ...]:
    """Every protection of a live sandbox; of a suspended or ended one, what was last read."""
    from .posture import read_posture

    return read_or_last(sandbox, read_posture)


def backend_report(backend: GvisorBackend) -> BackendReport:
    """Found by making a real sandbox; where that fails, the report says exactly what refused."""
    wanted = SandboxSpec(tier=STRONG, limits=Limits(cpus=1.0), allow_degraded=("*",))
    try:
        sandbox = backend.provision(wanted)
    except (RingfenceError, OSError) as exc:
        return unavailable(backend.name, exc, _EVERYTHING)
    try:
        protections = sandbox_protections(sandbox)
        assert sandbox.network is not None
        of_network = of_rules(_OF_RULES, sandbox.network.change)
        attaches = _attaches(sandbox)
    finally:
        sandbox.terminate()
    return BackendReport(
        backend=backend.name,
        available=True,
        reason=_reason(backend),
        tiers=(STRONG,),
        capabilities=(*_abilities(protections), attaches, *of_network),
        protections=protections,
        profiles=backend.profile_names,
    )


def _reason(backend: GvisorBackend) -> str:
    why = backend.without_process_images
    return why and f"starts are slower: its process image did not work here: {why}"


def _attaches(sandbox: GvisorSandbox) -> Capability:
    """Found by doing it: the way in differs between releases of gVisor."""
    try:
        sandbox.attach(Mount("/mnt/probe"))
    except (RingfenceError, OSError) as exc:
        return Capability(can.ATTACH, False, f"a mount was refused: {exc}")
    return Capability(can.ATTACH, True)


_ALWAYS = (
    can.LOCAL_PROCESS_SANDBOX,
    can.NETWORK_NONE,
    can.MOUNT,
    can.SNAPSHOT,
    can.RESTORE,
    can.SUSPEND,
    can.RESUME,
    can.SUSPEND_ON_IDLE,
    can.PTY,
    can.CONNECT,
    can.PROTECTED_PATHS,
    can.DENIED_PATHS,
    can.PREWARM,
    can.IMAGE,
    can.PIDS_LIMIT,
    can.DISK_QUOTA,
    can.INODE_QUOTA,
    can.OPEN_FILES_LIMIT,
)
_LIMITS = (can.MEMORY_LIMIT, can.CPU_LIMIT)
_OF_RULES = (can.NETWORK_HOSTS, can.NETWORK_CHANGE, can.NETWORK_LIMIT)
_EVERYTHING = (*_ALWAYS, can.ATTACH, *_OF_RULES, can.SECRETS, *_LIMITS)


def _abilities(protections: tuple[Protection, ...]) -> tuple[Capability, ...]:
    status = {each.name: each for each in protections}
    found = [Capability(name, True) for name in _ALWAYS]
    for name in _LIMITS:
        each = status[name]
        reason = "" if each.status == ENFORCED else each.why
        found.append(Capability(name, each.status != MISSING, reason))
    why_not = "" if host().trusted_root else NO_MEMORY
    found.append(Capability(can.MEMORY_SNAPSHOT, not why_not, why_not))
    return (*found, *(Capability(name, False, why) for name, why in NEVER.items()))
