"""Addresses that are not simply somewhere on the internet, through every way of writing them.

A name must never lead to one of these: who owns the name chooses the address. Documentation ranges
are nobody's and not listed.

Source: IANA IPv4 and IPv6 Special-Purpose Address Registries; RFC 6890.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ipaddress import IPv4Network, IPv6Network

    Address = IPv4Address | IPv6Address
    Network = IPv4Network | IPv6Network

# Cloud machines get credentials here. All but Azure's are inside a range below as well.
METADATA = frozenset(
    ip_address(text)
    for text in (
        "169.254.169.254",
        "169.254.170.2",  # AWS, tasks
        "fd00:ec2::254",
        "fd20:ce::254",  # Google
        "100.100.100.200",  # Alibaba
        "168.63.129.16",  # Azure; a public address
    )
)

_RANGES: tuple[tuple[str, str], ...] = (
    ("unspecified", "0.0.0.0/8"),  # connect() to 0.0.0.0 reaches the host itself
    ("private", "10.0.0.0/8"),
    ("shared (CGNAT)", "100.64.0.0/10"),
    ("loopback", "127.0.0.0/8"),
    ("link-local", "169.254.0.0/16"),
    ("private", "172.16.0.0/12"),
    ("protocol", "192.0.0.0/24"),
    ("6to4 relay", "192.88.99.0/24"),
    ("private", "192.168.0.0/16"),
    ("benchmarking", "198.18.0.0/15"),
    ("multicast", "224.0.0.0/4"),
    ("reserved", "240.0.0.0/4"),  # 255.255.255.255 included
    # Of IPv6 only 2000::/3 is in use worldwide (RFC 4291, section 2.4); the rest, from ::/8 on:
    ("loopback", "::1/128"),
    ("unspecified", "::/128"),
    ("reserved", "::/8"),  # IPv4-compatible too; 64:ff9b::/96 is judged by what it embeds
    ("discard-only", "100::/64"),
    ("reserved", "100::/8"),
    ("reserved", "200::/7"),
    ("reserved", "400::/6"),
    ("reserved", "800::/5"),
    ("reserved", "1000::/4"),
    ("benchmarking", "2001:2::/48"),
    ("protocol", "2001::/23"),  # RFC 2928: Teredo, overlay identifiers
    ("reserved", "4000::/2"),
    ("reserved", "8000::/2"),
    ("reserved", "c000::/3"),
    ("reserved", "e000::/4"),
    ("reserved", "f000::/5"),
    ("reserved", "f800::/6"),
    ("unique local", "fc00::/7"),
    ("reserved", "fe00::/9"),
    ("link-local", "fe80::/10"),
    ("site-local", "fec0::/10"),
    ("multicast", "ff00::/8"),
)
# By version, as numbers: every connection asks, and `ipaddress` takes ten times as long.
_SPECIAL: dict[int, list[tuple[int, int, str]]] = {4: [], 6: []}
for _kind, _text in _RANGES:
    _network = ip_network(_text)
    _SPECIAL[_network.version].append((int(_network[0]), int(_network[-1]), _kind))

# The bits in front of, or around, an IPv4 address that is written inside.
_NAT64 = 0x0064FF9B << 64  # 64:ff9b::/96, RFC 6052
_SIX_TO_FOUR = 0x2002  # 2002::/16, RFC 3056
_TEREDO = 0x20010000  # 2001::/32, RFC 4380
_ISATAP = 0x5EFE  # RFC 5214: the interface identifier is [0200:|0000:]5efe:V4

# Narrower than this, a rule names a place; a wider one only says "the internet".
_WIDEST_PLACE = {4: 8, 6: 16}


def read(text: str) -> Address:
    """The address; IPv4 inside ::ffff:0:0/96 is that IPv4 address, as the kernel treats it.

    Raises:
        ValueError: It is none, or has a zone.
    """
    return plain(ip_address(text))


def plain(address: Address) -> Address:
    """`address`, or the IPv4 address it is another writing of."""
    if isinstance(address, IPv6Address):
        if address.scope_id is not None:
            raise ValueError(f"{address} has a zone, which is valid only on its own host")
        return address.ipv4_mapped or address
    return address


def embedded(address: Address) -> tuple[IPv4Address, ...]:
    """The IPv4 addresses that a translator or tunnel would make of an IPv6 address."""
    if not isinstance(address, IPv6Address):
        return ()
    value = int(address)
    found = []
    if value >> 32 in (0, _NAT64) or value >> 32 & 0xFDFFFFFF == _ISATAP:
        found.append(value)
    if value >> 112 == _SIX_TO_FOUR:
        found.append(value >> 80)
    if value >> 96 == _TEREDO:  # the server's, and the client's with every bit flipped
        found += [value >> 64, ~value]
    return tuple(IPv4Address(each & 0xFFFFFFFF) for each in found)


def special(address: Address) -> str:
    """Name the kind of special address, by itself or by an address it embeds; empty for an ordinary
    one.
    """
    if address in METADATA:
        return "cloud metadata"
    for _first, _last, kind in _containing(address):
        return kind
    for inner in embedded(address):
        if kind := special(inner):
            return f"{kind} ({inner} inside {address})"
    return ""


def special_network(network: Network) -> str:
    """Name the special range that contains all of `network`; empty when part of it is ordinary."""
    if network.prefixlen == network.max_prefixlen:
        return special(network[0])
    least, most = int(network[0]), int(network[-1])
    ranges = _SPECIAL[network.version]
    return next((kind for first, last, kind in ranges if first <= least and most <= last), "")


def names_special(network: Network, address: Address) -> bool:
    """Return whether a rule for `network` opens the special `address` in it.

    A rule does so only if the whole network is special in that way: `127.0.0.0/8` opens loopback,
    `0.0.0.0/0` does not. An address that is special by what it embeds must be named alone.
    """
    if network.prefixlen == network.max_prefixlen:
        return True
    if any(special(inner) for inner in embedded(address)):
        return False
    least, most = int(network[0]), int(network[-1])
    return any(first <= least and most <= last for first, last, _ in _containing(address))


def is_place(network: Network) -> bool:
    """Return whether `network` is narrow enough to name a destination rather than "anywhere"."""
    return network.prefixlen >= _WIDEST_PLACE[network.version]


def _containing(address: Address) -> list[tuple[int, int, str]]:
    value = int(address)
    if address.version == 6 and value >> 32 == _NAT64:
        return []
    return [each for each in _SPECIAL[address.version] if each[0] <= value <= each[1]]
