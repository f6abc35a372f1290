"""From a policy to what the kernel of a sandbox's network namespace is told.

The first of two judgements, and the coarser one: what it lets through reaches the egress process,
which decides; what it does not is refused by the kernel at once.
"""

from __future__ import annotations

from ipaddress import ip_network

from ..model import hosts
from ..model.noun import Noun

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import dataclass

    from ..model.network import NetworkPolicy
    from .addresses import Network
else:
    from ..model.record import dataclass

# Where names live inside: benchmarking ranges (RFC 2544, RFC 5180), which nobody routes.
SYNTHETIC = ("198.18.0.0/15", "2001:2::/48")
PROXY = ("198.18.0.1", 3128)
RESOLVER = ("127.0.0.53", 53)
LISTEN_PORT = 1021  # below 1024: no guest can bind it

LOOPBACK = ("127.0.0.0/8", "::1/128")
_EVERYWHERE = ("0.0.0.0/0", "::/0")
_MOST_PAIRS = 64


@dataclass(frozen=True, eq=False, repr=False)
class Redirect(Noun):
    """TCP to `network`, ports `first` to `last`, goes to the listener."""

    network: str
    first: int
    last: int


@dataclass(frozen=True, eq=False, repr=False)
class Redirects(Noun):
    """What one policy needs.

    Attributes:
        routes: Networks made local, so that a connection to them has somewhere to go.
        loopback: To apply first: the resolver, and what rules name of the host's own loopback.
        others: To apply after a rule that ends the chain for all of `LOOPBACK`.
    """

    routes: tuple[str, ...] = ()
    loopback: tuple[Redirect, ...] = ()
    others: tuple[Redirect, ...] = ()


def redirects_of(policy: NetworkPolicy) -> Redirects:
    """The routes and redirects that `policy` needs: none for no network."""
    if policy.is_none or policy.is_unrestricted:
        return Redirects()
    allows = [rule for rule in policy.all_rules if not rule.denies]
    names = _Ports()
    places: dict[str, _Ports] = {}
    loopback: dict[str, _Ports] = {}
    for rule in allows:
        ranges = hosts.port_ranges(rule.ports)
        if not rule.is_address:
            names.add(ranges)
        elif not _is_loopback(ip_network(rule.host)):
            places.setdefault(str(ip_network(rule.host)), _Ports()).add(ranges)
        elif rule.ports and "/" not in rule.host:
            # Loopback inside is the sandbox's own, but for what a rule names to the port.
            loopback.setdefault(str(ip_network(rule.host)), _Ports()).add(ranges)
    if policy.learn:
        names.add(hosts.EVERY_PORT)
        for everywhere in _EVERYWHERE:
            places.setdefault(everywhere, _Ports()).add(hosts.EVERY_PORT)
    reached = {**dict.fromkeys(SYNTHETIC, names)}
    for network, ports in places.items():
        reached[network] = ports.joined(reached[network]) if network in reached else ports
    others = _pairs(reached)
    if len(others) > _MOST_PAIRS:  # only what has a route comes here at all
        others = [Redirect(everywhere, *hosts.EVERY_PORT[0]) for everywhere in _EVERYWHERE]
    return Redirects(
        routes=tuple(reached),
        loopback=(_single(*RESOLVER), *_pairs(loopback)),
        others=(_single(*PROXY), *others),
    )


class _Ports:
    """A set of ports."""

    def __init__(self) -> None:
        self.ranges: hosts.Ranges = ()

    def add(self, ranges: hosts.Ranges) -> None:
        merged = hosts.read_ports(hosts.write_ranges((*self.ranges, *ranges)), "ports")
        self.ranges = hosts.port_ranges(merged)

    def joined(self, other: _Ports) -> _Ports:
        both = _Ports()
        both.add((*self.ranges, *other.ranges))
        return both


def _pairs(ports: dict[str, _Ports]) -> list[Redirect]:
    exact = [Redirect(net, *span) for net, some in ports.items() for span in some.ranges]
    if len(exact) <= _MOST_PAIRS:
        return exact
    return [Redirect(net, *hosts.EVERY_PORT[0]) for net, some in ports.items() if some.ranges]


def _single(address: str, port: int) -> Redirect:
    return Redirect(str(ip_network(address)), port, port)


def _is_loopback(network: Network) -> bool:
    return any(
        network.version == each.version and network.subnet_of(each)  # type: ignore[arg-type]
        for each in map(ip_network, LOOPBACK)
    )
