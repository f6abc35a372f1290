"""Plants canaries, runs every probe against sandboxes of this host, and judges."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from ..backends.registry import new_backend
from ..errors import NetworkPolicyError, Unsupported
from . import outside
from .again import seen_from_the_host
from .canaries import Canaries
from .inside import Found, registered, run_in_copy, run_inside
from .probes.ipc import SOCKET_OF_OWN
from .probes.kit import BOTH, COPIED, LIMITED, MOUNTED, PLAIN, Probe
from .result import ESCAPED, HELD, INCONCLUSIVE, NOT_APPLICABLE, ProbeResult, worst
from .scope import OWN_KERNEL, why_not

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from ..backends.protocol import Backend
    from .lab import Lab
    from .outside.register import OutsideProbe

__all__ = ["ProbeResult", "run_attack"]
_AT_ONCE = 4
_SOCKET = "ipc.socket-of-own"


def run_attack(
    emit: Callable[[ProbeResult], None] | None = None, backend: Backend | None = None
) -> list[ProbeResult]:
    """Run every probe, one result each, in about ten seconds.

    Args:
        emit: Called with each result as soon as it is known.
        backend: What is attacked; None is a native backend of its own, closed afterwards.
    """
    from .lab import Lab

    results: list[ProbeResult] = []

    def tell(result: ProbeResult) -> None:
        results.append(result)
        if emit:
            emit(result)

    with Canaries() as canaries:
        # Started with the canaries in place: what leaks into its processes is found.
        attacked = backend or new_backend("native")
        try:
            lab = Lab(attacked, canaries)
            for attack in (attack_from_inside, attack_from_outside):
                for result in attack(lab):
                    tell(result)
        finally:
            if backend is None:
                attacked.close()
    return results


def attack_from_outside(lab: Lab) -> Iterator[ProbeResult]:
    """The probes that run on the host: one by one, but together those that only wait."""
    probes = []
    for probe in outside.registered().values():
        if why := why_not(probe.id, lab.backend.name):
            yield _left_out(probe, why)
        else:
            probes.append(probe)
    for probe in probes:
        if not probe.waits:
            yield probe.attack(lab)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield from pool.map(lambda probe: probe.attack(lab), [p for p in probes if p.waits])


def attack_from_inside(lab: Lab) -> list[ProbeResult]:
    """The probes that run inside, in four kinds of sandbox: plain, with mounts, with a policy, and forks."""
    everything = registered()
    left_out = {id: why for id in everything if (why := why_not(id, lab.backend.name))}
    probes = {id: probe for id, probe in everything.items() if id not in left_out}
    found: dict[str, list[ProbeResult]] = {id: [] for id in probes}
    for kind in (PLAIN, MOUNTED, LIMITED, COPIED):
        chosen = [id for id, probe in probes.items() if _belongs(probe, kind)]
        for id, result in _run(lab, kind, chosen).items():
            found[id].append(_judge(probes[id], kind, *result))
    none_ran = [_left_out(everything[id], why) for id, why in left_out.items()]
    return [*(worst(results) for results in found.values()), *none_ran]


def _belongs(probe: Probe, kind: str) -> bool:
    """A policy opens a way out: whatever must not be reached without one is tried again."""
    if kind == LIMITED and probe.area == "network" and probe.where in (PLAIN, BOTH):
        return True
    if kind == COPIED:
        kind = PLAIN
    return probe.where == kind or (probe.where == BOTH and kind != LIMITED)


def _run(lab: Lab, kind: str, chosen: list[str]) -> Found:
    context = dict(lab.canaries.context)
    if kind == PLAIN:
        with lab.sandbox() as sandbox:
            context |= lab.init_of(sandbox)
            return seen_from_the_host(sandbox, run_inside(sandbox, chosen, context))
    if kind == LIMITED:
        return _run_limited(lab, chosen, context)
    if kind == COPIED:
        try:
            with lab.sandbox() as sandbox:
                return run_in_copy(sandbox, chosen, context, seen_from_the_host)
        except Unsupported:
            return {}  # so no process can come by a fork
    try:
        mounted = lab.mounted()
    except Unsupported as exc:
        only_here = [id for id in chosen if registered()[id].where == MOUNTED]
        return dict.fromkeys(only_here, (INCONCLUSIVE, f"no mounts here: {exc}"))
    with mounted as sandbox:
        context |= {**lab.places(sandbox), **lab.init_of(sandbox)}
        found = seen_from_the_host(sandbox, run_inside(sandbox, chosen, context))
    if _SOCKET in found and lab.backend.name in OWN_KERNEL:
        # A kernel of the guest's own may have sockets that no program of the host can connect to.
        found[_SOCKET] = _socket_on_host(lab)
    return found


def _socket_on_host(lab: Lab) -> tuple[str, str]:
    there = os.path.lexists(os.path.join(lab.canaries.rw, SOCKET_OF_OWN))
    return (ESCAPED, "it is on the host") if there else (HELD, "none came to be on the host")


def _run_limited(lab: Lab, chosen: list[str], context: dict[str, Any]) -> Found:
    """Under a policy. Where none can be enforced it is refused, and there is no way past it to be tried."""
    try:
        sandbox = lab.limited()
    except (NetworkPolicyError, Unsupported) as exc:
        only_here = [id for id in chosen if registered()[id].where == LIMITED]
        return dict.fromkeys(only_here, (INCONCLUSIVE, f"no network policy here: {exc}"))
    with sandbox:
        return run_inside(sandbox, chosen, context)


def _left_out(probe: Probe | OutsideProbe, why: str) -> ProbeResult:
    return _judge(probe, "", NOT_APPLICABLE, why)


def _judge(probe: Probe | OutsideProbe, kind: str, status: str, evidence: str) -> ProbeResult:
    return ProbeResult(
        id=probe.id,
        area=probe.area,
        severity=probe.severity,
        description=probe.description,
        status=status,
        evidence=evidence,
        control=probe.control,
        where=kind,
    )
