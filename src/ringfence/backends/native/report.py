"""Report of the native backend, found by making sandboxes."""

from __future__ import annotations

from ...errors import RingfenceError
from ...model import capabilities as can
from ...model.capabilities import MISSING, BackendReport, Capability, Protection
from ...model.limits import Limits
from ...model.spec import LIGHT, OWN_ROOT, SandboxSpec
from ..local import reports
from ..local.host import blockers
from ..local.netns import of_rules

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from .sandbox import NativeSandbox

    Provisions = reports.Provisions[NativeSandbox]

_ALWAYS = (
    *(*reports.BASIC, *reports.STOPPING, *reports.FILES),
    *(can.NETWORK_UNRESTRICTED, can.PREWARM, can.IMAGE),
)
_LIMITS = (*reports.GROUP_LIMITS, *reports.QUOTAS, can.OPEN_FILES_LIMIT)
_NOT_YET = (can.MEMORY_SNAPSHOT, can.FORK, can.GPU, can.IO_LIMIT)
_KNOWN = (*_ALWAYS, *reports.RULES, can.SECRETS, can.SEVERAL_USERS, *_NOT_YET)

BY_NAME = (
    "with the caller's /proc, as the kernel mounts no new one beside masked paths: taken only by "
    '`ringfence run --anywhere` or allow_degraded=["namespaces"]'
)


def backend_report(backend: Provisions) -> BackendReport:
    """Found by making a real sandbox; where that fails, the report says exactly what refused."""

    def abilities(
        sandbox: NativeSandbox, protections: tuple[Protection, ...]
    ) -> Iterable[Capability]:
        yield from reports.each_of(_ALWAYS)
        yield from reports.of_limits(_LIMITS, protections)
        yield from reports.each_of(_NOT_YET, "the native backend does not have it yet")
        yield from of_rules(reports.RULES, sandbox.apply_network_policy)
        yield _several_users(backend)

    spec = SandboxSpec(limits=Limits(cpus=1.0), allow_degraded=("*", can.NAMESPACES))
    return reports.report_of(
        backend,
        spec,
        LIGHT,
        _KNOWN,
        abilities,
        reason=lambda sandbox: BY_NAME if can.NAMESPACES in sandbox.stats().degraded else "",
        refused=_refusal,
    )


def _refusal(name: str, exc: Exception, known: Iterable[str]) -> BackendReport:
    found = blockers.find(exc)
    if not found:
        return reports.unavailable(name, exc, known)
    reasons = "; ".join(each.why for each in found)
    return BackendReport(
        backend=name,
        available=False,
        reason=f"{exc.message if isinstance(exc, RingfenceError) else exc}: {reasons}",
        capabilities=tuple(reports.each_of(known, reasons)),
        protections=tuple(Protection(e.name, MISSING, e.why, e.fix) for e in found),
    )


def _several_users(backend: Provisions) -> Capability:
    """Found by making a sandbox with a root of its own, and starting something there as root."""
    from .inner import control_of

    spec = SandboxSpec(profile=OWN_ROOT, allow_degraded=("*", can.NAMESPACES))
    try:
        sandbox = backend.provision(spec)
        try:
            control_of(sandbox, 0)
        finally:
            sandbox.terminate()
    except (RingfenceError, OSError) as exc:
        return Capability(can.SEVERAL_USERS, False, str(exc))
    return Capability(can.SEVERAL_USERS, True)
