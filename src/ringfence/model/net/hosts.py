"""The one reader of hosts and ports: rules are written in its spelling, and judged in it.

Whatever a resolver might read as an address but we might read as a name (`127.1`, `0x7f.1`) is
refused: two readings of one rule are a way around it.
"""

from __future__ import annotations

from ..base import checks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import NoReturn

    Ranges = tuple[tuple[int, int], ...]  # first and last port of each, ascending, disjoint

_LABEL = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_")
_HEX = frozenset("0123456789abcdef")
_NAME_MAX, _LABEL_MAX = 253, 63  # RFC 1035, section 2.3.4, less the root's and length bytes
_PORT_MAX, _MOST_RANGES = 65535, 256
_MAPPED = 0xFFFF << 32  # ::ffff:0:0/96: RFC 4291, section 2.5.5.2
PUBLIC = "public"
"""In place of a host: every name, and every address that is not special."""
_EVERY = "for every public host: public; for the host's own network: unrestricted"
_MEANT = {
    **dict.fromkeys(
        ("all", "any", "full", "internet", "everything", "open", "true", "yes", "on",
         "enabled", "host", "bridge", "default", "allow"),
        _EVERY,
    ),
    **dict.fromkeys(("no", "off", "false", "disabled", "deny", "nothing"), "for no network: none"),
}  # fmt: skip
"""Words that no host has for a name."""

EVERY_PORT: Ranges = ((1, _PORT_MAX),)


def read_rule(given: str, field: str) -> tuple[bool, str, str]:
    """`[!]HOST[:PORTS]` as (denies, canonical host, canonical ports)."""
    host, ports = _split_ports(given.removeprefix("!"), field)
    return given.startswith("!"), read_host(host, field), read_ports(ports, field)


def check_meant(denies: bool, host: str, ports: str, field: str) -> None:
    """Refuse a name without a dot that is a word for something else, or that names no public host."""
    if host in _MEANT:
        checks.refuse(field, f"{host!r} is not a host name", _MEANT[host])
    is_dotless = "." not in host and ":" not in host and host not in ("localhost", PUBLIC)
    if is_dotless and not denies and not ports:
        hint = (
            f"for a public host use {host}.com, for a host of this network add the port: {host}:443"
        )
        checks.refuse(field, f"{host!r} has no dot: it is not a public host name", hint)


def write_rule(denies: bool, host: str, ports: str) -> str:
    """The canonical spelling that `read_rule` reads."""
    shown = f"[{host}]" if ports and ":" in host else host
    return f"{'!' if denies else ''}{shown}{':' if ports else ''}{ports}"


def split_rule(text: str) -> tuple[bool, str, str]:
    """Split a rule that is already canonical; takes a tenth of `read_rule`'s time."""
    bare = text.removeprefix("!")
    if bare.startswith("["):
        host, _, ports = bare[1:].partition("]:")
    elif bare.count(":") == 1:
        host, _, ports = bare.partition(":")
    else:
        host, ports = bare, ""
    return text.startswith("!"), host, ports


def read_host(given: str, field: str) -> str:
    """An exact name, `*.domain`, an address, a network or `public`, in canonical spelling."""
    if given.startswith("[") and given.endswith("]") and ":" in given:
        return read_address(given[1:-1], field)
    if looks_like_address(given):
        return read_address(given, field)
    if not given.startswith("*."):
        return read_name(given, field)
    domain = read_name(given[2:], field)
    if "." not in domain:
        hint = f"as *.example.{domain}; for every public host use `public`"
        checks.refuse(field, f"{given!r} would allow a whole top-level domain", hint)
    return f"*.{domain}"


def read_name(given: str, field: str) -> str:
    """A host name in lower case, without the root's dot; never an address.

    A-labels (`xn--…`) are names like any other; what needs converting is refused, because IDNA 2003
    and 2008 make different names of it.
    """
    if not given.isascii():
        _refuse_unicode(given, field)
    # Only ASCII may be lower-cased: U+212A, the Kelvin sign, becomes the letter k.
    name = given.lower().removesuffix(".")
    if len(name) > _NAME_MAX or not all(_is_label(label) for label in name.split(".")):
        hint = _alone(given) or "as example.com or *.example.com"
        if given == "*":
            hint = _EVERY
        elif "@" in given:
            hint = f"without the user: {given.rpartition('@')[2]}"
        elif " " in given:
            hint = "separate hosts by commas, as a.com,b.org"
        checks.refuse(field, f"{given!r} is not a host name", hint)
    if ends_in_number(name):
        what = f"{given!r} is read as an address by some programs and as a name by others"
        checks.refuse(field, what, "as 1.2.3.4 or example.com")
    return name


