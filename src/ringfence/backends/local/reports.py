"""Reports of backends: found by making a sandbox, or why none can be made."""

from __future__ import annotations

from ...errors import RingfenceError
from ...model import capabilities as can
from ...model.capabilities import ENFORCED, MISSING, BackendReport, Capability, Protection

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Protocol, TypeVar

    from ...model.spec import SandboxSpec

    class Made(Protocol):
        def protections(self) -> tuple[Protection, ...]: ...
        def terminate(self) -> None: ...

    S = TypeVar("S", bound=Made)
    S_co = TypeVar("S_co", bound=Made, covariant=True)

    class Provisions(Protocol[S_co]):
        """A backend that a report makes sandboxes with."""

        @property
        def name(self) -> str: ...
        @property
        def profile_names(self) -> tuple[str, ...]: ...
        def provision(self, spec: SandboxSpec) -> S_co: ...

    Protections = tuple[Protection, ...]

BASIC = (can.LOCAL_PROCESS_SANDBOX, can.NETWORK_NONE, can.PTY, can.CONNECT)
STOPPING = (can.SUSPEND, can.RESUME, can.SUSPEND_ON_IDLE)
FILES = (
    *(can.MOUNT, can.ATTACH, can.PROTECTED_PATHS, can.DENIED_PATHS, can.SNAPSHOT, can.RESTORE),
)
GROUP_LIMITS = (can.MEMORY_LIMIT, can.CPU_LIMIT, can.PIDS_LIMIT)
QUOTAS = (can.DISK_QUOTA, can.INODE_QUOTA)
RULES = (can.NETWORK_HOSTS, can.NETWORK_CHANGE, can.NETWORK_OPEN, can.NETWORK_LIMIT)


def unavailable(backend: str, exc: Exception, capabilities: Iterable[str]) -> BackendReport:
    """A backend whose sandbox could not be made: exactly what refused, and the fix."""
    reason = exc.message if isinstance(exc, RingfenceError) else str(exc)
    fix = exc.hint if isinstance(exc, RingfenceError) else ""
    return BackendReport(
        backend=backend,
        available=False,
        reason=reason,
        capabilities=tuple(each_of(capabilities, reason)),
        protections=(Protection("sandbox", MISSING, reason, fix),),
    )


def report_of(
    backend: Provisions[S],
    spec: SandboxSpec,
    tier: str,
    known: Iterable[str],
    abilities: Callable[[S, Protections], Iterable[Capability]],
    *,
    reason: Callable[[S], str] = lambda _sandbox: "",
    refused: Callable[[str, Exception, Iterable[str]], BackendReport] = unavailable,
) -> BackendReport:
    """Make a real sandbox and report on it; where that fails, report exactly what refused.

    Args:
        known: Capabilities that are not available when no sandbox can be made.
        abilities: Capabilities, found with the live sandbox and its protections.
        reason: The program in use.
    """
    try:
        sandbox = backend.provision(spec)
    except (RingfenceError, OSError) as exc:
        return refused(backend.name, exc, known)
    try:
        protections = sandbox.protections()
        capabilities, program = tuple(abilities(sandbox, protections)), reason(sandbox)
    finally:
        sandbox.terminate()
    return BackendReport(
        backend=backend.name,
        available=True,
        reason=program,
        tiers=(tier,),
        capabilities=capabilities,
        protections=protections,
        profiles=backend.profile_names,
    )


def each_of(names: Iterable[str], lacking: str = "") -> list[Capability]:
    """Capabilities that are available, or are not, for one reason."""
    return [Capability(name, not lacking, lacking) for name in names]


def never(reasons: Mapping[str, str]) -> list[Capability]:
    """Capabilities that the backend lacks on every host."""
    return [Capability(name, False, why) for name, why in reasons.items()]


def of_limits(names: Iterable[str], protections: Protections) -> list[Capability]:
    """Limits, available as far as the sandbox's protections say."""
    status = {each.name: each for each in protections}
    return [
        Capability(
            name,
            status[name].status != MISSING,
            "" if status[name].status == ENFORCED else status[name].why,
        )
        for name in names
    ]
