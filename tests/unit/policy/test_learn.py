"""The policy that a record proposes: enough for what was used, and nothing more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.policy import worlds

from ringfence.model import NetworkEvent, NetworkPolicy
from ringfence.policy.learn import learned_policy
from ringfence.policy.network import Judge

pytestmark = pytest.mark.anyone


def event(
    host: str,
    address: str,
    port: int,
    *,
    kind: str = "tcp",
    allowed: bool = True,
    rule: str = "",
) -> NetworkEvent:
    return NetworkEvent(0.0, "a", kind, host, address, port, allowed, rule=rule)


events = st.builds(
    event,
    st.just("") | worlds.names,
    worlds.anywhere.map(str),
    worlds.ports,
    kind=st.sampled_from(["dns", "tcp", "http", "connect", "socks", "udp"]),
    allowed=st.booleans(),
)
records = st.lists(events, max_size=8)


def used(record: list[NetworkEvent]) -> list[NetworkEvent]:
    return [each for each in record if each.allowed and each.kind != "dns"]


@given(records)
def test_what_was_used_is_allowed_again(record: list[NetworkEvent]) -> None:
    judge = Judge(learned_policy(record))
    for each in used(record):
        assert judge.address_allowed(each.host or None, each.address, each.port)


@given(records)
def test_every_rule_of_it_is_needed(record: list[NetworkEvent]) -> None:
    policy = learned_policy(record)
    for rule in policy.all_rules:
        assert not rule.denies
        assert not rule.host.startswith("*.")
        rest = Judge(NetworkPolicy(rules=tuple(each for each in policy.all_rules if each != rule)))
        assert not all(
            rest.address_allowed(each.host or None, each.address, each.port)
            for each in used(record)
        )


@given(records, worlds.names, worlds.ports)
def test_what_was_not_used_is_not_allowed(record: list[NetworkEvent], name: str, port: int) -> None:
    reached = any((name, port) == (each.host, each.port) for each in used(record))

    assert reached == Judge(learned_policy(record)).name_allowed(name, port).allowed


@given(records)
def test_it_can_be_given_as_text(record: list[NetworkEvent]) -> None:
    policy = learned_policy(record)
    text = ",".join(policy.allowed_hosts) or "none"

    assert policy == NetworkPolicy.parse(text) == NetworkPolicy.from_json(policy.to_json())


@given(records)
def test_the_order_of_the_record_does_not_matter(record: list[NetworkEvent]) -> None:
    assert learned_policy(record) == learned_policy(record[::-1])


def test_examples() -> None:
    record = [
        event("pypi.org", "203.0.113.5", 443),
        event("pypi.org", "203.0.113.6", 443),
        event("pypi.org", "203.0.113.5", 80),
        event("db.test", "10.0.0.7", 5432),
        event("own.test", "203.0.113.9", 80, rule="203.0.113.0/24"),
        event("", "2001:db8::1", 22),
        event("", "::ffff:203.0.113.7", 22),
        event("evil.test", "203.0.113.8", 443, allowed=False),
        event("looked.up", "198.18.0.9", 0, kind="dns"),
        event(r"a\x00.test", "", 443),
    ]

    assert (
        "10.0.0.7:5432", "[2001:db8::1]:22", "203.0.113.7:22", "203.0.113.9:80", "db.test:5432",
        "own.test:80", "pypi.org:80,443",
    ) == learned_policy(record).allowed_hosts  # fmt: skip


def test_nothing_used_is_no_network() -> None:
    assert learned_policy([]).is_none
