"""What `network=` takes, in the library."""

from __future__ import annotations

from typing import Any, cast

import pytest

from ringfence.errors import InvalidRequest
from ringfence.model import NetworkPolicy, NetworkRule
from ringfence.model.calls import parse_network

pytestmark = pytest.mark.anyone

RULE = NetworkRule("b.com", methods=("GET",))


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ("none", NetworkPolicy.none()),
        ("unrestricted", NetworkPolicy.unrestricted()),
        ("a.com:80,443,!x.a.com", NetworkPolicy(allowed_hosts=("a.com:80,443", "!x.a.com"))),
        ([], NetworkPolicy.none()),
        (["a.com"], NetworkPolicy(allowed_hosts=("a.com",))),
        (("a.com", RULE), NetworkPolicy(allowed_hosts=("a.com",), rules=(RULE,))),
        (NetworkPolicy.parse("a.com"), NetworkPolicy.parse("a.com")),
        ({"mode": "limited", "rules": [{"host": "a.com"}]}, NetworkPolicy(rules=(NetworkRule("a.com"),))),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_a_policy(given: Any, policy: NetworkPolicy) -> None:
    assert policy == parse_network(given)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("network", None), ("network", 7), ("network", b"a.com"), ("network", ""),
        ("network.allowed_hosts[1]", ["a.com", "a b"]), ("network.rules[0]", [7]),
        ("network.allowed_hosts[0]", "a b"), ("network.mode", {}),
        ("network.rules[0].host", {"mode": "limited", "rules": [{}]}),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_none(field: str, given: object) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parse_network(cast("Any", given))

    assert field == refusal.value.field
