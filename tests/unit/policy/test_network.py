"""The judge of a network policy, beside a slow and simple one, and attacked with every spelling."""

from __future__ import annotations

import random
from ipaddress import IPv4Address, IPv6Address, ip_network
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.policy import worlds

from ringfence.errors import InvalidRequest
from ringfence.model import Credential, NetworkPolicy, NetworkRule
from ringfence.model.net import hosts
from ringfence.model.net.paths import read_path
from ringfence.policy import addresses, network
from ringfence.policy.network import Decision, Judge

pytestmark = pytest.mark.anyone

Address = IPv4Address | IPv6Address
requests = st.tuples(
    worlds.names, worlds.ports, st.sampled_from(worlds.METHODS), st.sampled_from(worlds.PATHS)
)


def judge(*texts: str, own: tuple[str, ...] = ()) -> Judge:
    return Judge(NetworkPolicy(allowed_hosts=texts), own)


def told(decision: Decision) -> tuple[bool, str, str]:
    return decision.allowed, decision.reason, decision.rule


# -- a simple judge: one rule at a time, no tables ------------------------------------------------


def covers(rule: NetworkRule, port: int) -> bool:
    return any(low <= port <= high for low, high in hosts.port_ranges(rule.ports))


def is_about(rule: NetworkRule, name: str) -> bool:
    if rule.host == "public":
        return True
    if rule.host.startswith("*."):
        return name.endswith(rule.host[1:])
    return name == rule.host


def simple_name(policy: NetworkPolicy, name: str, port: int) -> bool:
    rules = [rule for rule in policy.all_rules if is_about(rule, name) and covers(rule, port)]
    if any(rule.denies and not rule.is_conditional for rule in rules):
        return False
    return policy.learn or any(not rule.denies for rule in rules)


def simple_request(policy: NetworkPolicy, name: str, port: int, method: str, path: str) -> bool:
    if not simple_name(policy, name, port):
        return False
    rules = [rule for rule in policy.all_rules if is_about(rule, name) and covers(rule, port)]
    read = ""
    if any(rule.paths for rule in rules):
        try:
            read = read_path(path)
        except InvalidRequest:
            return False

    def takes(rule: NetworkRule, fold: bool) -> bool:
        if rule.methods and method not in rule.methods:
            return False
        shown = read.lower() if fold else read
        wanted = [path.lower() if fold else path for path in rule.paths]
        return not wanted or any(
            shown.startswith(each[:-1]) if each.endswith("*") else shown == each for each in wanted
        )

    if any(takes(rule, True) for rule in rules if rule.denies):
        return False
    return policy.learn or any(takes(rule, False) for rule in rules if not rule.denies)


def simple_covering(policy: NetworkPolicy, address: Address, port: int) -> list[NetworkRule]:
    return [
        rule
        for rule in policy.all_rules
        if rule.is_address and address in ip_network(rule.host) and covers(rule, port)
    ]


@given(worlds.policies, worlds.names, worlds.ports)
def test_names_as_the_simple_judge_says(policy: NetworkPolicy, name: str, port: int) -> None:
    assert simple_name(policy, name, port) == Judge(policy).name_allowed(name, port).allowed


@given(worlds.policies, worlds.names)
def test_a_name_without_a_port_is_a_name_with_some_port(policy: NetworkPolicy, name: str) -> None:
    edges = {1, 65535}
    for rule in policy.all_rules:
        edges |= {
            p for span in hosts.port_ranges(rule.ports) for end in span for p in (end, end + 1)
        }
    some = any(simple_name(policy, name, port) for port in edges if port <= 65535)

    assert some == Judge(policy).name_allowed(name).allowed


@given(worlds.policies, requests)
def test_requests_as_the_simple_judge_says(
    policy: NetworkPolicy, request: tuple[str, int, str, str]
) -> None:
    assert simple_request(policy, *request) == Judge(policy).http_allowed(*request).allowed


# -- what always holds ----------------------------------------------------------------------------


