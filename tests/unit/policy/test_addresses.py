"""Which addresses are special: agreed with `ipaddress`, and through every way of writing them."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.policy import worlds

from ringfence.policy import addresses

pytestmark = pytest.mark.anyone

# `ipaddress` has them as private; here they stand for the public internet.
DOCUMENTATION = [
    ip_network(text)
    for text in ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32", "3fff::/20")
]
Address = IPv4Address | IPv6Address


def is_documentation(address: Address) -> bool:
    return any(address in network for network in DOCUMENTATION)


@given(st.ip_addresses())
def test_what_ipaddress_calls_no_public_address_is_special(address: Address) -> None:
    plain = addresses.plain(address)
    if is_documentation(plain):
        return
    if not plain.is_global or plain.is_multicast or plain.is_reserved or plain.is_link_local:
        # Translators' and tunnels' addresses are judged by what they embed.
        translated = any(plain in ip_network(text) for text in ("64:ff9b::/96", "2002::/16"))

        assert translated or addresses.special(plain), plain


@given(worlds.special)
def test_special_ones_are_known(address: Address) -> None:
    assert addresses.special(addresses.plain(address))


@given(worlds.public)
def test_public_ones_are_not(address: Address) -> None:
    """The control: were everything special, the tests above would pass as well."""
    assert not addresses.special(address)
    if isinstance(address, IPv4Address):
        for each in worlds.embeddings(address):
            teredo = each in ip_network("2001::/32")  # which nobody serves any more
            assert teredo == bool(addresses.special(addresses.plain(each))), each


@given(st.ip_addresses(v=4))
def test_what_embeds_is_as_special_as_what_it_embeds(address: IPv4Address) -> None:
    for each in worlds.embeddings(address):
        found = addresses.special(addresses.plain(each))
        teredo = each in ip_network("2001::/32")
        assert bool(found) == bool(teredo or addresses.special(address)), each


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("127.0.0.1", "loopback"), ("::1", "loopback"), ("::ffff:127.0.0.1", "loopback"),
        ("169.254.169.254", "cloud metadata"), ("fd00:ec2::254", "cloud metadata"),
        ("168.63.129.16", "cloud metadata"), ("::ffff:a9fe:a9fe", "cloud metadata"),
        ("169.254.1.1", "link-local"), ("10.1.2.3", "private"), ("100.64.0.1", "shared (CGNAT)"),
        ("fd12::1", "unique local"), ("224.0.0.1", "multicast"), ("198.18.0.1", "benchmarking"),
        ("64:ff9b::a9fe:a9fe", "cloud metadata (169.254.169.254 inside 64:ff9b::a9fe:a9fe)"),
        ("64:ff9b::808:808", ""), ("64:ff9b:1::808:808", "reserved"), ("192.0.2.1", ""),
        ("2002:7f00:1::", "loopback (127.0.0.1 inside 2002:7f00:1::)"),
        ("::7f00:1", "reserved"), ("8.8.8.8", ""), ("2606:4700::1111", ""),
    ],
)  # fmt: skip
def test_kinds(text: str, kind: str) -> None:
    assert kind == addresses.special(addresses.read(text))


@pytest.mark.parametrize(
    "text", ["127.1", "2130706433", "0x7f000001", "0177.0.0.1", "", "fe80::1%lo", "[::1]", "a", "1"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError):
        addresses.read(text)


@pytest.mark.parametrize(
    ("network", "address", "does"),
    [
        ("127.0.0.0/8", "127.0.0.1", True), ("127.0.0.0/24", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.1", True), ("126.0.0.0/7", "127.0.0.1", False),
        ("0.0.0.0/0", "127.0.0.1", False), ("::/0", "::1", False), ("::/64", "::1", False),
        ("10.0.0.0/8", "10.0.0.1", True), ("0.0.0.0/0", "168.63.129.16", False),
        ("168.63.129.0/24", "168.63.129.16", False), ("168.63.129.16", "168.63.129.16", True),
        ("64:ff9b::/96", "64:ff9b::7f00:1", False), ("64:ff9b::7f00:1", "64:ff9b::7f00:1", True),
        ("2002::/16", "2002:a00:1::", False), ("fc00::/6", "fd00::1", False),
    ],
)  # fmt: skip
def test_a_rule_must_mean_it(network: str, address: str, does: bool) -> None:
    assert does == addresses.names_special(ip_network(network), ip_address(address))


@given(worlds.special_v4)
def test_two_ways_of_embedding_at_once(address: IPv4Address) -> None:
    """6to4 of a public address, with an ISATAP interface for a special one."""
    outer = IPv6Address(0x2002 << 112 | 0x08080808 << 80 | 0x5EFE << 32 | int(address))

    assert addresses.special(outer)
    assert {address, IPv4Address("8.8.8.8")} == set(addresses.embedded(outer))


def test_zones_mean_nothing_elsewhere() -> None:
    with pytest.raises(ValueError):
        addresses.plain(IPv6Address("fe80::1%lo"))


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("::a00:1", ["10.0.0.1"]),
        ("::1:0a00:0001", []),
        ("64:ff9b::a00:1", ["10.0.0.1"]),
        ("64:ff9b::1:a00:1", []),
        ("64:ff9c::a00:1", []),
        ("2600::5efe:a00:1", ["10.0.0.1"]),
        ("2600::200:5efe:a00:1", ["10.0.0.1"]),
        ("2600::100:5efe:a00:1", []),
        ("2600::5eff:a00:1", []),
        ("2002:a00:1::", ["10.0.0.1"]),
        ("2002:a00:1:ffff::7", ["10.0.0.1"]),
        ("2003:a00:1::", []),
        ("2001:0:a00:1:0:0:f5ff:fffe", ["10.0.0.1", "10.0.0.1"]),
        ("2001:0:5db8:d822:0:0:f5ff:fffe", ["93.184.216.34", "10.0.0.1"]),
        ("2001:1:a00:1:0:0:f5ff:fffe", []),
        ("10.0.0.1", []),
    ],
)
def test_what_is_inside_an_address(text: str, inside: list[str]) -> None:
    """Each form beside its neighbours, which differ in one bit of the prefix."""
    assert inside == [str(each) for each in addresses.embedded(ip_address(text))]


def test_what_a_tunnels_server_is_in_is_not_named_by_its_network() -> None:
    """Special by itself and by what it embeds: only its own address names it."""
    teredo = ip_address("2001:0:a00:1::1")
    assert not addresses.names_special(ip_network("2001::/32"), teredo)
    assert addresses.names_special(ip_network("2001:0:a00:1::1/128"), teredo)


RANGES = {
    "unspecified": "0.0.0.0/8 ::/128",
    "private": "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16",
    "shared (CGNAT)": "100.64.0.0/10",
    "loopback": "127.0.0.0/8 ::1/128",
    "link-local": "169.254.0.0/16 fe80::/10",
    "protocol": "192.0.0.0/24 2001::/23",
    "6to4 relay": "192.88.99.0/24",
    "benchmarking": "198.18.0.0/15 2001:2::/48",
    "multicast": "224.0.0.0/4 ff00::/8",
    "reserved": "240.0.0.0/4 ::2/127 100:0:0:1::/64 200::/7 1000::/4 4000::/2 c000::/3 fe00::/9",
    "discard-only": "100::/64",
    "unique local": "fc00::/7",
    "site-local": "fec0::/10",
}
BESIDE = (
    "1.0.0.0 9.255.255.255 11.0.0.0 100.63.255.255 100.128.0.0 126.255.255.255 128.0.0.0"
    " 169.253.255.255 169.255.0.0 172.15.255.255 172.32.0.0 191.255.255.255 192.0.1.0"
    " 192.88.98.255 192.88.100.0 192.167.255.255 192.169.0.0 198.17.255.255 198.20.0.0"
    " 223.255.255.255 2000:: 2001:200:: 3fff:ffff:ffff:ffff::"
)


@pytest.mark.parametrize(
    ("network", "kind"), [(each, kind) for kind, all_ in RANGES.items() for each in all_.split()]
)
def test_a_range_is_special_from_its_first_address_to_its_last(network: str, kind: str) -> None:
    whole = ip_network(network)

    assert (kind, kind) == (addresses.special(whole[0]), addresses.special(whole[-1]))
    assert kind == addresses.special_network(whole)


@pytest.mark.parametrize("text", BESIDE.split())
def test_what_lies_beside_a_range_is_ordinary(text: str) -> None:
    assert "" == addresses.special(ip_address(text))


@pytest.mark.parametrize(
    "text",
    [
        "169.254.169.254",
        "169.254.170.2",
        "100.100.100.200",
        "168.63.129.16",
        "fd00:ec2::254",
        "fd20:ce::254",
    ],
)
def test_each_cloud_s_metadata_is_known(text: str) -> None:
    """Where it lies in a range as well, a rule for the range must not open it."""
    address = ip_address(text)
    assert "cloud metadata" == addresses.special(address)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("10.0.0.0/8", "private"),
        ("10.0.0.0/7", ""),  # begins with it
        ("9.0.0.0/7", ""),
        ("11.0.0.0/8", ""),
        ("8.0.0.0/6", ""),  # all around it
        ("64:ff9b::a00:1", "private (10.0.0.1 inside 64:ff9b::a00:1)"),
        ("64:ff9b::/96", "reserved"),
        ("8.8.8.8", ""),
    ],
)
def test_a_network_is_special_where_all_of_it_is(text: str, kind: str) -> None:
    assert kind == addresses.special_network(ip_network(text, strict=False))


@pytest.mark.parametrize(
    ("text", "does"),
    [
        ("10.0.0.0/8", True),
        ("10.0.0.0/7", False),
        ("2001::/16", True),
        ("2000::/15", False),
    ],
)
def test_a_rule_says_where_from_so_many_bits_on(text: str, does: bool) -> None:
    assert does == addresses.is_place(ip_network(text))
