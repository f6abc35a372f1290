"""Decisions of a network policy. Pure: the egress process asks and acts on the answer.

Deny wins, and the order of rules never matters. Nothing is allowed by default.
"""

from __future__ import annotations

from _socket import AF_INET, AF_INET6, inet_pton
from ipaddress import ip_network

from ..errors import InvalidRequest
from ..model.net import hosts
from ..model.net.paths import matches, read_path
from ..model.net.rules import NetworkRule
from . import addresses

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ..model.net.network import NetworkPolicy
    from ..model.net.rules import Credential
    from .addresses import Address, Network

    _Key = str | tuple[int, int, int]  # a name; version, length of the prefix, and prefix

_LEARNING = "learning mode, and no rule denies the destination"


class Decision:
    """An answer, and why; true when it allows.

    Attributes:
        reason: One line for a log or a refusal. It may quote what the client sent.
        rule: The rule that decided, in text form; empty when it was none.
    """

    __slots__ = ("allowed", "reason", "rule")

    def __init__(self, allowed: bool, reason: str, rule: str = "") -> None:
        self.allowed, self.reason, self.rule = allowed, reason, rule

    def __bool__(self) -> bool:
        return self.allowed

    def __repr__(self) -> str:
        return f"Decision({self.allowed}, {self.reason!r}, {self.rule!r})"


class _Rule:
    __slots__ = ("network", "ranges", "rule", "text")

    def __init__(self, rule: NetworkRule) -> None:
        self.rule = rule
        self.text = rule.text
        self.ranges = hosts.port_ranges(rule.ports)
        self.network: Network | None = ip_network(rule.host) if rule.is_address else None

    def covers(self, port: int) -> bool:
        return any(first <= port <= last for first, last in self.ranges)

    @property
    def denies_all(self) -> bool:
        """True if the rule denies the connection itself, not only some requests."""
        return self.rule.denies and not self.rule.is_conditional

    def takes(self, method: str, path: str | None) -> bool:
        """Return whether the rule applies to an HTTP request; None is a path that cannot be
        read.
        """
        rule = self.rule
        if rule.methods and method not in rule.methods:
            return False
        if not rule.paths:
            return True
        if path is None:
            return rule.denies
        if rule.denies:  # a server that ignores case must not make a way around it
            return any(matches(each.lower(), path.lower()) for each in rule.paths)
        return any(matches(each, path) for each in rule.paths)


class _Shelf:
    """Rules by name or network, each taken apart when it is first asked for: thousands take long."""

    __slots__ = ("_given", "_read")

    def __init__(self) -> None:
        self._given: dict[_Key, list[str | NetworkRule]] = {}
        self._read: dict[_Key, list[_Rule]] = {}

    def add(self, key: _Key, rule: str | NetworkRule) -> None:
        self._given.setdefault(key, []).append(rule)

    def get(self, key: _Key) -> list[_Rule]:
        if key not in self._given:
            return []
        found = self._read.get(key)
        if found is None:
            given = self._given[key]
            rules = [each if isinstance(each, NetworkRule) else _parse(each) for each in given]
            # Sorted, so that the rule a decision names does not depend on the order either.
            found = self._read[key] = sorted(map(_Rule, rules), key=lambda each: each.text)
        return found


def _parse(text: str) -> NetworkRule:
    return NetworkRule.parse(text)