@given(
    worlds.rule_lists, st.booleans(), st.randoms(use_true_random=False), requests, worlds.anywhere
)
def test_the_order_of_rules_does_not_matter(
    rules: list[NetworkRule],
    learn: bool,
    chance: random.Random,
    request: tuple[str, int, str, str],
    address: Address,
) -> None:
    mixed = list(rules)
    chance.shuffle(mixed)
    one, other = (Judge(worlds.policy_of(some, learn=learn)) for some in (rules, mixed))
    name, port, *_ = request

    assert told(one.name_allowed(name, port)) == told(other.name_allowed(name, port))
    assert told(one.name_allowed(name)) == told(other.name_allowed(name))
    assert told(one.http_allowed(*request)) == told(other.http_allowed(*request))
    assert told(one.literal_allowed(str(address), port)) == told(
        other.literal_allowed(str(address), port)
    )
    assert one.credentials(*request) == other.credentials(*request)


@given(worlds.policies, worlds.rules, requests, worlds.anywhere)
def test_a_deny_only_takes_away_and_always_wins(
    policy: NetworkPolicy,
    rule: NetworkRule,
    request: tuple[str, int, str, str],
    address: Address,
) -> None:
    deny = NetworkRule(rule.host, rule.ports, "deny", rule.methods, rule.paths)
    before = Judge(policy)
    after = Judge(worlds.policy_of([*policy.all_rules, deny], learn=policy.learn))
    name, port, *_ = request

    assert before.name_allowed(name, port) or not after.name_allowed(name, port)
    assert before.http_allowed(*request) or not after.http_allowed(*request)
    assert before.literal_allowed(str(address), port) or not after.literal_allowed(
        str(address), port
    )
    if deny.is_address and address in ip_network(deny.host) and covers(deny, port):
        assert not after.literal_allowed(str(address), port)
        assert not after.address_allowed(name, str(address), port)
    if not deny.is_conditional and is_about(deny, name) and covers(deny, port):
        assert not after.name_allowed(name, port)
        assert not after.http_allowed(*request)
        assert not after.address_allowed(name, str(address), port)


@given(worlds.policies, worlds.rules, worlds.names, worlds.ports, worlds.anywhere)
def test_an_allow_only_adds(
    policy: NetworkPolicy, rule: NetworkRule, name: str, port: int, address: Address
) -> None:
    allow = NetworkRule(rule.host, rule.ports)
    before = Judge(policy)
    after = Judge(NetworkPolicy(rules=(*policy.all_rules, allow), learn=policy.learn))

    assert after.name_allowed(name, port) or not before.name_allowed(name, port)
    assert after.literal_allowed(str(address), port) or not before.literal_allowed(
        str(address), port
    )


@given(worlds.policies, worlds.names, worlds.special, worlds.ports)
@example(NetworkPolicy.parse("a.com,0.0.0.0/0,::/0"), "a.com", IPv4Address("169.254.169.254"), 80)
def test_no_special_address_passes_without_a_rule_that_means_it(
    policy: NetworkPolicy, name: str, address: Address, port: int
) -> None:
    """Resolved, named as a literal, or while it learns; through every way of writing it."""
    plain = addresses.plain(address)
    covering = [rule for rule in simple_covering(policy, plain, port) if not rule.denies]
    for decision in (
        Judge(policy).literal_allowed(str(address), port),
        Judge(policy).address_allowed(name, str(address), port),
    ):
        if decision:
            assert covering
            assert any(addresses.names_special(ip_network(rule.host), plain) for rule in covering)


@given(worlds.names, worlds.special_v4, worlds.ports)
def test_no_name_leads_to_a_special_address(name: str, address: IPv4Address, port: int) -> None:
    """Whatever the policy allows by name; with the control that a public address is reached."""
    everything = judge(*worlds.PATTERNS)

    assert everything.address_allowed(name, "203.0.113.5", port)
    for each in (address, worlds.compatible(address), *worlds.embeddings(address)):
        assert not everything.address_allowed(name, str(each), port)
        assert not everything.literal_allowed(str(each), port)


