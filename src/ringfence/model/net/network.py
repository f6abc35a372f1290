"""Network policy of a sandbox."""

from __future__ import annotations

from ..base import checks, jsonform
from ..base.model import Model
from ..base.record import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self

    from .netlimits import NetworkLimits as NetworkLimits
    from .rules import Credential as Credential
    from .rules import NetworkRule as NetworkRule

LIMITED = "limited"
UNRESTRICTED = "unrestricted"
MODES = (LIMITED, UNRESTRICTED)

MOST_RULES = 10_000
_FORM = 'as {"mode": "limited", "allowed_hosts": ["example.com"]} or {"mode": "unrestricted"}'


def _not_given() -> Any:
    """Default of `limits`, evaluated on first use."""


@dataclass(frozen=True, eq=False, repr=False)
class NetworkPolicy(Model):
    """`limited` to what its rules allow, or `unrestricted`; without rules there is no network.

    Attributes:
        allowed_hosts: Rules in text form, `[!]HOST[:PORTS]`, in their one spelling and without
            duplicates. HOST is `name`, `*.name`, an address, a network (`[v6]:port`) or `public`,
            which is every name and every address that is not special; PORTS are
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
        if self.mode != LIMITED and self.mode != UNRESTRICTED:
            what = f"must be limited or unrestricted, not {self.mode!r}"
            checks.refuse("mode", what, "for no network use limited with an empty allowed_hosts")
        checks.flag(self.learn, "learn")
        if self.learn and self.mode == UNRESTRICTED:
            checks.refuse("learn", "an unrestricted policy has no events")
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
            checks.refuse("limits", "an unrestricted policy has no events")

    def _check_rules(self) -> None:
        from . import hosts
        from .rules import NetworkRule

        given = checks.texts(self.allowed_hosts, "allowed_hosts")
        rules = checks.items(self.rules, "rules")
        if self.mode == UNRESTRICTED and (given or rules):
            field = "allowed_hosts" if given else "rules"
            hint = f'remove {field}, or the mode: "limited" reaches them alone'
            checks.refuse(field, "an unrestricted policy has no list of hosts", hint)
        if len(given) + len(rules) > MOST_RULES:
            checks.refuse("rules", f"more than {MOST_RULES} rules")
        texts = [
            hosts.write_rule(*hosts.read_rule(text, f"allowed_hosts[{i}]"))
            for i, text in enumerate(given)
        ]
        for i, text in enumerate(texts):
            hosts.check_meant(*hosts.split_rule(text), f"allowed_hosts[{i}]")
        object.__setattr__(self, "allowed_hosts", tuple(dict.fromkeys(texts)))
        for i, rule in enumerate(rules):
            checks.instance(rule, f"rules[{i}]", NetworkRule)
            hosts.check_meant(rule.denies, rule.host, rule.ports, f"rules[{i}].host")
        object.__setattr__(self, "rules", tuple(dict.fromkeys(rules)))
        denies = [text.startswith("!") for text in texts] + [rule.denies for rule in rules]
        if all(denies) and denies and not self.learn:
            hint = "add a rule that allows the other hosts"
            checks.refuse(
                "allowed_hosts" if texts else "rules", "the policy has only deny rules", hint
            )

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
        """Restore a policy that another process checked; rechecking many rules takes long.

        Precondition: `allowed_hosts` and `rules` are those of a policy, and come from a trusted
        process.
        """
        policy = cls(mode, **more)
        object.__setattr__(policy, "allowed_hosts", allowed_hosts)
        object.__setattr__(policy, "rules", rules)
        return policy

    @classmethod
    def parse(cls, text: str, *, learn: bool = False) -> NetworkPolicy:
        """Read `none`, `public`, `unrestricted` or `a.com,b.com:80,443,!x.b.com`, as the command line has it.

        A port between commas belongs to the rule before it.
        """
        given = checks.text(text, "network").strip()
        if given == "none":
            return cls(learn=learn)
        if given == UNRESTRICTED:
            return cls(UNRESTRICTED, learn=learn)
        if not given:
            what = f"must be none, public, unrestricted or a list of hosts, not {text!r}"
            checks.refuse("network", what, "as example.com,*.example.org:443")
        rules = _split(given)
        for word in ("none", UNRESTRICTED):
            if word in rules:
                hint = f"remove {word}, or the hosts"
                checks.refuse("network", f"{word} cannot be combined with hosts", hint)
        policy: NetworkPolicy = jsonform.within(
            "network", lambda some: cls(LIMITED, some, learn=learn), rules
        )
        return policy

    def check_no_localhost(self) -> NetworkPolicy:
        """Return the policy as a person wrote it; only a program that asks the proxy means `localhost`.

        Raises:
            InvalidRequest: A rule is of `localhost`, which inside is the sandbox itself, or allows 0.0.0.0.
        """
        from . import hosts

        hint = "a server on this host is 127.0.0.1:PORT"
        for i, text in enumerate(self.allowed_hosts):
            denies, host, _ = hosts.split_rule(text)
            if host == "localhost":
                checks.refuse(f"allowed_hosts[{i}]", f"{text!r} is the sandbox itself", hint)
            if host in ("0.0.0.0", "::") and not denies:
                what = f"{text!r} is where servers listen, not the address of one"
                checks.refuse(f"allowed_hosts[{i}]", what, f"{hint}; every address is 0.0.0.0/0")
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
        """True if some rule can be enforced only by reading the requests inside TLS."""
        return any(rule.needs_tls_termination for rule in self.rules)

    @property
    def is_none(self) -> bool:
        """True if nothing can be reached."""
        return self.is_limited and not (self.allowed_hosts or self.rules or self.learn)

    @property
    def is_limited(self) -> bool:
        """True if rules decide, even where there are none."""
        return self.mode == LIMITED

    @property
    def is_unrestricted(self) -> bool:
        """True if the sandbox shares the host's own network."""
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
        given = jsonform.json_object(data, cls.__name__, _FORM)
        if "mode" not in given and given.keys() <= cls.__dataclass_fields__.keys():
            checks.refuse("mode", "missing from NetworkPolicy", _FORM)
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
    """The models that a policy is made of, read when first used (PEP 562)."""
    if name == "NetworkLimits":
        from . import netlimits

        return netlimits.NetworkLimits
    if name in ("NetworkRule", "Credential"):
        from . import rules

        return getattr(rules, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
