"""From what was used to the smallest policy that allows it."""

from __future__ import annotations

from ..model.network import NetworkPolicy
from ..model.rules import NetworkRule
from . import addresses

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..model.netlog import NetworkEvent


def learned_policy(events: Iterable[NetworkEvent]) -> NetworkPolicy:
    """Exactly the hosts and ports that were reached: no wildcard, no port that was not used.

    A name that led to a special address needs that address named as well. What was refused, or only
    resolved, is left out.
    """
    used: dict[str, set[int]] = {}
    for event in events:
        if event.allowed and event.port and event.kind != "dns":
            for host in _hosts(event):
                used.setdefault(host, set()).add(event.port)
    texts = [
        NetworkRule(host, ",".join(str(port) for port in sorted(ports))).text
        for host, ports in sorted(used.items())
    ]
    return NetworkPolicy(allowed_hosts=tuple(texts))


def _hosts(event: NetworkEvent) -> list[str]:
    named = [event.host] if event.host else []
    try:
        address = addresses.read(event.address)
    except ValueError:
        return named
    if not named or addresses.special(address):
        return [*named, str(address)]
    return named