@given(
    worlds.policies,
    worlds.special_v4 | worlds.public.filter(lambda a: a.version == 4),
    worlds.ports,
)
def test_mapped_addresses_are_judged_as_what_they_are(
    policy: NetworkPolicy, address: IPv4Address, port: int
) -> None:
    plain, mapped = (
        Judge(policy).literal_allowed(text, port) for text in (str(address), f"::ffff:{address}")
    )

    assert told(plain) == told(mapped)


@given(worlds.policies, worlds.names, worlds.ports)
def test_every_spelling_of_a_name_gets_the_same_answer(
    policy: NetworkPolicy, name: str, port: int
) -> None:
    rules = Judge(policy)
    all_told = [
        told(rules.name_allowed(each, port))
        for each in (name, name.upper(), name.title(), name + ".", name.swapcase() + ".")
    ]

    assert 1 == len(set(all_told))


@given(worlds.policies, worlds.ports)
def test_what_is_no_name_is_never_allowed(policy: NetworkPolicy, port: int) -> None:
    """Not even while it learns."""
    rules = Judge(policy)
    for text in (
        "", ".", "a.com..", "a.com\0", "a.com\0.evil.org", "a.com%00", "user@a.com", "a.com:443",
        "a.com/", " a.com", "a.com\r\n", "\u212a.com", "a\u3002com", "127.0.0.1", "127.1", "[::1]",
        "2130706433", "0x7f000001", "*.a.com", "é.com", "\udc80.com",
    ):  # fmt: skip
        decision = rules.name_allowed(text, port)
        assert not decision
        assert decision.reason
        assert not rules.http_allowed(text, port, "GET", "/")
        assert not rules.terminates(text, port)


@given(worlds.policies, worlds.ports)
def test_what_is_no_address_is_never_allowed(policy: NetworkPolicy, port: int) -> None:
    rules = Judge(policy)
    for text in ("", "a.com", "127.1", "0x7f.1", "fe80::1%lo", "[::1]", "1.2.3.4:80", "10.0.0.0/8"):
        assert not rules.literal_allowed(text, port)
        assert not rules.address_allowed("a.com", text, port)


# -- one by one -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "port", "does"),
    [
        ("a.com", 443, True), ("a.com", 80, False), ("b.org", 1, True), ("x.b.org", 1, False),
        ("x.c.net", 80, True), ("x.y.c.net", 80, True), ("c.net", 80, False),
        ("xc.net", 80, False), ("evil-a.com", 443, False), ("a.com.evil", 443, False),
        ("no.c.net", 80, False), ("yes.c.net", 22, False),
    ],
)  # fmt: skip
def test_names(name: str, port: int, does: bool) -> None:
    rules = judge("a.com:443", "b.org", "*.c.net", "!no.c.net", "!*.c.net:22")

    assert does == rules.name_allowed(name, port).allowed


def test_a_decision_says_which_rule_and_why() -> None:
    rules = judge("*.a.com", "!no.a.com", "10.0.0.0/8:5432")

    assert (True, "allowed by *.a.com", "*.a.com") == told(rules.name_allowed("x.a.com", 1))
    assert (False, "no.a.com:1 is denied by !no.a.com", "!no.a.com") == told(
        rules.name_allowed("NO.a.com", 1)
    )
    assert (False, "no rule allows b.com", "") == told(rules.name_allowed("b.com"))
    assert (False, "10.0.0.1 is private, and no rule allows that network", "") == told(
        rules.address_allowed("x.a.com", "10.0.0.1", 443)
    )
    assert (True, "10.0.0.1 is allowed by 10.0.0.0/8:5432", "10.0.0.0/8:5432") == told(
        rules.address_allowed("x.a.com", "10.0.0.1", 5432)
    )
    assert "Decision(False" in repr(rules.name_allowed("b.com"))


def test_a_deny_of_every_port_hides_the_name() -> None:
    rules = judge("a.com:80,443", "!a.com:80", "b.com:80,443", "!b.com:1-500")

    assert rules.name_allowed("a.com")
    assert not rules.name_allowed("b.com")


