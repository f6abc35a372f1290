"""What a rule opens of the host and around it, compared with what the egress process would dial."""

from __future__ import annotations

from ipaddress import ip_network

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.errors import InvalidRequest
from ringfence.model.net.network import NetworkPolicy
from ringfence.model.net.rules import NetworkRule
from ringfence.policy import addresses
from ringfence.policy.host_networks import HostNetworks
from ringfence.policy.network import Judge

pytestmark = pytest.mark.anyone

OWN_TEXTS = ("203.0.113.5", "10.9.8.7", "2a00:1450::5", "127.0.0.1", "::1")
OWN = [ip_network(text) for text in (*OWN_TEXTS, "127.0.0.0/8")]

SPECIAL = [
    "127.0.0.1",
    "127.0.0.1:7878",
    "127.255.255.254:1-65535",
    "127.0.0.0/8",
    "127.0.0.0/31:80",
    "[::1]:80",
    "::1",
    "::ffff:127.0.0.1",
    "[::ffff:7f00:1]:80",
    "::ffff:127.0.0.0/104",
    "::ffff:10.0.0.0/104",
    "::127.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1",
    "64:ff9b::/96",
    "2002:7f00:1::",
    "2002:a00:1::1",
    "2001:0:7f00:1::1",
    "2001::/32",
    "fe80::1",
    "fe80::/10",
    "fec0::1",
    "fd00::/8",
    "fd00:ec2::254",
    "fc00::/7",
    "ff02::1",
    "10.0.0.0/8",
    "10.1.2.3:22",
    "172.16.0.0/12",
    "172.31.255.255",
    "192.168.0.0/16",
    "192.168.1.0/24:443",
    "169.254.0.0/16",
    "169.254.169.254:80",
    "100.64.0.0/10",
    "100.100.100.200",
    "168.63.129.16",
    "0.0.0.0",
    "0.0.0.0/8",
    "255.255.255.255",
    "224.0.0.1",
    "198.18.0.1:3128",
    "::",
    "localhost",
    "LOCALHOST.:80",
    "a.localhost",
    "*.a.localhost",
    "*.localhost.localdomain",
    "localhost.localdomain",
    "a.localdomain",
    "localhost.localdomain4",
    "localhost6.localdomain6",
    "localhost4:80",
    "localhost6:80",
    "ip6-loopback:80",
    "localdomain:80",
    "ip6-localhost:80",
    "localdomain4:80",
    "localdomain6:80",
    # The host's own addresses, in every writing of them.
    "203.0.113.5:443",
    "203.0.113.0/24",
    "203.0.0.0/8",
    "2a00:1450::5",
    "2a00:1450::/32",
    "64:ff9b::cb00:7105",
    "2002:cb00:7105::",
]
ORDINARY = [
    "example.com",
    "*.example.com:443",
    "notlocalhost:443",
    "localhost.example.com",
    "1.1.1.1:53",
    "8.0.0.0/8",
    "203.0.114.0/24",
    "2606:4700::/32",
    "0.0.0.0/0",
    "::/0",
    "::ffff:0:0/96",
    "0.0.0.0/1",
    "10.0.0.0/7",
    "100.0.0.0/8",
    "172.0.0.0/8",
    "2000::/3",
    "!127.0.0.1",
]


def _policy(text: str) -> NetworkPolicy:
    return NetworkPolicy(allowed_hosts=(text, "example.org"))


@pytest.mark.parametrize("text", SPECIAL)
def test_the_host_and_its_neighbours_are_not_users(text: str) -> None:
    opened = HostNetworks().opened(_policy(text), OWN)
    rule = NetworkRule.parse(text)
    nested = HostNetworks().opened(NetworkPolicy(rules=(rule,)), OWN)

    assert opened is not None
    assert nested is not None
    assert ("allowed_hosts[0]", "rules[0].host") == (opened[0], nested[0])


@pytest.mark.parametrize("text", ORDINARY)
def test_the_internet_is(text: str) -> None:
    assert HostNetworks().opened(_policy(text), OWN) is None
    nested = NetworkPolicy(rules=(NetworkRule.parse(text), NetworkRule("example.org")))
    assert HostNetworks().opened(nested, OWN) is None


@pytest.mark.parametrize("text", ["10.1.0.0/16:80", "fd00:1::/32", "[fd00::1]:80"])
def test_networks_of_both_versions_are_listed_beside_each_other(text: str) -> None:
    for listed in (["fd00::/8", "10.0.0.0/8"], ["10.0.0.0/8", "fd00::/8"]):
        assert HostNetworks(listed).opened(_policy(text), OWN) is None
    assert HostNetworks(["fe80::/10", "192.168.0.0/16"]).opened(_policy(text), OWN) is not None


