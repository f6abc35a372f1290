"""Which tiers can be had here, and where not, why: asked of the backends."""

from __future__ import annotations

from ..errors import BackendUnavailable, InvalidRequest, SandboxNotSupported
from ..model.execution.execution import TierSupport
from ..model.spec import TIERS, SandboxSpec
from ..sessions import selection

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..sessions.manager import SessionManager


def support(manager: SessionManager, tier: str, preferred: str = "") -> TierSupport:
    maker = manager.maker
    reports = {name: maker.report(name) for name in maker.backends}
    spec = SandboxSpec(tier=tier)
    try:
        return TierSupport(tier, True, selection.choose(spec, reports, preferred))
    except (BackendUnavailable, InvalidRequest) as exc:
        return TierSupport(tier, False, reason=exc.message)


def all_tiers(manager: SessionManager, preferred: str = "") -> tuple[TierSupport, ...]:
    """Every tier; `preferred` names the backend of tier strong."""
    return tuple(support(manager, tier, preferred if tier == "strong" else "") for tier in TIERS)


def choose(manager: SessionManager, tier: str, preferred: str = "") -> str:
    """The backend of a tier; one that cannot be had is refused at once and in words.

    Raises:
        SandboxNotSupported: It cannot.
    """
    try:
        # It tries no more backends than it must: to try one may take as long as a boot.
        return manager.maker.choose(SandboxSpec(tier=tier), preferred)
    except (BackendUnavailable, InvalidRequest) as exc:
        hint = (
            "run `ringfence doctor` for this host's lacks; `serve --backend` chooses the backends"
        )
        raise SandboxNotSupported(exc.message, field="tier", hint=hint) from exc