class Judge:
    """A policy compiled for decisions.

    Args:
        policy: `limited`.
        own: The host's own addresses, which are refused as loopback is; a zone is ignored.

    Raises:
        ValueError: The policy is unrestricted, which leaves nothing to decide.
    """

    def __init__(self, policy: NetworkPolicy, own: Iterable[str] = ()) -> None:
        if not policy.is_limited:
            raise ValueError("only a limited policy can be judged")
        self.policy = policy
        self._own = frozenset(addresses.read(text.partition("%")[0]) for text in own)
        self._exact, self._below, self._networks, self._public = (_Shelf() for _ in range(4))
        lengths: set[tuple[int, int]] = set()
        for text in policy.allowed_hosts:
            self._shelve(hosts.split_rule(text)[1], text, lengths)
        for rule in policy.rules:
            self._shelve(rule.host, rule, lengths)
        self._lengths = sorted(lengths)  # of prefixes, by version

    def _shelve(self, host: str, rule: str | NetworkRule, lengths: set[tuple[int, int]]) -> None:
        if host == hosts.PUBLIC:
            self._public.add(host, rule)
        elif hosts.looks_like_address(host):
            version, length, prefix = _prefix(host)
            lengths.add((version, length))
            self._networks.add((version, length, prefix), rule)
        elif host.startswith("*."):
            self._below.add(host[2:], rule)
        else:
            self._exact.add(host, rule)

    # -- names ------------------------------------------------------------------------------

    def name_allowed(self, name: str, port: int | None = None) -> Decision:
        """Decide whether a name may be used on `port`; without a port, on any port at all."""
        try:
            known = hosts.read_name(name, "name")
        except InvalidRequest as exc:
            return Decision(False, exc.message)
        return self._ports_allowed(known, self._for_name(known), port)

    def terminates(self, name: str, port: int) -> bool:
        """Return whether requests to `name` are judged one by one.

        Then the egress process ends TLS and cuts connections that are neither TLS nor plain HTTP.
        """
        return any(each.rule.needs_tls_termination for each in self._at(name, port))

    def is_conditional(self, name: str, port: int) -> bool:
        """Return whether methods or paths decide about requests to `name`."""
        return any(each.rule.is_conditional for each in self._at(name, port))

    def http_allowed(self, name: str, port: int, method: str, path: str) -> Decision:
        """Decide whether a request may be sent; `path` is its target, with or without a query."""
        decision = self.name_allowed(name, port)
        if not decision:
            return decision
        rules = self._at(name, port)
        read, why = _read(path) if any(each.rule.paths for each in rules) else (None, "")
        if why:
            return Decision(False, why)
        taking = [each for each in rules if each.takes(method, read)]
        for each in taking:
            if each.rule.denies:
                return Decision(False, f"denied by {each.text}", each.text)
        for each in taking:
            return Decision(True, f"allowed by {each.text}", each.text)
        if self.policy.learn:
            return Decision(True, _LEARNING)
        return Decision(False, f"no rule allows {method} of this path at {name}:{port}")

    def credentials(self, name: str, port: int, method: str, path: str) -> tuple[Credential, ...]:
        """Select the credentials for an allowed request over TLS: at most one for each header.

        The narrower rule wins: an exact name, a longer domain, a longer path.
        """
        if not self.http_allowed(name, port, method, path):
            return ()
        read, _ = _read(path)
        found: dict[str, Credential] = {}
        carrying = [each for each in self._at(name, port) if each.rule.credential]
        for each in sorted(carrying, key=_width):
            credential = each.rule.credential
            if credential is not None and each.takes(method, read):
                found.setdefault(credential.header, credential)
        return tuple(found.values())

    # -- addresses --------------------------------------------------------------------------

    def literal_allowed(self, ip: str, port: int) -> Decision:
        """Decide whether an address that the program named itself may be dialled."""
        try:
            address = addresses.read(ip)
        except ValueError:
            return Decision(False, f"{ip!r} is not an address")
        return self._address_allowed(address, port, named=False)

    def address_allowed(self, name: str | None, ip: str, port: int) -> Decision:
        """Decide whether `ip`, resolved from `name`, may be dialled; without a name, `ip` is a
        literal.

        Ask for every address right before dialling it.
        """
        if name is None:
            return self.literal_allowed(ip, port)
        by_name = self.name_allowed(name, port)
        if not by_name:
            return by_name
        try:
            address = addresses.read(ip)
        except ValueError:
            return Decision(False, f"{ip!r} is not an address")
        by_address = self._address_allowed(address, port, named=True)
        return by_address if not by_address or by_address.rule else by_name

    def _address_allowed(self, address: Address, port: int, *, named: bool) -> Decision:
        rules = [each for each in self._for_address(address) if each.covers(port)]
        inner = [each for v4 in addresses.embedded(address) for each in self._for_address(v4)]
        for each in (*rules, *(each for each in inner if each.covers(port))):
            if each.rule.denies:
                return Decision(False, f"{address} is denied by {each.text}", each.text)
        kind = self._special(address)
        for each in rules:
            if each.network is None or self._opens(each.network, address):
                return Decision(True, f"{address} is allowed by {each.text}", each.text)
        if kind:
            return Decision(False, f"{address} is {kind}, and no rule allows that network")
        if named:
            return Decision(True, "")
        if self.policy.learn:
            return Decision(True, _LEARNING)
        return Decision(False, f"no rule allows {address} port {port}")

    def _special(self, address: Address) -> str:
        if kind := addresses.special(address):
            return kind
        if not self._own.isdisjoint((address, *addresses.embedded(address))):
            return "the host's own address"
        return ""

    def _opens(self, network: Network, address: Address) -> bool:
        """Return whether a rule for `network`, which contains `address`, allows it."""
        if network.prefixlen == network.max_prefixlen:
            return True
        if addresses.special(address) and not addresses.names_special(network, address):
            return False
        if not self._own.isdisjoint(addresses.embedded(address)):
            return False
        return address not in self._own or addresses.is_place(network)

    # -- rules ------------------------------------------------------------------------------

    def _ports_allowed(self, what: str, rules: Sequence[_Rule], port: int | None) -> Decision:
        where = what if port is None else f"{what}:{port}"
        denies = [each for each in rules if each.denies_all]
        allows = [each for each in rules if not each.rule.denies]
        for each in denies:
            if port is not None and each.covers(port):
                return Decision(False, f"{where} is denied by {each.text}", each.text)
        for each in allows:
            if each.covers(port) if port is not None else _left(each, denies):
                return Decision(True, f"allowed by {each.text}", each.text)
        if self.policy.learn and (port is not None or _left(None, denies)):
            return Decision(True, _LEARNING)
        if port is None and denies and (allows or self.policy.learn):
            return Decision(False, f"{where} is denied by {denies[0].text}", denies[0].text)
        return Decision(False, f"no rule allows {where}")

    def _at(self, name: str, port: int) -> list[_Rule]:
        try:
            known = hosts.read_name(name, "name")
        except InvalidRequest:
            return []
        return [each for each in self._for_name(known) if each.covers(port)]

    def _for_name(self, name: str) -> list[_Rule]:
        found = [*self._exact.get(name), *self._public.get(hosts.PUBLIC)]
        _, dot, domain = name.partition(".")
        while dot:
            found += self._below.get(domain)
            _, dot, domain = domain.partition(".")
        return found

    def _for_address(self, address: Address) -> list[_Rule]:
        found = [] if self._special(address) else list(self._public.get(hosts.PUBLIC))
        value, width = int(address), address.max_prefixlen
        for version, bits in self._lengths:
            if version == address.version:
                shift = width - bits
                found += self._networks.get((version, bits, value >> shift << shift))
        return found


def _prefix(host: str) -> tuple[int, int, int]:
    """Version, length and prefix of a canonical address or network."""
    address, _, bits = host.partition("/")
    version, family, most = (6, AF_INET6, 128) if ":" in address else (4, AF_INET, 32)
    return version, int(bits or most), int.from_bytes(inet_pton(family, address), "big")


def _left(allow: _Rule | None, denies: Sequence[_Rule]) -> bool:
    """Return whether some port of `allow` (None: every port) is not denied."""
    taken = sorted(span for each in denies for span in each.ranges)
    for first, last in allow.ranges if allow is not None else hosts.EVERY_PORT:
        for low, high in taken:
            if low <= first <= high:
                first = high + 1
        if first <= last:
            return True
    return False


def _read(path: str) -> tuple[str | None, str]:
    try:
        return read_path(path), ""
    except InvalidRequest as exc:
        return None, exc.message


def _width(each: _Rule) -> tuple[bool, int, int, str]:
    longest = max((len(path) for path in each.rule.paths), default=0)
    return each.rule.host.startswith("*."), -len(each.rule.host), -longest, repr(each.rule)
