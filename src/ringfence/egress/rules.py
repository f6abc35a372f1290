"""The policy of a sandbox in the egress process: its decisions, and the connections that they cut."""

from __future__ import annotations

from ..linux.destination import packed
from ..model.net import hosts
from ..model.net.netlimits import NetworkLimits
from ..model.net.network import NetworkPolicy
from ..model.net.rules import Credential, NetworkRule
from ..policy.network import Decision, Judge
from ..policy.redirects import LISTEN_PORT, PROXY, RESOLVER
from .dns.names import PROXY_V6, Names
from .http.scrub import Secrets
from .meter import Meter, Rate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .commons import Commons
    from .tls.ca import Authority

_MOST_KEPT = 4096  # decisions remembered
_PROXY_PLACES = frozenset((packed(PROXY[0]), PROXY_V6))
_RESOLVER = packed(RESOLVER[0])


class Ruled:
    """A sandbox without its sockets.

    Args:
        settings: Of the host's request: policy, secrets, network_bytes, ca.
    """

    def __init__(
        self, commons: Commons, sandbox_id: str, settings: dict[str, Any], *, has_ipv6: bool
    ) -> None:
        self.id, self.commons, self.has_ipv6 = sandbox_id, commons, has_ipv6
        self.names = Names(sandbox_id)
        self.meter = Meter(commons.loop)
        self.connections: set[Any] = set()  # `Connection` and `Inbound`, which name this class
        self.authority: Authority | None = None
        self._is_closed = False
        self._given_authority: dict[str, str] | None = None
        self.apply(settings)

    def apply(self, settings: dict[str, Any]) -> None:
        """Take a policy; connections that it does not allow are cut.

        Raises:
            Exception: There is something wrong with it. All is as it was before.
        """
        policy = read_policy(settings["policy"])
        judge = Judge(policy, self.commons.own.texts)
        limits, names = policy.limits, exact_names(policy)
        authority = self.authority
        if settings["ca"] != self._given_authority:
            authority = self.commons.authority_of(settings["ca"])
        # From here on nothing can fail.
        self.policy, self.limits = policy, limits
        self.secrets = Secrets(settings["secrets"])
        self.authority, self._given_authority = authority, settings["ca"]
        self.meter.limit(settings["network_bytes"], limits.bytes_per_s)
        per_s = limits.connections_per_s
        self._arrivals = Rate(per_s, per_s or 0)
        self.names.pin(names)
        self._judge_by(judge)

    def rejudge(self) -> None:
        """The host's own addresses are others than before."""
        self._judge_by(Judge(self.policy, self.commons.own.texts))

    def _judge_by(self, judge: Judge) -> None:
        self.judge = judge
        self._names_judged: dict[tuple[str, int | None], Decision] = {}
        self._addresses_judged: dict[tuple[str | None, str, int], Decision] = {}
        self._terminated: dict[tuple[str, int], bool] = {}
        self.commons.resolver.forget(self.id)
        for connection in list(self.connections):
            connection.judge_again()

    def judge_name(self, name: str, port: int | None) -> Decision:
        """As `Judge.name_allowed`, remembered."""
        decision = self._names_judged.get((name, port))
        if decision is None:
            _bound(self._names_judged)
            decision = self._names_judged[name, port] = self.judge.name_allowed(name, port)
        return decision

    def terminates(self, name: str, port: int) -> bool:
        """As `Judge.terminates`, remembered."""
        known = self._terminated.get((name, port))
        if known is None:
            _bound(self._terminated)
            known = self._terminated[name, port] = self.judge.terminates(name, port)
        return known

    def judge_address(self, name: str | None, address: str, port: int) -> Decision:
        """Decide whether `address` may be dialled; an address that a program named has no name."""
        key = name, address, port
        decision = self._addresses_judged.get(key)
        if decision is None:
            _bound(self._addresses_judged)
            decision = self.judge.address_allowed(name, address, port)
            if decision and self._leads_home(address) and not _is_of_addresses(decision.rule):
                decision = Decision(False, f"{address} leads to the host itself")
            self._addresses_judged[key] = decision
        return decision

    def _leads_home(self, address: str) -> bool:
        """Return whether it is in a network that is routed to this machine itself.

        The judge knows only the host's single addresses.
        """
        return self.commons.own.covers(packed(address))

    def live(self) -> list[dict[str, Any]]:
        """List the open connections as events: allowed and not ended."""
        events = [each.event() for each in self.connections if each.is_recorded and each.address]
        return [{"sandbox_id": self.id, **event} for event in events]

    def is_proxy(self, address: bytes, port: int) -> bool:
        """Return whether a client connected to the proxy."""
        if address in _PROXY_PLACES:
            return True
        return port == LISTEN_PORT and _is_loopback(address)

    def is_resolver(self, address: bytes, port: int) -> bool:
        """Return whether a client connected to the resolver over TCP."""
        return address == _RESOLVER and port == RESOLVER[1]

    def close(self) -> None:
        """Cut everything: nothing is let in or out any more."""
        self._is_closed = True
        for connection in list(self.connections):
            connection.cut("the sandbox is gone")
        self.commons.resolver.forget(self.id)
        self.part()

    def part(self) -> None:
        """Let the record forget the sandbox, once it is closed and its last connection has ended.

        A connection that a task serves ends in the next turn, and is recorded then.
        """
        if self._is_closed and not self.connections:
            self.commons.record.forget(self.id)


def read_policy(form: dict[str, Any]) -> NetworkPolicy:
    """The policy whose `to_json` was sent by the host process, which has checked it.

    Not `from_json`: to name what is wrong with a key it imports `dataclasses`.
    """
    return NetworkPolicy.reread(
        form["mode"],
        tuple(form.get("allowed_hosts", ())),
        tuple(_read_rule(rule) for rule in form.get("rules", ())),
        learn=form.get("learn", False),
        limits=NetworkLimits(**form.get("limits", {})),
    )


def exact_names(policy: NetworkPolicy) -> list[str]:
    """The names that rules allow one by one.

    Out of the canonical text: ten thousand rules take 150 ms to be read, and others wait meanwhile.
    """
    allowed = [
        text for text in policy.allowed_hosts if text[0] not in "!*[" and text.count(":") < 2
    ]
    found = [text.partition(":")[0] for text in allowed]
    found += [rule.host for rule in policy.rules if not rule.denies and rule.host[0] != "*"]
    return [host for host in found if host != hosts.PUBLIC and not hosts.looks_like_address(host)]


def _read_rule(form: dict[str, Any]) -> NetworkRule:
    credential = form.get("credential")
    return NetworkRule(
        **{**form, "credential": Credential(**credential) if credential is not None else None}
    )


def _is_loopback(address: bytes) -> bool:
    return address[0] == 127 if len(address) == 4 else address == bytes(15) + b"\1"


def _is_of_addresses(rule: str) -> bool:
    return bool(rule) and NetworkRule.parse(rule).is_address


def _bound(remembered: dict[Any, Any]) -> None:
    if len(remembered) >= _MOST_KEPT:
        remembered.clear()