class TestTheHostsOwnAddresses:
    OWN = ("203.0.113.9", "2001:db8::9", "fe80::9%eth0")

    @pytest.mark.parametrize("text", ["203.0.113.9", "::ffff:203.0.113.9", "2001:db8::9",
                                      "2002:cb00:7109::", "64:ff9b::cb00:7109"])  # fmt: skip
    def test_are_refused_by_name(self, text: str) -> None:
        assert judge("a.com").address_allowed("a.com", text, 80)
        assert not judge("a.com", own=self.OWN).address_allowed("a.com", text, 80)
        wide = judge("a.com", "0.0.0.0/0", "::/0", own=self.OWN)
        assert not wide.address_allowed("a.com", text, 80)
        assert not wide.literal_allowed(text, 80)
        learning = Judge(NetworkPolicy(learn=True), self.OWN)
        assert not learning.address_allowed("a.com", text, 80)

    @pytest.mark.parametrize("rule", ["203.0.113.9", "203.0.113.0/24", "203.0.113.0/24:80"])
    def test_a_rule_that_names_a_place_opens_them(self, rule: str) -> None:
        assert judge("a.com", rule, own=self.OWN).address_allowed("a.com", "203.0.113.9", 80)

    def test_others_are_not_theirs(self) -> None:
        assert judge("a.com", own=self.OWN).address_allowed("a.com", "203.0.113.10", 80)


