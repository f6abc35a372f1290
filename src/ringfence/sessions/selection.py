"""Which backend makes a sandbox. Pure: reports in, a name or a reason for every refusal out."""

from __future__ import annotations

from ..errors import BackendUnavailable, InvalidRequest
from ..model import capabilities as can

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..model.acquire import RequiredCapabilities
    from ..model.capabilities import BackendReport
    from ..model.spec import SandboxSpec


def choose(
    spec: SandboxSpec, reports: Mapping[str, BackendReport], preferred: str = ""
) -> tuple[str, ...]:
    """The backends that can do it, the first one first; of a preferred one, only that.

    Raises:
        InvalidRequest: There is no backend of the preferred name.
        BackendUnavailable: None can do it; the message says of each why not.
    """
    if preferred and preferred not in reports:
        known = ", ".join(reports)
        raise InvalidRequest(
            f"no backend {preferred!r}", field="preferred_backend", hint=f"one of {known}"
        )
    refusals = {name: refusal(spec, report) for name, report in reports.items()}
    able = tuple(name for name in reports if not refusals[name] and preferred in ("", name))
    if able:
        return able
    told = "; ".join(f"{name}: {', '.join(why) or 'could'}" for name, why in refusals.items())
    hint = "run `ringfence doctor` to see what this host allows"
    if preferred and any(not why for why in refusals.values()):
        hint = "another backend could: leave preferred_backend out"
    elif all(spec.tier not in report.tiers for report in reports.values()):
        hint = f"name a backend that has tier {spec.tier}, as `ringfence serve --backend` does"
    asked = f"the preferred backend {preferred!r} cannot" if preferred else "no backend can"
    raise BackendUnavailable(f"{asked} make this sandbox: {told or 'there is none'}", hint=hint)


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
        tiers = " and ".join(report.tiers) or "none"
        found.insert(0, f"tier {spec.tier} is not one of its tiers ({tiers})")
    return found


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
    if spec.mounts or spec.memory_dir:
        wanted.append(can.MOUNT)
    if spec.deny:
        wanted.append(can.DENIED_PATHS)
    if spec.secrets:
        wanted.append(can.SECRETS)
    if spec.template != "default" or spec.image is not None:
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
    if required.network and spec.network.is_none:
        raise InvalidRequest(
            "a network is required, and the spec has none",
            field="required.network",
            hint="give spec.network",
        )
    least, most = required.minimum_memory_bytes, spec.limits.memory_bytes
    if least is not None and most is not None and most < least:
        raise InvalidRequest(
            f"{least} bytes are required, and the spec allows {most}",
            field="required.minimum_memory_bytes",
        )
