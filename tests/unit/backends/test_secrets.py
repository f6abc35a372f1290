"""Secrets that a network policy writes into requests: there, and fit for a header."""

from __future__ import annotations

import pytest

from ringfence.backends.local.network import check_secrets
from ringfence.errors import InvalidRequest
from ringfence.model import Credential, NetworkPolicy, NetworkRule

POLICY = NetworkPolicy(rules=(NetworkRule("a.com", credential=Credential("TOKEN")),))


@pytest.mark.parametrize(
    ("field", "secrets"),
    [
        ("secrets", {}),
        ("secrets", {"OTHER": "x"}),
        ("secrets.TOKEN", {"TOKEN": ""}),
        ("secrets.TOKEN", {"TOKEN": "hunter2\r\nHost: evil.test"}),
    ],
)
def test_a_policy_without_its_secrets_is_refused(field: str, secrets: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check_secrets(POLICY, secrets)

    assert field == refusal.value.field
    assert "hunter2" not in str(refusal.value)


def test_what_no_rule_writes_may_be_anything() -> None:
    check_secrets(POLICY, {"TOKEN": "hunter2", "OTHER": "two\nlines"})
    check_secrets(NetworkPolicy.parse("a.com"), {"OTHER": ""})
