"""Small worlds of names, addresses and ports, in which rules and questions often meet."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from hypothesis import strategies as st

from ringfence.errors import InvalidRequest
from ringfence.model import Credential, NetworkPolicy, NetworkRule

NAMES = ("a.com", "b.a.com", "c.b.a.com", "xa.com", "a.com.evil.org", "localhost")
PATTERNS = (*NAMES, "*.a.com", "*.b.a.com", "*.evil.org")
PORTS = (1, 22, 80, 443, 8000, 65535)
PORT_SETS = ("", "80", "443", "22,443", "80-443", "8000-65535", "1-21")
PATHS = ("/", "/v1/a", "/v1/", "/v2", "/V1/a", "/v1/../v2", "/v1/%2e%2e/v2", "/v1//a", "/v1/a?b=c")
METHODS = ("GET", "POST", "get", "DELETE")

PUBLIC_V4 = ("203.0.113.5", "8.8.8.8", "93.184.216.34")
SPECIAL_V4 = (
    "0.0.0.0", "10.0.0.1", "10.255.0.1", "100.64.0.1", "127.0.0.1", "127.9.9.9", "169.254.169.254",
    "168.63.129.16", "172.16.5.4", "192.0.0.8", "192.168.1.1", "198.18.0.1", "224.0.0.1",
    "240.0.0.1", "255.255.255.255",
)  # fmt: skip
PUBLIC_V6 = ("2001:db8::5", "2606:4700::1111", "2a00::1")
SPECIAL_V6 = (
    "::", "::1", "fe80::1", "fec0::1", "fc00::1", "fd00:ec2::254", "ff02::1", "100::1", "2001:2::1",
    "64:ff9b:1::1", "5f00::1", "4000::", "2001:10::1",
)  # fmt: skip
NETWORKS = (
    *PUBLIC_V4, *SPECIAL_V4, *PUBLIC_V6, *SPECIAL_V6, "0.0.0.0/0", "0.0.0.0/1", "8.0.0.0/6",
    "10.0.0.0/8", "10.0.0.0/24", "127.0.0.0/8", "126.0.0.0/7", "169.254.0.0/16", "203.0.113.0/24",
    "::/0", "::/8", "2000::/3", "2001:db8::/32", "64:ff9b::/96", "2002::/16", "2001::/32",
    "fc00::/7", "fe80::/10", "198.18.0.0/15", "2001:2::/48",
)  # fmt: skip


def embeddings(address: IPv4Address) -> tuple[IPv6Address, ...]:
    """Every IPv6 address that a stack, translator or tunnel turns into `address`."""
    v4 = int(address)
    texts = {
        "mapped": 0xFFFF << 32 | v4,
        "NAT64": int(IPv6Address("64:ff9b::")) | v4,
        "6to4": 0x2002 << 112 | v4 << 80,
        "6to4 with an interface": 0x2002 << 112 | v4 << 80 | 0x1234,
        "Teredo server": 0x20010000 << 96 | v4 << 64 | (~int(IPv4Address("8.8.8.8")) & 0xFFFFFFFF),
        "Teredo client": 0x20010000 << 96 | int(IPv4Address("8.8.8.8")) << 64 | (~v4 & 0xFFFFFFFF),
        "ISATAP": 0x20010DB8 << 96 | 0x5EFE << 32 | v4,
        "ISATAP, universal": 0x20010DB8 << 96 | 0x02005EFE << 32 | v4,
    }
    return tuple(IPv6Address(value) for value in texts.values())


def compatible(address: IPv4Address) -> IPv6Address:
    """`::10.0.0.1`: deprecated, and special whatever it embeds."""
    return IPv6Address(int(address))


special_v4 = st.one_of(
    st.sampled_from(SPECIAL_V4).map(IPv4Address),
    *(
        st.ip_addresses(v=4, network=network)
        for network in ("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16",
                        "172.16.0.0/12", "192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/3")
    ),
)  # fmt: skip
special_v6 = st.one_of(
    st.sampled_from(SPECIAL_V6).map(IPv6Address),
    special_v4.map(compatible),
    special_v4.flatmap(lambda v4: st.sampled_from(embeddings(v4))),
    st.ip_addresses(v=6, network="fc00::/7"),
    st.ip_addresses(v=6, network="fe80::/10"),
    st.ip_addresses(v=6, network="ff00::/8"),
    st.ip_addresses(v=6, network="::/8").filter(lambda a: a not in ip_network("64:ff9b::/96")),
)
special = special_v4 | special_v6
public = st.sampled_from((*PUBLIC_V4, *PUBLIC_V6)).map(ip_address)
anywhere = st.one_of(special, public, st.ip_addresses())

actions = st.sampled_from(["allow", "allow", "deny"])
port_sets = st.sampled_from(PORT_SETS)
plain_name_rules = st.builds(
    NetworkRule, st.sampled_from((*PATTERNS, "public")), port_sets, actions
)
http_rules = st.builds(
    NetworkRule,
    st.sampled_from(PATTERNS),
    port_sets,
    actions,
    methods=st.sampled_from([(), ("GET",), ("GET", "POST")]),
    paths=st.sampled_from([(), ("/v1/*",), ("/v1/a", "/v2"), ("/*",)]),
)
secret_rules = st.builds(
    NetworkRule,
    st.sampled_from(PATTERNS),
    port_sets,
    paths=st.sampled_from([(), ("/v1/*",)]),
    credential=st.builds(
        Credential, st.sampled_from(["ONE", "TWO"]), st.sampled_from(["authorization", "x-key"])
    ),
)
name_rules = st.one_of(plain_name_rules, http_rules, secret_rules)
address_rules = st.builds(
    NetworkRule,
    st.sampled_from(NETWORKS)
    | st.builds(lambda a, bits: str(ip_network((int(a), bits), strict=False)),
                st.ip_addresses(v=4), st.integers(0, 32)),
    port_sets,
    actions,
)  # fmt: skip
rules = name_rules | address_rules


def policy_of(some: list[NetworkRule], *, learn: bool = False) -> NetworkPolicy:
    """A policy of these rules; where all of them deny, with one that allows nothing they ask."""
    try:
        return NetworkPolicy(rules=tuple(some), learn=learn)
    except InvalidRequest:
        return NetworkPolicy(rules=(*some, NetworkRule("unasked.test")), learn=learn)


rule_lists = st.lists(rules, max_size=6)
policies = st.builds(lambda some, learn: policy_of(some, learn=learn), rule_lists, st.booleans())
limited = rule_lists.map(policy_of)
names = st.sampled_from(NAMES)
ports = st.sampled_from(PORTS) | st.integers(1, 65535)
