"""What a sandbox may reach."""

from __future__ import annotations

from . import checks, jsonform
from .noun import Noun

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import dataclass
    from typing import Any, Self
else:
    from .record import dataclass

LIMITED = "limited"
UNRESTRICTED = "unrestricted"
MODES = (LIMITED, UNRESTRICTED)

_LABEL = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_")
_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True, eq=False, repr=False)
class NetworkPolicy(Noun):
    """`limited` to a list of hosts, or `unrestricted`; an empty list means no network at all.

    Attributes:
        allowed_hosts: `name`, `*.name`, `address` or `network/bits`, each with an
            optional `:port` (`[v6]:port`); lower-cased, without duplicates.
    """

    mode: str = LIMITED
    allowed_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        checks.choice(self.mode, "mode", MODES, "limited or unrestricted")
        given = checks.texts(self.allowed_hosts, "allowed_hosts")
        hosts = [check_host(host, f"allowed_hosts[{i}]") for i, host in enumerate(given)]
        if hosts and self.mode == UNRESTRICTED:
            checks.refuse("allowed_hosts", "an unrestricted policy has no list of hosts")
        object.__setattr__(self, "allowed_hosts", tuple(dict.fromkeys(hosts)))

    @classmethod
    def none(cls) -> NetworkPolicy:
        """No network: the default."""
        return cls()

    @classmethod
    def unrestricted(cls) -> NetworkPolicy:
        """The host's network as it is. Never a default: asked for by name."""
        return cls(UNRESTRICTED)

    @classmethod
    def parse(cls, text: str) -> NetworkPolicy:
        """Read `none`, `unrestricted` or `a.com,b.com:443`, as the command line has it."""
        given = checks.text(text, "network").strip()
        if given == "none":
            return cls.none()
        if given == UNRESTRICTED:
            return cls.unrestricted()
        if not given:
            checks.refuse("network", "must be none, unrestricted or a list of hosts")
        hosts = tuple(host.strip() for host in given.split(","))
        policy: NetworkPolicy = jsonform.within("network", lambda h: cls(LIMITED, h), hosts)
        return policy

    @property
    def is_none(self) -> bool:
        """Whether nothing can be reached."""
        return self.mode == LIMITED and not self.allowed_hosts

    @property
    def is_unrestricted(self) -> bool:
        """Whether the host's own network is shared."""
        return self.mode == UNRESTRICTED

    def to_json(self) -> dict[str, Any]:
        """`{"mode":"unrestricted"}` or `{"mode":"limited","allowed_hosts":[...]}`."""
        if self.mode == UNRESTRICTED:
            return {"mode": UNRESTRICTED}
        return {"mode": LIMITED, "allowed_hosts": list(self.allowed_hosts)}

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read `to_json`'s form; `mode` is its tag and must be there."""
        given = jsonform.json_object(data, cls.__name__)
        if "mode" not in given:
            checks.refuse("mode", "missing from NetworkPolicy")
        return super().from_json(given)


def check_host(value: str, field: str) -> str:
    """One rule in canonical spelling.

    Whatever a resolver might read as an address but we might read as a name
    (`127.1`, `0x7f.1`) is refused: two readings of one rule are a way around it.
    """
    given = value.lower()
    host, port = _split_port(given, field)
    if port:
        _check_port(port, field)
    bare = host.removeprefix("[").removesuffix("]")
    if "/" in bare or ":" in bare or _ends_in_number(bare):
        return _address(bare, field) if not port else _with_port(_address(bare, field), port)
    return _with_port(_name(bare.removesuffix("."), field), port)


def _split_port(given: str, field: str) -> tuple[str, str]:
    if given.startswith("["):
        host, closed, rest = given.partition("]")
        if not closed or (rest and not rest.startswith(":")) or rest == ":":
            checks.refuse(field, f"{given!r} is not [address] or [address]:port")
        return host + "]", rest[1:]
    if given.count(":") != 1:
        return given, ""
    host, _, port = given.partition(":")
    if not port:
        checks.refuse(field, f"{given!r} has no port after the colon")
    return host, port


def _with_port(host: str, port: str) -> str:
    if not port:
        return host
    return f"[{host}]:{int(port)}" if ":" in host else f"{host}:{int(port)}"


def _check_port(port: str, field: str) -> None:
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65535):
        checks.refuse(field, f"{port!r} is not a port: 1 to 65535")


def _ends_in_number(host: str) -> bool:
    """Whether a URL parser would take `host` for an IPv4 address.

    Source: WHATWG URL, "ends in a number checker".
    """
    last = host.removesuffix(".").rpartition(".")[2]
    return last.isdigit() or (last.startswith("0x") and _HEX.issuperset(last[2:]))


def _address(bare: str, field: str) -> str:
    import ipaddress

    try:
        if "/" in bare:
            return str(ipaddress.ip_network(bare))
        return str(ipaddress.ip_address(bare))
    except ValueError:
        checks.refuse(field, f"{bare!r} is not an address or network", "as 10.0.0.0/8 or 1.2.3.4")


def _name(host: str, field: str) -> str:
    labels = host.removeprefix("*.").split(".")
    if len(host) > 253 or not all(_is_label(label) for label in labels):
        checks.refuse(field, f"{host!r} is not a host name", "as example.com or *.example.com")
    if host.startswith("*.") and len(labels) < 2:
        checks.refuse(field, f"{host!r} would allow a whole top-level domain")
    return host


def _is_label(label: str) -> bool:
    fits = 0 < len(label) <= 63 and _LABEL.issuperset(label)
    return fits and label[0] != "-" and label[-1] != "-"
