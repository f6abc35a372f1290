"""From what was used to the smallest policy that allows it."""

from __future__ import annotations

from ..errors import InvalidRequest
from ..model import hosts
from ..model.network import MOST_RULES, NetworkPolicy
from . import addresses

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..model.netlog import NetworkEvent


class Learner:
    """Remembers what was reached, whatever the record of it forgets.

    Attributes:
        complete: No more than a policy may have rules; what came after that is not in it.
    """

    def __init__(self) -> None:
        self.complete = True
        self._used: dict[str, set[int]] = {}

    def add(self, event: NetworkEvent) -> None:
        """Note one event; what was refused, or only resolved, is left out."""
        if not event.allowed or not event.port or event.kind == "dns":
            return
        for host in _hosts(event):
            if host not in self._used and len(self._used) == MOST_RULES:
                self.complete = False
            else:
                self._used.setdefault(host, set()).add(event.port)

    def policy(self) -> NetworkPolicy:
        """Exactly the hosts and ports that were reached: no wildcard, no port that was not used.

        A name whose address was let through by a rule for addresses needs that address named as
        well.
        """
        texts = [
            hosts.write_rule(False, host, _written(self._used[host])) for host in sorted(self._used)
        ]
        return NetworkPolicy(allowed_hosts=tuple(texts))


def learned_policy(events: Iterable[NetworkEvent]) -> NetworkPolicy:
    """The smallest policy that allows what these events say was reached."""
    learner = Learner()
    for event in events:
        learner.add(event)
    return learner.policy()


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
