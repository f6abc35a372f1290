"""Which rules of a policy open the server's host, or networks that only its neighbours reach.

Pure judgement, in the terms of `policy.network.Judge`: a rule is refused here when the egress process
would let a special address through because of it. A wide network, such as `0.0.0.0/0`, is none of
these: it opens public addresses only.
"""

from __future__ import annotations

from ipaddress import ip_network

from ..model.base import checks
from ..model.net import hosts
from ..model.net.rules import NetworkRule
from . import addresses

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..model.net.network import NetworkPolicy
    from .addresses import Network

_LOOPBACK_NAMES = frozenset(
    ("localhost", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback", "localdomain")
)
_LOOPBACK_DOMAINS = (".localhost", ".localdomain", ".localdomain4", ".localdomain6")


class HostNetworks:
    """The parts of the host and the networks around it that an administrator opens to users.

    Args:
        listed: Rules in text form, `HOST[:PORTS]`. The host's own addresses and cloud metadata must
            be listed alone: a network around them does not list them.

    Raises:
        InvalidRequest: An entry is not a rule, or denies.
    """

    def __init__(self, listed: Sequence[str] = ()) -> None:
        self._listed: list[tuple[Network | str, hosts.Ranges]] = []
        for i, text in enumerate(listed):
            field = f"host_networks[{i}]"
            rule = NetworkRule.parse(text, field)
            if rule.denies:
                checks.refuse(field, "deny rules are not allowed in this list: remove the `!`")
            host = ip_network(rule.host) if rule.is_address else rule.host
            self._listed.append((host, hosts.port_ranges(rule.ports)))

    def opened(self, policy: NetworkPolicy, own: Sequence[Network]) -> tuple[str, str] | None:
        """The field of the first rule that opens what is not listed, and what it opens.

        Args:
            own: The host's own addresses and networks.
        """
        for field, host, ports in _allowing(policy):
            if what := self._opened_by(host, hosts.port_ranges(ports), own):
                return field, f"{host} ({what})"
        return None

    def _opened_by(self, host: str, ports: hosts.Ranges, own: Sequence[Network]) -> str:
        if not hosts.looks_like_address(host):
            return "loopback" if _is_loopback(host) and not self._lists(host, ports) else ""
        network = ip_network(host)
        for place, what in _places(network, own):
            if not self._lists(place, ports):
                return what
        kind = addresses.special_network(network)
        return kind if kind and not self._covers(network, ports) else ""

    def _lists(self, wanted: Network | str, ports: hosts.Ranges) -> bool:
        """Return whether exactly this destination is listed."""
        return any(host == wanted and _within(ports, open_) for host, open_ in self._listed)

    def _covers(self, wanted: Network, ports: hosts.Ranges) -> bool:
        """Return whether this network, or one around it, is listed."""
        return any(
            not isinstance(host, str) and _holds(host, wanted) and _within(ports, open_)
            for host, open_ in self._listed
        )


def _allowing(policy: NetworkPolicy) -> Iterator[tuple[str, str, str]]:
    """Field, host and ports of each rule that allows."""
    for i, text in enumerate(policy.allowed_hosts):
        denies, host, ports = hosts.split_rule(text)
        if not denies:
            yield f"allowed_hosts[{i}]", host, ports
    for i, rule in enumerate(policy.rules):
        if not rule.denies:
            yield f"rules[{i}].host", rule.host, rule.ports


def _is_loopback(name: str) -> bool:
    plain = name.removeprefix("*.")
    return plain in _LOOPBACK_NAMES or f".{plain}".endswith(_LOOPBACK_DOMAINS)


def _places(network: Network, own: Sequence[Network]) -> Iterator[tuple[Network, str]]:
    """Yield the parts of `network` that must be listed alone, each with its kind."""
    for address in addresses.METADATA:
        if address in network and addresses.names_special(network, address):
            yield ip_network(address), "cloud metadata"
    single = network.prefixlen == network.max_prefixlen
    if not (single or addresses.is_place(network)):
        return
    inner = addresses.embedded(network[0]) if single else ()
    reached = (network, *map(ip_network, inner))
    for each in own:
        if not each[0].is_loopback and any(each.overlaps(some) for some in reached):
            yield network if single else each, "the server's own address"


def _holds(network: Network, inner: Network) -> bool:
    return network.version == inner.version and inner.subnet_of(network)  # type: ignore[arg-type]


def _within(wanted: hosts.Ranges, ports: hosts.Ranges) -> bool:
    return all(any(low <= first and last <= high for low, high in ports) for first, last in wanted)
