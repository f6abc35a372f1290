"""Report of the gVisor backend, found by making a sandbox."""

from __future__ import annotations

from ...errors import RingfenceError
from ...model import capabilities as can
from ...model.capabilities import BackendReport, Capability, Protection
from ...model.limits import Limits
from ...model.mount import Mount
from ...model.spec import STRONG, SandboxSpec
from ..local import reports
from ..local.host.facts import host
from ..local.netns import of_rules
from .asked import NEVER, NO_MEMORY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from .backend import GvisorBackend
    from .sandbox import GvisorSandbox

_ALWAYS = (
    *(*reports.BASIC, *reports.STOPPING, *reports.QUOTAS, can.PREWARM, can.IMAGE),
    *(can.PIDS_LIMIT, can.OPEN_FILES_LIMIT),
    *(name for name in reports.FILES if name != can.ATTACH),
)
_LIMITS = (can.MEMORY_LIMIT, can.CPU_LIMIT)
_OF_RULES = (can.NETWORK_HOSTS, can.NETWORK_CHANGE, can.NETWORK_LIMIT)
_KNOWN = (*_ALWAYS, can.ATTACH, *_OF_RULES, can.SECRETS, *_LIMITS)


def backend_report(backend: GvisorBackend) -> BackendReport:
    """Found by making a real sandbox; where that fails, the report says exactly what refused."""
    spec = SandboxSpec(tier=STRONG, limits=Limits(cpus=1.0), allow_degraded=("*",))
    return reports.report_of(
        backend, spec, STRONG, _KNOWN, _abilities, reason=lambda _sandbox: _reason(backend)
    )


def _reason(backend: GvisorBackend) -> str:
    why = backend.without_process_images
    return why and f"starts are slower: its process image did not work here: {why}"


def _abilities(sandbox: GvisorSandbox, protections: tuple[Protection, ...]) -> Iterable[Capability]:
    assert sandbox.network is not None
    yield from reports.each_of(_ALWAYS)
    yield from reports.of_limits(_LIMITS, protections)
    if host().trusted_root:
        yield Capability(can.MEMORY_SNAPSHOT, True, sandbox.program.restores)
    else:
        yield Capability(can.MEMORY_SNAPSHOT, False, NO_MEMORY)
    yield from reports.never(NEVER)
    yield from of_rules(_OF_RULES, sandbox.network.change)
    yield _attaches(sandbox)


def _attaches(sandbox: GvisorSandbox) -> Capability:
    """Found by doing it: the way in differs between releases of gVisor."""
    try:
        sandbox.attach(Mount("/mnt/probe"))
    except (RingfenceError, OSError) as exc:
        return Capability(can.ATTACH, False, f"a mount was refused: {exc}")
    return Capability(can.ATTACH, True)