@pytest.mark.parametrize("bits", [1, 7, 8, 9, 23, 24, 25, 31, 32])
def test_a_rule_reaches_from_the_first_address_of_its_network_to_the_last(bits: int) -> None:
    for start in ("20.0.0.0", "2600::"):
        network = ip_network(f"{start}/{bits}", strict=False)
        rules = judge(str(network))
        first, last = network[0], network[-1]

        for inside in (first, first + (int(last) - int(first)) // 2, last):
            assert rules.literal_allowed(str(inside), 80) or addresses.special(inside)
        assert not rules.literal_allowed(str(last + 1), 80)
        assert not (int(first) and rules.literal_allowed(str(first - 1), 80))


@pytest.mark.parametrize(
    "text", [str(each) for each in worlds.embeddings(IPv4Address("203.0.113.9"))[1:4]]
)
def test_a_deny_of_an_address_denies_what_becomes_it(text: str) -> None:
    """A translator or tunnel makes it of that; on the ports of the deny alone."""
    rules = judge("a.com", text, "!203.0.113.0/24:80-90")

    assert not rules.address_allowed("a.com", text, 80)
    assert not rules.literal_allowed(text, 90)
    assert rules.address_allowed("a.com", text, 91)
    assert rules.literal_allowed(text, 79)


class TestPublic:
    def test_is_every_name_and_address_that_is_not_special(self) -> None:
        rules = judge(
            "public:80,443", "!b.com", "!public:22", "10.1.0.0/16:22", own=("203.0.113.9",)
        )

        assert rules.name_allowed("x.org", 80)
        assert rules.name_allowed("public", 443)
        assert rules.address_allowed("x.org", "8.8.8.8", 80)
        assert rules.literal_allowed("2606:4700::1111", 443)
        assert rules.http_allowed("x.org", 80, "GET", "/a//b")
        assert "public:80,443" == rules.literal_allowed("8.8.8.8", 80).rule
        assert not rules.name_allowed("x.org", 8080)
        assert not rules.name_allowed("b.com", 80)
        assert not rules.name_allowed("x.org", 22)
        assert not rules.literal_allowed("8.8.8.8", 22)
        for own in ("203.0.113.9", "::ffff:203.0.113.9", "64:ff9b::cb00:7109"):
            assert not rules.address_allowed("x.org", own, 80)
            assert not rules.literal_allowed(own, 80)
        assert rules.literal_allowed("10.1.0.5", 22)
        assert not rules.literal_allowed("10.1.0.5", 80)

    @given(worlds.special, worlds.ports)
    def test_opens_no_special_address(self, address: Address, port: int) -> None:
        assert not judge("public").literal_allowed(str(address), port)
        assert not judge("public").address_allowed("a.com", str(address), port)

    @pytest.mark.parametrize(
        "options",
        [
            {"methods": ("GET",)},
            {"paths": ("/a",)},
            {"credential": Credential("ONE")},
            {"inspect": True},
        ],
    )
    def test_takes_nothing_that_needs_a_name(self, options: dict[str, Any]) -> None:
        with pytest.raises(InvalidRequest, match="public is every host"):
            NetworkRule("public", **options)
        NetworkRule("a.com", **options)


class TestLearning:
    def test_lets_through_what_no_rule_denies(self) -> None:
        learning = Judge(NetworkPolicy.parse("a.com,!b.com,!203.0.113.0/24", learn=True))

        assert learning.name_allowed("x.org", 22)
        assert learning.name_allowed("x.org")
        assert learning.address_allowed("x.org", "8.8.8.8", 22)
        assert learning.literal_allowed("8.8.8.8", 22)
        assert learning.http_allowed("x.org", 80, "GET", "/a//b")
        assert not learning.name_allowed("b.com", 22)
        assert not learning.name_allowed("b.com")
        assert not learning.address_allowed("x.org", "203.0.113.1", 22)
        assert not learning.literal_allowed("127.0.0.1", 22)

    def test_what_a_rule_denies_in_part_is_denied_in_that_part(self) -> None:
        """A path that cannot be read may be the one that is denied."""
        rules = (
            NetworkRule("c.com", action="deny", paths=("/admin*",)),
            NetworkRule("e.com", paths=("/x/*",)),
        )
        learning = Judge(
            NetworkPolicy(allowed_hosts=("!b.com:80", "!d.com"), rules=rules, learn=True)
        )

        assert learning.name_allowed("b.com")
        assert not learning.name_allowed("b.com", 80)
        assert learning.name_allowed("b.com", 81)
        assert (False, "d.com is denied by !d.com", "!d.com") == told(
            learning.name_allowed("d.com")
        )
        assert learning.http_allowed("c.com", 443, "GET", "/x")
        for path in ("/admin", "/Admin/x", "/x/%2e%2e/admin", "//admin"):
            assert not learning.http_allowed("c.com", 443, "GET", path)
        assert learning.http_allowed("e.com", 443, "GET", "/other")
        assert not learning.http_allowed("e.com", 443, "GET", "/other//y")
        for address in ("10.0.0.1", "127.0.0.1", "169.254.169.254", "64:ff9b::a00:1"):
            assert not learning.address_allowed("x.org", address, 443)
            assert not learning.literal_allowed(address, 443)


class TestRequests:
    RULES = (
        NetworkRule("api.com", "443", methods=("GET",), paths=("/v1/*",), credential=Credential("ONE")),
        NetworkRule("api.com", "443", methods=("POST",), paths=("/v1/new",)),
        NetworkRule("api.com", "443", "deny", paths=("/v1/admin*",)),
        NetworkRule("plain.com"),
    )  # fmt: skip

    @pytest.mark.parametrize(
        ("method", "target", "does"),
        [
            ("GET", "/v1/a?x=/../", True), ("GET", "/v1/", True), ("GET", "/v2", False),
            ("GET", "/v1", False), ("get", "/v1/a", False), ("POST", "/v1/new", True),
            ("POST", "/v1/a", False), ("DELETE", "/v1/a", False), ("GET", "/v1/admin", False),
            ("GET", "/v1/ADMIN/x", False), ("GET", "/v1/%61dmin", False),
            ("GET", "/v1/x/../admin", False), ("GET", "/v1/%2e%2e/v2", False),
            ("GET", "/v1//admin", False), ("GET", "/v1/..;/admin", False),
            ("GET", "/v1/a%2fb", False), ("GET", "/v1/a\\b", False), ("GET", "/v1/a\0", False),
            ("GET", "/v1/é", False), ("OPTIONS", "*", False), ("GET", "", False),
            ("GET", "http://api.com/v1/a", False),
        ],
    )  # fmt: skip
    def test_methods_and_paths(self, method: str, target: str, does: bool) -> None:
        rules = Judge(NetworkPolicy(rules=self.RULES))

        assert does == rules.http_allowed("api.com", 443, method, target).allowed

    def test_where_no_rule_is_about_paths_every_path_is_allowed(self) -> None:
        rules = Judge(NetworkPolicy(rules=self.RULES))

        assert rules.http_allowed("plain.com", 80, "GET", "/a//../b;c%2f")

    def test_what_is_judged_by_request_is_judged_inside_tls(self) -> None:
        rules = Judge(NetworkPolicy(rules=self.RULES))

        assert rules.terminates("API.com.", 443)
        assert not rules.terminates("api.com", 80)
        assert not rules.terminates("plain.com", 443)
        assert rules.is_conditional("api.com", 443)
        assert not rules.is_conditional("plain.com", 443)

    def test_credentials_go_where_their_rule_allows(self) -> None:
        rules = Judge(NetworkPolicy(rules=self.RULES))

        assert (Credential("ONE"),) == rules.credentials("api.com", 443, "GET", "/v1/a")
        assert () == rules.credentials("api.com", 443, "POST", "/v1/new")
        assert () == rules.credentials("api.com", 443, "GET", "/v1/admin")
        assert () == rules.credentials("api.com", 443, "GET", "/v1/../v1/a")
        assert () == rules.credentials("plain.com", 443, "GET", "/")

    def test_the_narrower_credential_wins(self) -> None:
        rules = Judge(NetworkPolicy(rules=(
            NetworkRule("*.a.com", credential=Credential("WIDE")),
            NetworkRule("*.b.a.com", credential=Credential("NARROW")),
            NetworkRule("c.b.a.com", credential=Credential("EXACT")),
            NetworkRule("c.b.a.com", paths=("/v1/*",), credential=Credential("PATH")),
            NetworkRule("*.a.com", credential=Credential("OTHER", "x-key", "")),
        )))  # fmt: skip

        def secrets(name: str, path: str) -> list[str]:
            return sorted(each.secret for each in rules.credentials(name, 443, "GET", path))

        assert ["OTHER", "WIDE"] == secrets("x.a.com", "/")
        assert ["NARROW", "OTHER"] == secrets("x.b.a.com", "/")
        assert ["EXACT", "OTHER"] == secrets("c.b.a.com", "/")
        assert ["OTHER", "PATH"] == secrets("c.b.a.com", "/v1/x")

    @pytest.mark.parametrize(("short", "long"), [("A", "B"), ("B", "A")])
    @pytest.mark.parametrize("beside", ["/", "/z"])
    def test_of_credentials_for_one_host_the_longer_path_wins(
        self, short: str, long: str, beside: str
    ) -> None:
        """Neither the order of the rules nor their text decides."""
        rules = [
            NetworkRule("a.com", paths=("/*",), credential=Credential(short)),
            NetworkRule("a.com", paths=("/v1/keys/*", beside), credential=Credential(long)),
        ]
        for given_ in (rules, rules[::-1]):
            judge_ = Judge(NetworkPolicy(rules=tuple(given_)))
            assert (Credential(long),) == judge_.credentials("a.com", 443, "GET", "/v1/keys/x")
            assert (Credential(short),) == judge_.credentials("a.com", 443, "GET", "/v1/y")

    @given(worlds.policies, requests)
    def test_no_credential_without_permission(
        self, policy: NetworkPolicy, request: tuple[str, int, str, str]
    ) -> None:
        rules = Judge(policy)
        found = rules.credentials(*request)

        assert not found or rules.http_allowed(*request)
        assert len({each.header for each in found}) == len(found)
        carrying = [rule.credential for rule in policy.rules if is_about(rule, request[0])]
        assert set(found) <= set(carrying)

    def test_a_path_that_cannot_be_read_is_refused_whatever_a_rule_without_paths_allows(
        self,
    ) -> None:
        rules = Judge(NetworkPolicy(rules=(
            NetworkRule("a.com", methods=("GET",)),
            NetworkRule("a.com", methods=("POST",), paths=("/new",)),
        )))  # fmt: skip

        assert rules.http_allowed("a.com", 443, "GET", "/x")
        for target in ("/a//b", "/a/../b", "/a;b", "/a%2fb"):
            refused = rules.http_allowed("a.com", 443, "GET", target)
            assert not refused
            assert repr(target) in refused.reason
            assert "" == refused.rule

    def test_a_deny_of_a_path_takes_that_path_away_and_no_other(self) -> None:
        rules = Judge(NetworkPolicy(rules=(
            NetworkRule("a.com"),
            NetworkRule("a.com", "443", "deny", methods=("GET",), paths=("/Shut/*",)),
        )))  # fmt: skip

        assert rules.http_allowed("a.com", 443, "GET", "/open")
        assert rules.http_allowed("a.com", 443, "POST", "/shut/x")
        assert rules.http_allowed("a.com", 80, "GET", "/shut/x")
        for target in ("/Shut/x", "/shut/x", "/SHUT/", "/%73hut/x"):
            refused = rules.http_allowed("a.com", 443, "GET", target)
            assert not refused
            assert refused.reason.startswith("denied by !a.com")
        # It is a request that decides: so it is read, and what could change it is not let through.
        assert rules.is_conditional("a.com", 443)
        assert rules.terminates("a.com", 443)
        assert not rules.is_conditional("a.com", 80)
        assert rules.name_allowed("a.com", 443)

    def test_of_two_credentials_that_say_as_much_it_is_always_the_same_one(self) -> None:
        rules = [NetworkRule("a.com", credential=Credential(name)) for name in ("B", "A", "C")]

        for given_ in (rules, rules[::-1], rules[1:] + rules[:1]):
            assert (Credential("A"),) == Judge(NetworkPolicy(rules=tuple(given_))).credentials(
                "a.com", 443, "GET", "/"
            )


def test_the_ports_that_several_denies_leave_are_none_or_some() -> None:
    """Whatever the order of their text."""
    assert not judge("a.com:9-20", "!a.com:10-20", "!a.com:9").name_allowed("a.com")
    assert judge("a.com:9-21", "!a.com:10-20", "!a.com:9").name_allowed("a.com")
    assert judge("a.com:8-20", "!a.com:10-20", "!a.com:9").name_allowed("a.com")
    learning = Judge(NetworkPolicy.parse("!a.com:2-65535,!a.com:1,b.com", learn=True))
    assert not learning.name_allowed("a.com")
    assert "a.com is denied by !a.com" in learning.name_allowed("a.com").reason


def test_of_an_address_that_holds_two_each_is_judged() -> None:
    """Teredo's server, and its client with every bit flipped."""
    for inside in ("2001:0:cb00:7109::", "2001:0:808:808:0:0:34ff:8ef6"):
        rules = judge(inside, "!203.0.113.9")
        assert not rules.literal_allowed(inside, 80)
        assert judge(inside, "!203.0.113.10").literal_allowed(inside, 80)


def test_an_unrestricted_policy_is_not_judged() -> None:
    with pytest.raises(ValueError):
        Judge(NetworkPolicy.unrestricted())


def test_no_policy_allows_nothing() -> None:
    nothing = Judge(NetworkPolicy.none())

    assert not nothing.name_allowed("a.com")
    assert not nothing.literal_allowed("8.8.8.8", 53)
    assert not nothing.http_allowed("a.com", 80, "GET", "/")


def test_thousands_of_rules_are_not_read_before_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever serves many sandboxes must not be held up by one policy."""
    names = [f"h{n}.com" for n in range(3000)]
    networks = [f"10.{n >> 8}.{n & 255}.0/24" for n in range(3000)]
    policy = NetworkPolicy(allowed_hosts=(*names, *networks, "!h7.com:80", "*.h7.com"))
    read: list[str] = []
    parse = network._parse

    def noted(text: str) -> NetworkRule:
        read.append(text)
        return parse(text)

    monkeypatch.setattr(network, "_parse", noted)

    rules = Judge(policy)
    assert [] == read

    assert rules.name_allowed("h7.com", 443)
    assert not rules.name_allowed("h7.com", 80)
    assert rules.literal_allowed("10.0.7.9", 443)
    assert not rules.name_allowed("other.com", 443)
    assert ["!h7.com:80", "10.0.7.0/24", "h7.com"] == sorted(read)
