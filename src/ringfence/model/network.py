"""What a sandbox may reach."""

from __future__ import annotations

from . import checks, jsonform
from .noun import Noun

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import dataclass, field
    from typing import Any, Self

    from .netlimits import NetworkLimits as NetworkLimits
    from .rules import Credential as Credential
    from .rules import NetworkRule as NetworkRule
else:
    from .record import dataclass, field

LIMITED = "limited"
UNRESTRICTED = "unrestricted"
MODES = (LIMITED, UNRESTRICTED)

MOST_RULES = 10_000


def _not_given() -> Any:
    """What `limits` are until somebody asks."""


@dataclass(frozen=True, eq=False, repr=False)
class NetworkPolicy(Noun):
    """`limited` to what its rules allow, or `unrestricted`; without rules there is no network.

    Attributes:
        allowed_hosts: Rules in text form, `[!]HOST[:PORTS]`, in their one spelling and without
            duplicates. HOST is `name`, `*.name`, an address or a network (`[v6]:port`); PORTS are
            `443`, `8000-8100` or `80,443`; `!` denies, and wins over whatever allows.
        rules: Rules that say more than the text form can.
        learn: Let through, and record, whatever no rule denies and is no special address.
    """

    mode: str = LIMITED
    allowed_hosts: tuple[str, ...] = ()
    rules: tuple[NetworkRule, ...] = ()
    learn: bool = False
    limits: NetworkLimits = field(default_factory=_not_given)

    def __post_init__(self) -> None:
        checks.choice(self.mode, "mode", MODES, "limited or unrestricted")
        checks.flag(self.learn, "learn")
        if self.learn and self.mode == UNRESTRICTED:
            checks.refuse("learn", "an unrestricted policy watches nothing")
        if self.__dict__["limits"] is None:
            del self.__dict__["limits"]  # `__getattr__` has the defaults
        else:
            self._check_limits()
        if self.allowed_hosts != () or self.rules != ():
            self._check_rules()

    def __getattr__(self, name: str) -> Any:
        """`limits` where none were given: every run makes a policy, and few look at those."""
        if name == "limits":
            from .netlimits import DEFAULT

            return DEFAULT
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _check_limits(self) -> None:
        from .netlimits import DEFAULT, NetworkLimits

        checks.instance(self.limits, "limits", NetworkLimits)
        if self.mode == UNRESTRICTED and self.limits != DEFAULT:
            checks.refuse("limits", "an unrestricted policy watches nothing")

    def _check_rules(self) -> None:
        from . import hosts
        from .rules import NetworkRule

        given = checks.texts(self.allowed_hosts, "allowed_hosts")
        rules = checks.items(self.rules, "rules")
        if self.mode == UNRESTRICTED and (given or rules):
            field = "allowed_hosts" if given else "rules"
            checks.refuse(field, "an unrestricted policy has no list of hosts")
        if len(given) + len(rules) > MOST_RULES:
            checks.refuse("rules", f"more than {MOST_RULES} rules")
        texts = [
            hosts.write_rule(*hosts.read_rule(text, f"allowed_hosts[{i}]"))
            for i, text in enumerate(given)
        ]
        object.__setattr__(self, "allowed_hosts", tuple(dict.fromkeys(texts)))
        for i, rule in enumerate(rules):
            checks.instance(rule, f"rules[{i}]", NetworkRule)
        object.__setattr__(self, "rules", tuple(dict.fromkeys(rules)))
        denies = [text.startswith("!") for text in texts] + [rule.denies for rule in rules]
        if all(denies) and denies and not self.learn:
            hint = "a deny takes away from what another rule allows"
            checks.refuse("allowed_hosts" if texts else "rules", "every rule denies", hint)

    @classmethod
    def none(cls) -> NetworkPolicy:
        """No network: the default."""
        return cls()

    @classmethod
    def unrestricted(cls) -> NetworkPolicy:
        """The host's network as it is. Never a default: asked for by name."""
        return cls(UNRESTRICTED)

    @classmethod
    def reread(
        cls, mode: str, allowed_hosts: tuple[str, ...], rules: tuple[NetworkRule, ...], **more: Any
    ) -> NetworkPolicy:
        """What was a policy in another process: its rules are not checked, which takes long for many.

        Precondition: they are a policy's `allowed_hosts` and `rules`, and come from one we trust.
        """
        policy = cls(mode, **more)
        object.__setattr__(policy, "allowed_hosts", allowed_hosts)
        object.__setattr__(policy, "rules", rules)
        return policy

    @classmethod
    def parse(cls, text: str, *, learn: bool = False) -> NetworkPolicy:
        """Read `none`, `unrestricted` or `a.com,b.com:80,443,!x.b.com`, as the command line has it.

        A port between commas belongs to the rule before it.
        """
        given = checks.text(text, "network").strip()
        if given == "none":
            return cls(learn=learn)
        if given == UNRESTRICTED:
            return cls(UNRESTRICTED, learn=learn)
        if not given:
            checks.refuse("network", "must be none, unrestricted or a list of hosts")
        rules = _split(given)
        for word in ("none", UNRESTRICTED):
            if word in rules:
                checks.refuse("network", f"{word} stands alone, or is the name of no host here")
        policy: NetworkPolicy = jsonform.within(
            "network", lambda some: cls(LIMITED, some, learn=learn), rules
        )
        return policy

    def check_meant(self, *, takes_localhost: bool = False) -> NetworkPolicy:
        """Return the policy as a person wrote it.

        Args:
            takes_localhost: A program that asks the proxy by that name reaches it; no other does.

        Raises:
            InvalidRequest: A rule is a word such as `all`, or `localhost`, that would reach nothing.
        """
        from . import hosts

        for i, text in enumerate(self.allowed_hosts):
            if takes_localhost and "localhost" == hosts.split_rule(text)[1]:
                continue
            hosts.check_meant(*hosts.split_rule(text), f"allowed_hosts[{i}]")
        for i, rule in enumerate(self.rules):
            hosts.check_meant(rule.denies, rule.host, rule.ports, f"rules[{i}].host")
        return self

    @property
    def all_rules(self) -> tuple[NetworkRule, ...]:
        """Every rule, those in text form first."""
        if not self.allowed_hosts:
            return self.rules
        from .rules import NetworkRule

        return (*(NetworkRule.parse(text) for text in self.allowed_hosts), *self.rules)

    @property
    def secrets(self) -> tuple[str, ...]:
        """The names of the secrets its rules write into requests, sorted."""
        return tuple(sorted({rule.credential.secret for rule in self.rules if rule.credential}))

    @property
    def needs_tls_termination(self) -> bool:
        """Whether some rule cannot be held without reading the requests inside TLS."""
        return any(rule.needs_tls_termination for rule in self.rules)

    @property
    def is_none(self) -> bool:
        """Whether nothing can be reached."""
        return self.is_limited and not (self.allowed_hosts or self.rules or self.learn)

    @property
    def is_limited(self) -> bool:
        """Whether rules decide, be there any or none."""
        return self.mode == LIMITED

    @property
    def is_unrestricted(self) -> bool:
        """Whether the host's own network is shared."""
        return self.mode == UNRESTRICTED

    def to_json(self) -> dict[str, Any]:
        """`{"mode":"unrestricted"}` or `{"mode":"limited","allowed_hosts":[...]}` and what is set."""
        if self.mode == UNRESTRICTED:
            return {"mode": UNRESTRICTED}
        form: dict[str, Any] = {"mode": LIMITED, "allowed_hosts": list(self.allowed_hosts)}
        if self.rules:
            form["rules"] = jsonform.plain(self.rules)
        if self.learn:
            form["learn"] = True
        if limits := "limits" in self.__dict__ and self.limits.to_json():
            form["limits"] = limits
        return form

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read `to_json`'s form; `mode` is its tag and must be there."""
        given = jsonform.json_object(data, cls.__name__)
        if "mode" not in given:
            checks.refuse("mode", "missing from NetworkPolicy")
        return super().from_json(given)

    @classmethod
    def _nested(cls) -> jsonform.Readers:
        from .netlimits import NetworkLimits
        from .rules import NetworkRule

        return {"rules": jsonform.each(NetworkRule.from_json), "limits": NetworkLimits.from_json}


def _split(given: str) -> tuple[str, ...]:
    """The rules of a list; a bare port is no host, so it continues the ports before it."""
    from .hosts import is_ports

    rules: list[str] = []
    for item in (part.strip() for part in given.split(",")):
        if rules and is_ports(item) and is_ports(rules[-1].rpartition(":")[2].rpartition(",")[2]):
            rules[-1] += f",{item}"
        else:
            rules.append(item)
    return tuple(rules)


def __getattr__(name: str) -> object:
    """The nouns that a policy is made of, read when first used (PEP 562)."""
    if name == "NetworkLimits":
        from . import netlimits

        return netlimits.NetworkLimits
    if name in ("NetworkRule", "Credential"):
        from . import rules

        return getattr(rules, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
