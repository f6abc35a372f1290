"""From a policy to what the kernel of a sandbox's network namespace is told.

The first of two judgements, and the coarser one: what it lets through reaches the egress process,
which decides; what it does not is refused by the kernel at once.
"""

from __future__ import annotations

from ..model.base.model import Model
from ..model.base.record import dataclass
from ..model.net import hosts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..model.net.network import NetworkPolicy

    _Ports = dict[str, set[tuple[int, int]]]  # ranges of ports by network

# Where names live inside: benchmarking ranges (RFC 2544, RFC 5180), which nobody routes.
SYNTHETIC = ("198.18.0.0/15", "2001:2::/48")
PROXY = ("198.18.0.1", 3128)
RESOLVER = ("127.0.0.53", 53)
LISTEN_PORT = 1021  # below 1024: no guest can bind it

LOOPBACK = ("127.0.0.0/8", "::1/128")
_EVERYWHERE = ("0.0.0.0/0", "::/0")
_MOST_PAIRS = 64


@dataclass(frozen=True, eq=False, repr=False)
class Redirect(Model):
    """TCP to `network`, ports `first` to `last`, goes to the listener."""

    network: str
    first: int
    last: int


@dataclass(frozen=True, eq=False, repr=False)
class Redirects(Model):
    """Redirects for one policy.

    Attributes:
        routes: Networks made local, so that the kernel has a route for connections to them.
        loopback: To apply first: the resolver, and rules for the host's own loopback.
        others: To apply after a rule that ends the chain for all of `LOOPBACK`.
    """

    routes: tuple[str, ...] = ()
    loopback: tuple[Redirect, ...] = ()
    others: tuple[Redirect, ...] = ()


def redirects_of(policy: NetworkPolicy) -> Redirects:
    """The routes and redirects that `policy` needs: none for no network."""
    if policy.is_none or policy.is_unrestricted:
        return Redirects()
    names: set[tuple[int, int]] = set()
    loopback: _Ports = {}
    places: _Ports = {}
    for host, ports in allowed(policy):
        if host == hosts.PUBLIC:
            names.update(hosts.port_ranges(ports))
            for everywhere in _EVERYWHERE:
                _add(places, everywhere, ports)
        elif not hosts.looks_like_address(host):
            names.update(hosts.port_ranges(ports))
        elif not _is_loopback(host):
            _add(places, host, ports)
        elif ports and "/" not in host:
            # Loopback inside is the sandbox's own, but for what a rule names to the port.
            _add(loopback, host, ports)
    if policy.learn:
        names.update(hosts.EVERY_PORT)
        for everywhere in _EVERYWHERE:
            _add(places, everywhere, "")
    reached: _Ports = dict.fromkeys(SYNTHETIC, names)
    for network, spans in places.items():
        reached[network] = spans | reached.get(network, set())
    others = _pairs(reached)
    if len(others) > _MOST_PAIRS:  # only what has a route comes here at all
        others = [Redirect(everywhere, *hosts.EVERY_PORT[0]) for everywhere in _EVERYWHERE]
    return Redirects(
        routes=tuple(reached),
        loopback=(_single(*RESOLVER), *_pairs(loopback)),
        others=(_single(*PROXY), *others),
    )


def allowed(policy: NetworkPolicy) -> list[tuple[str, str]]:
    """Host and ports of every rule that allows."""
    texts = map(hosts.split_rule, policy.allowed_hosts)
    return [
        *((host, ports) for denies, host, ports in texts if not denies),
        *((rule.host, rule.ports) for rule in policy.rules if not rule.denies),
    ]


def _add(places: _Ports, host: str, ports: str) -> None:
    places.setdefault(_network(host), set()).update(hosts.port_ranges(ports))


def _pairs(places: _Ports) -> list[Redirect]:
    exact = [Redirect(net, *span) for net, spans in places.items() for span in _merged(spans)]
    if len(exact) <= _MOST_PAIRS:
        return exact
    return [Redirect(net, *hosts.EVERY_PORT[0]) for net, spans in places.items() if spans]


def _merged(spans: set[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    if len(spans) < 2:
        return spans
    return hosts.port_ranges(hosts.read_ports(hosts.write_ranges(spans), "ports"))


def _single(address: str, port: int) -> Redirect:
    return Redirect(_network(address), port, port)


def _network(host: str) -> str:
    """A canonical address or network as a network."""
    return host if "/" in host else f"{host}/{128 if ':' in host else 32}"


def _is_loopback(host: str) -> bool:
    """Return whether a canonical address or network lies entirely in loopback."""
    return host == "::1" or host.startswith("127.")  # a network wider than /8 starts at 126.