@pytest.mark.parametrize(
    ("listed", "wanted", "is_open"),
    [
        ("127.0.0.1:5432", "127.0.0.1:5432", True),
        ("127.0.0.1:5432", "127.0.0.1:5433", False),
        ("127.0.0.1:5432", "127.0.0.1", False),
        ("127.0.0.1:5432", "127.0.0.0/30:5432", False),
        ("192.168.0.0/16", "192.168.7.0/24:1-1023", True),
        ("192.168.0.0/16:80,443", "192.168.7.1:443", True),
        ("192.168.0.0/16:80,443", "192.168.7.1:80-443", False),
        ("192.168.0.0/16:80,443", "192.168.7.1:22,80", False),
        ("192.168.0.0/16:80,443", "192.168.7.1:80,443", True),
        ("192.168.0.0/16", "192.0.0.0/9", True),  # opens nothing special, listed or not
        ("10.0.0.0/8", "10.1.2.3", True),
        ("10.0.0.0/8", "10.9.8.7", False),  # the host's own
        ("10.0.0.0/8", "10.9.0.0/16", False),
        ("10.9.0.0/16", "10.9.0.0/16", False),  # the host's own is to be listed alone
        ("10.9.8.7:80", "10.9.8.7:80", True),
        ("169.254.0.0/16", "169.254.169.254", False),
        ("169.254.0.0/16", "169.254.0.0/16", False),
        ("169.254.169.254", "169.254.169.254:80", True),
        ("127.0.0.0/8", "127.0.0.1:80", True),  # every host has it: it need not be listed alone
        ("localhost:8080", "localhost:8080", True),
        ("localhost:8080", "localhost", False),
        ("localhost", "127.0.0.1", False),
    ],
)
def test_what_is_listed_may_be_reached(listed: str, wanted: str, is_open: bool) -> None:
    assert is_open == (HostNetworks([listed]).opened(_policy(wanted), OWN) is None)


def test_what_becomes_the_host_s_address_on_the_way_is_listed_by_itself() -> None:
    inside = "64:ff9b::cb00:7105"  # 203.0.113.5, through a translator

    assert HostNetworks(["203.0.113.5"]).opened(_policy("203.0.113.5"), OWN) is None
    assert ("allowed_hosts[0]", f"{inside} (the server's own address)") == HostNetworks(
        ["203.0.113.5"]
    ).opened(_policy(inside), OWN)
    assert HostNetworks([inside]).opened(_policy(inside), OWN) is None


def test_a_rule_that_is_about_requests_opens_the_host_too() -> None:
    policy = NetworkPolicy(
        rules=(NetworkRule("a.com"), NetworkRule("localhost", "80", methods=("GET",)))
    )

    assert ("rules[1].host", "localhost (loopback)") == HostNetworks().opened(policy, OWN)
    assert HostNetworks(["localhost:80"]).opened(policy, OWN) is None


def test_a_list_is_of_rules_that_allow() -> None:
    for wrong in ("!10.0.0.0/8", "127.1", "0x7f.1", "2130706433", "017700000001", "fe80::1%eth0"):
        with pytest.raises(InvalidRequest, match=r".") as refused:
            HostNetworks([wrong])
        assert "host_networks[0]" == refused.value.field


_ADDRESSES = st.one_of(
    st.sampled_from([str(each) for each in sorted(addresses.METADATA, key=str)]),
    st.sampled_from(OWN_TEXTS),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
    st.sampled_from([text.split("/")[0] for _, text in addresses._RANGES]),
)


@settings(max_examples=300, deadline=None)
@given(address=_ADDRESSES, other=_ADDRESSES, bits=st.integers(0, 128))
def test_what_is_not_refused_opens_nothing(address: str, other: str, bits: int) -> None:
    """Whatever rule a user gets, the egress process dials no special address because of it."""
    width = 128 if ":" in address else 32
    rule = f"{ip_network((address, min(bits, width)), strict=False)}"
    policy = _policy(rule)
    if HostNetworks().opened(policy, OWN) is not None:
        return
    judge = Judge(policy, OWN_TEXTS)
    for each in (address, other):
        plain = addresses.read(each)
        if addresses.special(plain) or each in OWN_TEXTS:
            assert not judge.literal_allowed(each, 80), (rule, each)
            assert not judge.address_allowed("example.org", each, 80), (rule, each)
