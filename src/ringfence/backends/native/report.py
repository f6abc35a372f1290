"""Protections of the host: of one sandbox, or tested by making a sandbox."""

from __future__ import annotations

from ...errors import RingfenceError
from ...model import capabilities as can
from ...model.capabilities import ENFORCED, MISSING, BackendReport, Capability, Protection
from ...model.limits import Limits
from ...model.spec import LIGHT, OWN_ROOT, SandboxSpec
from ..local.netns import of_rules
from ..local.reports import unavailable
from . import blockers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from .sandbox import NativeSandbox

    class Provisions(Protocol):
        """A backend that a report makes sandboxes with."""

        name: str

        @property
        def profile_names(self) -> tuple[str, ...]: ...
        def provision(self, spec: SandboxSpec) -> NativeSandbox: ...


def backend_report(backend: Provisions) -> BackendReport:
    """Found by making a real sandbox; where that fails, the report says exactly what refused."""
    try:
        sandbox = backend.provision(SandboxSpec(limits=Limits(cpus=1.0), allow_degraded=("*",)))
    except (RingfenceError, OSError) as exc:
        return _refusal(backend, exc)
    try:
        protections = sandbox.protections()
        abilities = [*_abilities(protections), *_network_abilities(sandbox)]
        abilities.append(_several_users(backend))
    finally:
        sandbox.terminate()
    return BackendReport(
        backend=backend.name,
        available=True,
        tiers=(LIGHT,),
        capabilities=tuple(abilities),
        protections=protections,
        profiles=backend.profile_names,
    )


def _refusal(backend: Provisions, exc: Exception) -> BackendReport:
    found = blockers.find(exc)
    names = (*_ALWAYS, *_OF_RULES, can.SECRETS, can.SEVERAL_USERS, *_NOT_YET)
    if not found:
        return unavailable(backend.name, exc, names)
    reasons = "; ".join(each.why for each in found)
    lacking = tuple(Capability(name, False, reasons) for name in names)
    missing = tuple(Protection(each.name, MISSING, each.why, each.fix) for each in found)
    return BackendReport(
        backend=backend.name,
        available=False,
        reason=f"{exc.message if isinstance(exc, RingfenceError) else exc}: {reasons}",
        capabilities=lacking,
        protections=missing,
    )


_ALWAYS = (
    can.LOCAL_PROCESS_SANDBOX,
    can.NETWORK_NONE,
    can.NETWORK_UNRESTRICTED,
    can.CONNECT,
    can.MOUNT,
    can.ATTACH,
    can.SNAPSHOT,
    can.RESTORE,
    can.SUSPEND,
    can.RESUME,
    can.SUSPEND_ON_IDLE,
    can.PTY,
    can.PREWARM,
    can.DENIED_PATHS,
    can.PROTECTED_PATHS,
    can.IMAGE,
)
_LIMITS = (
    can.MEMORY_LIMIT,
    can.CPU_LIMIT,
    can.PIDS_LIMIT,
    can.DISK_QUOTA,
    can.INODE_QUOTA,
    can.OPEN_FILES_LIMIT,
)
_OF_RULES = (can.NETWORK_HOSTS, can.NETWORK_CHANGE, can.NETWORK_OPEN, can.NETWORK_LIMIT)
_NOT_YET = (
    can.MEMORY_SNAPSHOT,
    can.FORK,
    can.GPU,
    can.IO_LIMIT,
)


def _network_abilities(sandbox: NativeSandbox) -> list[Capability]:
    return of_rules(_OF_RULES, sandbox.apply_network_policy)


def _several_users(backend: Provisions) -> Capability:
    """Found by making a sandbox with a root of its own, and starting something there as root."""
    from .users import control_of

    spec = SandboxSpec(profile=OWN_ROOT, allow_degraded=("*",))
    try:
        sandbox = backend.provision(spec)
        try:
            control_of(sandbox, 0)
        finally:
            sandbox.terminate()
    except (RingfenceError, OSError) as exc:
        return Capability(can.SEVERAL_USERS, False, str(exc))
    return Capability(can.SEVERAL_USERS, True)


def _abilities(protections: tuple[Protection, ...]) -> tuple[Capability, ...]:
    status = {each.name: each for each in protections}
    found = [Capability(name, True) for name in _ALWAYS]
    for name in _LIMITS:
        each = status[name]
        found.append(
            Capability(name, each.status != MISSING, "" if each.status == ENFORCED else each.why)
        )
    found += [
        Capability(name, False, "the native backend does not have it yet") for name in _NOT_YET
    ]
    return tuple(found)