def read_address(given: str, field: str) -> str:
    """An IP address, or a network as `10.0.0.0/8`; one spelling of each.

    IPv4 inside `::ffff:0:0/96` is that IPv4 address: so the kernel treats it. A network of one
    address is that address.
    """
    import ipaddress

    _, slash, bits = given.partition("/")
    try:
        if slash and not (bits.isascii() and bits.isdigit()):
            raise ValueError("not a number of bits")
        if "%" in given:
            raise ValueError("a zone is valid only in its own network namespace")
        network = ipaddress.ip_network(given)
        if network.version == 6 and network.prefixlen >= 96:
            first = int(network.network_address)
            if first >> 32 << 32 == _MAPPED:
                network = ipaddress.ip_network((first & 0xFFFFFFFF, network.prefixlen - 96))
    except ValueError:
        url = "://" in given
        hint = _alone(given) if url else _network_of(given)
        if given.isascii() and given.isdigit():
            hint = f"the host of the port is missing: as example.com:{given}"
        hint = hint or ("as example.com, without the URL" if url else "as 10.0.0.0/8 or 1.2.3.4")
        checks.refuse(field, f"{given!r} is not an address or network", hint)
    single = network.prefixlen == network.max_prefixlen
    return str(network.network_address if single else network)


def _network_of(given: str) -> str:
    """Show the network that an address with a number of bits is in; empty where it is neither."""
    import ipaddress

    try:
        network = ipaddress.ip_network(given, strict=False)
    except ValueError:
        return ""
    address = given.partition("/")[0]
    return (
        f"for the network write {network}, for the address alone {address}" if "/" in given else ""
    )


def _alone(url: str) -> str:
    """Show the host of a URL; empty where there is none."""
    host = url.rpartition("://")[2].partition("/")[0].rpartition("@")[2]
    return f"use the host name without the URL: {host}" if host and "/" in url else ""


def looks_like_address(host: str) -> bool:
    """Return whether `host` must be read as an address or network, never as a name."""
    return ":" in host or ends_in_number(host.lower().partition("/")[0])


def ends_in_number(host: str) -> bool:
    """Return whether a URL parser would read `host`, in lower case, as an IPv4 address.

    Source: WHATWG URL, "ends in a number checker".
    """
    last = host.removesuffix(".").rpartition(".")[2]
    return last.isdigit() or (last.startswith("0x") and _HEX.issuperset(last[2:]))


def read_ports(given: str, field: str) -> str:
    """`80,443,8000-8100` sorted, without overlaps; empty means every port."""
    if not given:
        return ""
    parts = given.split(",", _MOST_RANGES)
    if len(parts) > _MOST_RANGES:
        checks.refuse(field, f"has more than {_MOST_RANGES} ranges of ports")
    merged: list[tuple[int, int]] = []
    for first, last in sorted(_read_range(part.strip(" "), field) for part in parts):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return "" if tuple(merged) == EVERY_PORT else write_ranges(merged)


def write_ranges(ranges: Iterable[tuple[int, int]]) -> str:
    """Ranges as `read_ports` reads them."""
    return ",".join(f"{first}-{last}" if first < last else str(first) for first, last in ranges)


def port_ranges(ports: str) -> Ranges:
    """Parse canonical `ports` to ranges."""
    if not ports:
        return EVERY_PORT
    pairs = (part.partition("-") for part in ports.split(","))
    return tuple((int(first), int(last or first)) for first, _, last in pairs)


def is_ports(given: str) -> bool:
    """Return whether `given` can only be ports, so that `a.com:80,443` is one rule in a list."""
    return given.isascii() and given.replace("-", "", 1).isdigit()


def _split_ports(given: str, field: str) -> tuple[str, str]:
    if given.startswith("["):
        host, closed, rest = given.partition("]")
        if not closed or (rest and not rest.startswith(":")) or rest == ":":
            checks.refuse(field, f"{given!r} is not [address] or [address]:port")
        return host + "]", rest[1:]
    if given.count(":") != 1 or "://" in given:
        return given, ""
    host, _, ports = given.partition(":")
    if not ports:
        checks.refuse(field, f"{given!r} has no port after the colon")
    return host, ports


def _read_range(given: str, field: str) -> tuple[int, int]:
    first, dash, last = given.partition("-")
    if not first:
        checks.refuse(field, f"{given!r} is not a port: 1 to {_PORT_MAX}")
    low, high = _read_port(first, field), _read_port(last if dash else first, field)
    if low > high:
        checks.refuse(field, f"{given!r} is not a range of ports: the end is below the start")
    return low, high


def _read_port(given: str, field: str) -> int:
    fits = given.isascii() and given.isdigit() and len(given) <= 5
    if not fits or not 1 <= int(given) <= _PORT_MAX:
        checks.refuse(field, f"{given!r} is not a port: 1 to {_PORT_MAX}")
    return int(given)


def _is_label(label: str) -> bool:
    fits = 0 < len(label) <= _LABEL_MAX and _LABEL.issuperset(label)
    return fits and label[0] != "-" and label[-1] != "-"


def _refuse_unicode(given: str, field: str) -> NoReturn:
    hint = "write the A-label, which starts with xn--"
    try:
        encoded = given.encode("idna").decode()
        # Only a name that IDNA 2003 maps to nothing else is the same name in IDNA 2008.
        if encoded.encode().decode("idna") == given.lower():
            hint = f"write {encoded.lower()}"
    except ValueError:
        pass
    checks.refuse(field, f"{given!r} is not in ASCII", hint)
