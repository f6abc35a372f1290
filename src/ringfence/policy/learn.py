"""From what was used to the smallest policy that allows it."""

from __future__ import annotations

from ..errors import InvalidRequest
from ..model.net import hosts
from ..model.net.network import NetworkPolicy
from . import addresses

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..model.net.netlog import NetworkEvent


def learned_policy(events: Iterable[NetworkEvent]) -> NetworkPolicy:
    """Exactly the hosts and ports that were reached: no wildcard, no port that was not used.

    A name whose address was let through by a rule for addresses needs that address named as well.
    What was refused, or only resolved, is left out.
    """
    used: dict[str, set[int]] = {}
    for event in events:
        if event.allowed and event.port and event.kind != "dns":
            for host in _hosts(event):
                used.setdefault(host, set()).add(event.port)
    texts = [hosts.write_rule(False, host, _written(used[host])) for host in sorted(used)]
    return NetworkPolicy(allowed_hosts=tuple(texts))


def _hosts(event: NetworkEvent) -> list[str]:
    try:
        found = [hosts.read_host(event.host, "host")] if event.host else []
    except InvalidRequest:
        return []  # no rule can say it
    try:
        address = addresses.read(event.address)
    except ValueError:
        return found
    if not found or addresses.special(address) or _is_for_addresses(event.rule):
        found.append(str(address))
    return found


def _is_for_addresses(rule: str) -> bool:
    try:
        return hosts.looks_like_address(hosts.read_rule(rule, "rule")[1])
    except InvalidRequest:
        return False


def _written(ports: set[int]) -> str:
    return hosts.read_ports(",".join(str(port) for port in ports), "ports")
