"""Which backend makes a sandbox. Pure: reports in, a name or a reason for every refusal out."""

from __future__ import annotations

from ..backends.optional import Selective
from ..errors import BackendUnavailable, InvalidRequest
from ..model import capabilities as can

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ..backends.protocol import Backend
    from ..model.acquire import RequiredCapabilities
    from ..model.capabilities import BackendReport
    from ..model.spec import SandboxSpec

NOT_TRIED = ["not tried"]
_DOCTOR = "run `ringfence doctor` to see what this host allows"


def choose(
    spec: SandboxSpec, reports: Mapping[str, BackendReport], preferred: str = ""
) -> tuple[str, ...]:
    """The backends that can do it, the first one first; of a preferred one, only that.

    Raises:
        InvalidRequest: There is no backend of the preferred name.
        BackendUnavailable: None can do it; the message says of each why not.
    """
    check_known(preferred, reports)
    refusals = {name: refusal(spec, report) for name, report in reports.items()}
    able = tuple(name for name in reports if not refusals[name] and preferred in ("", name))
    if able:
        return able
    has_tier = any(spec.tier in each.tiers or not each.available for each in reports.values())
    hint = _DOCTOR if has_tier else _name_one(spec)
    raise none_can(refusals, preferred, hint)


def check_known(preferred: str, names: Iterable[str]) -> None:
    if preferred and preferred not in names:
        known = ", ".join(names)
        raise InvalidRequest(
            f"no backend {preferred!r}", field="preferred_backend", hint=f"one of {known}"
        )


def none_can(
    refusals: Mapping[str, Sequence[str]], preferred: str, hint: str
) -> BackendUnavailable:
    """Make the error for a spec that no backend accepts; a backend without a reason could have."""
    told = "; ".join(f"{name}: {', '.join(why) or 'could'}" for name, why in refusals.items())
    if preferred and any(not why for why in refusals.values()):
        hint = "another backend can: omit preferred_backend"
    elif preferred and NOT_TRIED in (*refusals.values(),):
        hint = "omit preferred_backend: another backend may be able to"
    asked = f"the preferred backend {preferred!r} cannot" if preferred else "no backend can"
    return BackendUnavailable(f"{asked} make this sandbox: {told or 'there is none'}", hint=hint)


def check_profile(spec: SandboxSpec, backends: Mapping[str, Backend]) -> None:
    """Refuse a profile that no backend here ever has."""
    every = backends.values()
    known = sorted({n for each in every if isinstance(each, Selective) for n in each.profile_names})
    if known and spec.profile not in known and all(isinstance(each, Selective) for each in every):
        raise InvalidRequest(
            f"unknown profile {spec.profile!r}", field="profile", hint=f"one of {', '.join(known)}"
        )


def hint_beforehand(spec: SandboxSpec, backends: Mapping[str, Backend]) -> str:
    """Choose the hint where every backend of the tier refuses: `doctor` only if the host is a cause."""
    having = [each for each in backends.values() if spec.tier in each.tiers]
    if not having:
        return _name_one(spec)
    if not all(beforehand(spec, each) for each in having):
        return _DOCTOR
    if spec.network.is_unrestricted:
        return "list the destinations in the policy, or use another tier"
    return "omit the option, or use another tier"


def _name_one(spec: SandboxSpec) -> str:
    return f"name a backend that has tier {spec.tier}, as `ringfence serve --backend` does"


def refusal(spec: SandboxSpec, report: BackendReport) -> list[str]:
    """Every reason why a backend cannot make this sandbox, as far as its report tells."""
    if not report.available:
        return [report.reason or "not available here"]
    why = {each.name: each.reason for each in report.capabilities}
    found = [
        f"no {name}" + (f": {why[name]}" if why.get(name) else "")
        for name in needed(spec)
        if not report.can(name)
    ]
    if spec.tier not in report.tiers:
        found.insert(0, _not_its(spec.tier, report.tiers))
    return found


def beforehand(spec: SandboxSpec, backend: Backend) -> list[str]:
    """Every reason why a backend makes no such sandbox on any host; found without trying it.

    A probe of a microVM boots a machine, and of gVisor starts one: who asks for what neither can do
    does not wait for that.
    """
    found = [] if spec.tier in backend.tiers else [_not_its(spec.tier, backend.tiers)]
    if isinstance(backend, Selective):
        if spec.profile not in backend.profile_names:
            known = ", ".join(backend.profile_names)
            found.append(f"profile {spec.profile} is not one of its profiles ({known})")
        found += [f"no {n}: {backend.never[n]}" for n in needed(spec) if n in backend.never]
        found += filter(None, [backend.refuses(spec)])
    return found


def _not_its(tier: str, tiers: tuple[str, ...]) -> str:
    return f"tier {tier} is not one of its tiers ({' and '.join(tiers) or 'none'})"


def needed(spec: SandboxSpec) -> list[str]:
    """The capabilities that a spec cannot do without."""
    network = spec.network
    wanted = [
        can.NETWORK_UNRESTRICTED
        if network.is_unrestricted
        else can.NETWORK_NONE
        if network.is_none
        else can.NETWORK_HOSTS
    ]
    if spec.mounts or spec.memory_dir or spec.template != "default":
        wanted.append(can.MOUNT)
    if spec.deny:
        wanted.append(can.DENIED_PATHS)
    if spec.secrets:
        wanted.append(can.SECRETS)
    if spec.image is not None:
        wanted.append(can.IMAGE)
    for field, capability in can.LIMITED_BY.items():
        let_go = {capability, "*"}.intersection(spec.allow_degraded)
        if getattr(spec.limits, field) is not None and not let_go:
            wanted.append(capability)
    return wanted


def check_required(spec: SandboxSpec, required: RequiredCapabilities) -> None:
    """Refuse a request that contradicts itself before anything is made for it.

    Raises:
        InvalidRequest: naming the requirement that the spec itself rules out.
    """
    if required.network is spec.network.is_none:
        asked, has = ("a network", "none") if required.network else ("no network", "one")
        raise InvalidRequest(
            f"{asked} is required, and the spec has {has}",
            field="required.network",
            hint="change spec.network",
        )
    least, most = required.minimum_memory_bytes, spec.limits.memory_bytes
    if least is not None and most is not None and most < least:
        raise InvalidRequest(
            f"{least} bytes are required, and the spec allows {most}",
            field="required.minimum_memory_bytes",
        )
