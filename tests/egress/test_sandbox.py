"""One sandbox as the egress process knows it: its policy as it was sent."""

from __future__ import annotations

import pytest

from ringfence import Credential, NetworkLimits, NetworkPolicy, NetworkRule
from ringfence.egress.rules import exact_names, read_policy

POLICIES = [
    NetworkPolicy.none(),
    NetworkPolicy.parse(
        "a.test,*.b.test:443,!x.b.test,10.0.0.0/8:5432,[2001:db8::1]:80,2001:db8::/32"
    ),
    NetworkPolicy(
        allowed_hosts=("a.test",),
        rules=(
            NetworkRule("b.test", "443", methods=("GET",), paths=("/x/*",)),
            NetworkRule("c.test", credential=Credential("TOKEN", header="x-key", scheme="")),
            NetworkRule("d.test", action="deny"),
            NetworkRule("203.0.113.0/24", "80-90"),
        ),
        learn=True,
        limits=NetworkLimits(connections=7, idle_s=3.5),
    ),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_arrives_as_it_was(policy: NetworkPolicy) -> None:
    """Read without what names errors, which the host process has looked for."""
    form = policy.to_json()

    assert policy == read_policy(form) == NetworkPolicy.from_json(form)


@pytest.mark.parametrize("policy", POLICIES)
def test_names_that_are_allowed_one_by_one(policy: NetworkPolicy) -> None:
    """Two readings of the rules, a quick and a thorough one, find the same."""
    thorough = [
        rule.host
        for rule in policy.all_rules
        if not (rule.denies or rule.is_address or rule.host.startswith("*."))
    ]

    assert thorough == exact_names(policy)
