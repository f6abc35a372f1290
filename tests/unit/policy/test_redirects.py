"""What the kernel lets through is at least what the judge allows, and of loopback only what is named."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.policy import worlds

from ringfence.model import NetworkPolicy, NetworkRule
from ringfence.model.net import hosts
from ringfence.policy import addresses, redirects
from ringfence.policy.network import Judge
from ringfence.policy.redirects import Redirect, Redirects, redirects_of

pytestmark = pytest.mark.anyone

Address = IPv4Address | IPv6Address
LOOPBACK = [ip_network(text) for text in redirects.LOOPBACK]
FIXED = {
    Redirect("127.0.0.53/32", 53, 53),
    Redirect("198.18.0.1/32", 3128, 3128),
}


def is_loopback(address: Address) -> bool:
    return any(address in network for network in LOOPBACK)


def taken(some: tuple[Redirect, ...], address: Address, port: int) -> bool:
    return any(
        address in ip_network(each.network) and each.first <= port <= each.last for each in some
    )


def routed(plan: Redirects, address: Address) -> bool:
    return any(address in ip_network(network) for network in plan.routes)


@given(worlds.policies, worlds.anywhere, worlds.ports)
def test_the_kernel_lets_through_what_the_judge_allows(
    policy: NetworkPolicy, address: Address, port: int
) -> None:
    plan = redirects_of(policy)
    plain = addresses.plain(address)
    if is_loopback(plain) or not Judge(policy).literal_allowed(str(plain), port):
        return  # the sandbox's own loopback, or nothing to let through

    assert routed(plan, plain)
    assert taken(plan.others, plain, port)


@given(worlds.policies, worlds.names, worlds.ports)
def test_and_every_port_of_an_allowed_name(policy: NetworkPolicy, name: str, port: int) -> None:
    if not Judge(policy).name_allowed(name, port):
        return
    plan = redirects_of(policy)
    for network in redirects.SYNTHETIC:
        for address in (ip_network(network)[2], ip_network(network)[-1]):
            assert routed(plan, address)
            assert taken(plan.others, address, port)


@given(worlds.policies)
def test_loopback_is_redirected_only_where_a_rule_names_address_and_port(
    policy: NetworkPolicy,
) -> None:
    named = {
        (str(ip_network(rule.host)), first, last)
        for rule in policy.all_rules
        if rule.is_address and not rule.denies and rule.ports and "/" not in rule.host
        for first, last in hosts.port_ranges(rule.ports)
    }
    plan = redirects_of(policy)

    for each in {*plan.loopback, *plan.others} - FIXED:
        network = ip_network(each.network)
        inside = any(network.version == own.version and network.subnet_of(own) for own in LOOPBACK)  # type: ignore[arg-type]
        if each in plan.loopback:
            assert inside
            assert any(
                net == each.network and first >= each.first and last <= each.last
                for net, first, last in named
            )
        else:
            assert not inside
    assert not any(is_loopback(ip_network(route)[0]) for route in plan.routes if "/0" not in route)


@given(worlds.policies)
def test_the_resolver_and_the_proxy_are_always_there(policy: NetworkPolicy) -> None:
    plan = redirects_of(policy)

    if policy.is_none:
        assert Redirects() == plan
    else:
        assert redirects.SYNTHETIC == plan.routes[:2]
        assert Redirect("127.0.0.53/32", 53, 53) == plan.loopback[0]
        assert Redirect("198.18.0.1/32", 3128, 3128) == plan.others[0]


@given(worlds.limited, worlds.anywhere, worlds.ports)
def test_a_port_no_rule_names_is_refused_by_the_kernel(
    policy: NetworkPolicy, address: Address, port: int
) -> None:
    """So that scanning ports costs the egress process nothing."""
    plain = addresses.plain(address)
    covering = [
        rule
        for rule in policy.all_rules
        if not rule.denies
        and (
            plain in ip_network(rule.host)
            if rule.is_address
            else rule.host == "public" or is_synthetic(plain)
        )
        and any(low <= port <= high for low, high in hosts.port_ranges(rule.ports))
    ]
    plan = redirects_of(policy)
    proxy = (str(plain), port) == redirects.PROXY

    assert bool(covering) or proxy or not taken(plan.others, plain, port)


def is_synthetic(address: Address) -> bool:
    return any(address in ip_network(network) for network in redirects.SYNTHETIC)


@given(worlds.rule_lists)
def test_what_is_allowed_is_read_alike_from_text_and_objects(rules: list[NetworkRule]) -> None:
    texts = NetworkPolicy(allowed_hosts=tuple(rule.text for rule in rules), learn=True)
    wanted = {(rule.host, rule.ports) for rule in rules if not rule.denies}

    assert wanted == set(redirects.allowed(texts))
    assert wanted == set(redirects.allowed(NetworkPolicy(rules=tuple(rules), learn=True)))


def test_examples() -> None:
    plan = redirects_of(
        NetworkPolicy.parse(
            "a.com:443,b.com:80,443,!c.com,10.0.0.0/8:5432,127.0.0.1:5432,127.0.0.0/8"
        )
    )

    assert ("198.18.0.0/15", "2001:2::/48", "10.0.0.0/8") == plan.routes
    assert (
        Redirect("127.0.0.53/32", 53, 53),
        Redirect("127.0.0.1/32", 5432, 5432),
    ) == plan.loopback
    assert (
        Redirect("198.18.0.1/32", 3128, 3128),
        Redirect("198.18.0.0/15", 80, 80),
        Redirect("198.18.0.0/15", 443, 443),
        Redirect("2001:2::/48", 80, 80),
        Redirect("2001:2::/48", 443, 443),
        Redirect("10.0.0.0/8", 5432, 5432),
    ) == plan.others


def test_public_takes_its_ports_everywhere_but_on_loopback() -> None:
    plan = redirects_of(NetworkPolicy.parse("public:80,!public:25"))

    assert ("198.18.0.0/15", "2001:2::/48", "0.0.0.0/0", "::/0") == plan.routes
    assert {"198.18.0.0/15", "2001:2::/48", "0.0.0.0/0", "::/0"} == {
        each.network for each in plan.others if (80, 80) == (each.first, each.last)
    }
    assert 1 == len(plan.loopback)


def test_learning_takes_everything_but_loopback() -> None:
    plan = redirects_of(NetworkPolicy(learn=True))

    assert ("198.18.0.0/15", "2001:2::/48", "0.0.0.0/0", "::/0") == plan.routes
    assert Redirect("0.0.0.0/0", 1, 65535) in plan.others
    assert 1 == len(plan.loopback)


def test_no_network_and_the_hosts_network_need_nothing() -> None:
    assert Redirects() == redirects_of(NetworkPolicy.none())
    assert Redirects() == redirects_of(NetworkPolicy.unrestricted())


@given(st.integers(30, 80))
def test_many_ports_become_every_port(count: int) -> None:
    """The kernel walks its rules one by one, and the egress process decides anyway."""
    ports = ",".join(str(port) for port in range(2, 2 * count + 2, 2))
    plan = redirects_of(NetworkPolicy(rules=(NetworkRule("a.com", ports),)))

    assert len(plan.others) <= 65
    assert taken(plan.others, ip_network("198.18.0.0/15")[9], 2 * count)
    assert (2 * count > 64) == taken(plan.others, ip_network("198.18.0.0/15")[9], 3)


def test_many_networks_become_one_redirect_and_keep_their_routes() -> None:
    texts = tuple(f"10.{i // 250}.{i % 250}.0/24:{1000 + i}" for i in range(3000))
    plan = redirects_of(NetworkPolicy(allowed_hosts=texts))

    assert 3 == len(plan.others)
    assert routed(plan, IPv4Address("10.11.249.7"))
    assert not routed(plan, IPv4Address("10.12.0.1"))
    assert taken(plan.others, IPv4Address("10.11.249.7"), 3999)


def test_sixty_four_networks_have_a_redirect_each_and_one_more_has_not() -> None:
    for count, redirected in ((64, 1 + 64), (65, 1 + 2)):
        texts = tuple(f"10.{i}.0.0/16:80" for i in range(count))
        plan = redirects_of(NetworkPolicy(allowed_hosts=texts))

        assert (redirected, 2 + count) == (len(plan.others), len(plan.routes))


def test_beside_loopback_nothing_is_loopback() -> None:
    near: tuple[str, ...] = ("126.0.0.0/8", "126.255.255.255/32", "128.0.0.0/32", "12.7.0.1/32")
    near += ("::2/128", "::12/128", "::1:0:1/128")
    plan = redirects_of(NetworkPolicy(allowed_hosts=near))

    assert near == plan.routes[2:]
    assert near == tuple(each.network for each in plan.others[1:])
    assert 1 == len(plan.loopback)


@pytest.mark.parametrize(
    ("text", "loopback"),
    [
        ("127.0.0.1", ()),
        ("127.0.0.1:80", (Redirect("127.0.0.1/32", 80, 80),)),
        ("127.0.0.0/8:80", ()),
        ("[::1]:80", (Redirect("::1/128", 80, 80),)),
    ],
)
def test_the_sandbox_s_own_loopback_stays_its_own(
    text: str, loopback: tuple[Redirect, ...]
) -> None:
    """But for what a rule names to the port."""
    plan = redirects_of(NetworkPolicy(allowed_hosts=(text,)))

    assert loopback == plan.loopback[1:]
    assert redirects.SYNTHETIC == plan.routes


@pytest.mark.parametrize("learn", [False, True])
def test_a_policy_that_learns_lets_names_and_addresses_through_on_every_port(learn: bool) -> None:
    plan = redirects_of(NetworkPolicy(allowed_hosts=("a.test:443",), learn=learn))

    for network in (*redirects.SYNTHETIC, "0.0.0.0/0", "::/0"):
        address = ip_network(network)[1 << 8]
        assert learn == taken(plan.others, address, 22), network
        assert (learn or network in redirects.SYNTHETIC) == routed(plan, address), network


def test_a_rule_about_the_addresses_of_names_takes_no_port_from_names() -> None:
    made = redirects_of(NetworkPolicy.parse("a.test:443,198.18.0.0/15:80"))

    ports = {(each.first, each.last) for each in made.others if "198.18.0.0/15" == each.network}
    assert {(80, 80), (443, 443)} == ports


def test_without_a_rule_for_names_no_port_leads_to_one() -> None:
    """Also where there are too many ports for a redirect each."""
    for count in (1, 70):
        ports = ",".join(str(2 * n + 1) for n in range(count))
        made = redirects_of(NetworkPolicy.parse(f"203.0.113.0/24:{ports}"))

        assert {"203.0.113.0/24", "198.18.0.1/32"} == {each.network for each in made.others}
