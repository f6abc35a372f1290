"""A rule of a network policy, and the secret it may carry."""

from __future__ import annotations

from ..base import checks, jsonform
from ..base.model import Model
from ..base.record import dataclass
from . import hosts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self

ALLOW = "allow"
DENY = "deny"
ACTIONS = (ALLOW, DENY)
_MOST_METHODS = 64

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_TOKEN = frozenset("!#$%&'*+-.^_`|~" + _LETTERS)  # RFC 9110, section 5.6.2
# Ours to write, or part of how a message is framed: setting one would be request smuggling.
_FRAMING = (
    "connection", "content-length", "expect", "host", "keep-alive", "proxy-connection", "te",
    "trailer", "transfer-encoding", "upgrade",
)  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class Credential(Model):
    """A secret that the egress process writes into requests; the sandbox never has it.

    Attributes:
        secret: A name in the sandbox's `secrets`; never the value.
        header: Lower-cased.
        scheme: The header's value is `scheme`, a space and the secret; the bare secret when empty.
    """

    secret: str
    header: str = "authorization"
    scheme: str = "Bearer"

    def __post_init__(self) -> None:
        checks.env_map({checks.text(self.secret, "secret", empty=False): ""}, "secret")
        header = _token(self.header, "header").lower()
        if header in _FRAMING:
            checks.refuse("header", f"{header!r} frames the message and cannot hold a credential")
        object.__setattr__(self, "header", header)
        if checks.text(self.scheme, "scheme"):
            _token(self.scheme, "scheme")

    def value(self, secret: str) -> str:
        """Build the header's value."""
        return f"{self.scheme} {secret}" if self.scheme else secret


@dataclass(frozen=True, eq=False, repr=False)
class NetworkRule(Model):
    """Permission or denial for one host; a deny wins over every allow.

    Attributes:
        host: An exact name; `*.domain`, its sub-domains but not itself; an IP address or network;
            `public`, every name and every address that is not special.
        ports: `443`, `8000-8100` or `80,443`; empty is every port.
        methods: Only HTTP requests with one of these; upper-cased.
        paths: Only HTTP requests for one of these, exact or as a prefix that ends in `*`.
        credential: Written into the requests this rule allows, over TLS only.
        inspect: End TLS at the egress process even if no other field requires it.
    """

    host: str
    ports: str = ""
    action: str = ALLOW
    methods: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    credential: Credential | None = None
    inspect: bool = False

    def __post_init__(self) -> None:
        self._put("host", hosts.read_host(checks.text(self.host, "host"), "host"))
        self._put("ports", hosts.read_ports(checks.text(self.ports, "ports"), "ports"))
        checks.choice(self.action, "action", ACTIONS, "allow or deny")
        methods = checks.texts(checks.at_most(self.methods, "methods", _MOST_METHODS), "methods")
        self._put("methods", _unique(_method(each, i) for i, each in enumerate(methods)))
        paths = checks.texts(checks.at_most(self.paths, "paths", checks.MOST_PATHS), "paths")
        self._put("paths", _unique(_path(each, i) for i, each in enumerate(paths)))
        if self.credential is not None:
            checks.instance(self.credential, "credential", Credential)
        checks.flag(self.inspect, "inspect")
        self._check_together()

    def _put(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_together(self) -> None:
        if self.denies and (self.credential or self.inspect):
            field = "credential" if self.credential else "inspect"
            checks.refuse(field, "a deny rule cannot have one")
        if self.host == hosts.PUBLIC and self.needs_tls_termination:
            checks.refuse(
                "host",
                "public is every host: methods, paths, credential and inspect need a name",
                "add a rule for each host that they are for",
            )
        if self.is_address and self.needs_tls_termination:
            checks.refuse(
                "host",
                f"{self.host} is an address: methods, paths, credential and inspect need a name",
                "inspection needs a host name for the TLS certificate",
            )

    @classmethod
    def parse(cls, text: str, field: str = "rule", **others: Any) -> Self:
        """Read `[!]HOST[:PORTS]`; `!` denies.

        Raises:
            InvalidRequest: It is no rule; `field` names it.
        """
        denies, host, ports = hosts.read_rule(checks.text(text, field), field)
        return cls(host, ports, DENY if denies else ALLOW, **others)

    @property
    def text(self) -> str:
        """The part of it that `parse` reads, in the one spelling."""
        return hosts.write_rule(self.denies, self.host, self.ports)

    @property
    def denies(self) -> bool:
        return self.action == DENY

    @property
    def is_address(self) -> bool:
        """True if `host` is an address or network rather than a name."""
        return hosts.looks_like_address(self.host)

    @property
    def is_conditional(self) -> bool:
        """True if the rule matches some HTTP requests only, not a connection."""
        return bool(self.methods or self.paths)

    @property
    def needs_tls_termination(self) -> bool:
        """True if the rule can be enforced only by reading the requests inside TLS."""
        return self.is_conditional or self.credential is not None or self.inspect

    def to_json(self) -> dict[str, Any]:
        """The JSON object of `host` and of what is set beside it."""
        form = jsonform.dump(self)
        unset = {name for name, value in form.items() if value in ("", [], None, False, ALLOW)}
        return {name: value for name, value in form.items() if name not in unset}


def check_secret(value: str, field: str) -> None:
    """Refuse what cannot stand in a header as it is; what it is, is not told.

    Raises:
        InvalidRequest: Empty, not printable ASCII, or with white space at an end.
    """
    if not value:
        checks.refuse(field, "is empty")
    if not (value.isascii() and value.isprintable()):
        hint = "remove the line break at the end of the value" if value.endswith("\n") else ""
        checks.refuse(field, "has a character that no HTTP header may have", hint)
    if value != value.strip():
        checks.refuse(field, "starts or ends with a space, which HTTP headers do not preserve")


def _token(value: object, field: str) -> str:
    given = checks.text(value, field, empty=False)
    if not _TOKEN.issuperset(given):
        checks.refuse(field, f"{given!r} is not a valid HTTP token")
    return given


def _method(value: str, index: int) -> str:
    method = _token(value, f"methods[{index}]").upper()
    if method == "CONNECT":
        checks.refuse(f"methods[{index}]", "for a tunnel use a rule without methods")
    return method


def _path(value: str, index: int) -> str:
    from .paths import read_pattern

    return read_pattern(value, f"paths[{index}]")


def _unique(values: Any) -> tuple[str, ...]:
    return tuple(sorted(set(values)))
