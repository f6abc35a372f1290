"""Network rules and policies as models: spelling, JSON, and what is refused before anything starts."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.model import strategies as some

from ringfence.errors import InvalidRequest
from ringfence.model import Credential, NetworkEvent, NetworkLimits, NetworkPolicy, NetworkRule
from ringfence.model.net.rules import check_secret

pytestmark = pytest.mark.anyone

TOKEN = Credential("TOKEN")


def field_of(make: Any) -> str:
    with pytest.raises(InvalidRequest) as refusal:
        make()
    return refusal.value.field


class TestRules:
    @given(some.rules)
    def test_a_canonical_rule_is_itself(self, rule: NetworkRule) -> None:
        fields = {name: getattr(rule, name) for name in rule.__match_args__}

        assert rule == NetworkRule(**fields)
        assert rule.text == NetworkRule.parse(rule.text).text

    @pytest.mark.parametrize(
        ("given", "text"),
        [
            ("A.com:443", "a.com:443"), ("!*.A.com.", "!*.a.com"), ("![::1]:80-80", "![::1]:80"),
            ("[fe80::/10]:1-65535", "fe80::/10"), ("10.0.0.0/8:5432, 80", "10.0.0.0/8:80,5432"),
            ("::ffff:10.0.0.0/104", "10.0.0.0/8"), ("10.0.0.1/32", "10.0.0.1"),
        ],
    )  # fmt: skip
    def test_one_spelling(self, given: str, text: str) -> None:
        assert text == NetworkRule.parse(given).text

    @pytest.mark.parametrize(
        ("field", "fields"),
        [
            ("host", {"host": "a.com:80"}), ("host", {"host": "!a.com"}), ("host", {"host": ""}),
            ("host", {"host": 7}), ("ports", {"ports": "443-80"}), ("ports", {"ports": 443}),
            ("action", {"action": "drop"}),
            ("methods[0]", {"methods": ("CONNECT",)}), ("methods[1]", {"methods": ("GET", "A B")}),
            ("methods", {"methods": "GET"}), ("paths[0]", {"paths": ("a",)}),
            ("paths[0]", {"paths": ("/a/../b",)}), ("paths", {"paths": "/a"}),
            ("credential", {"credential": "TOKEN"}), ("inspect", {"inspect": 1}),
            ("credential", {"action": "deny", "credential": TOKEN}),
            ("inspect", {"action": "deny", "inspect": True}),
            ("host", {"host": "10.0.0.0/8", "methods": ("GET",)}),
            ("host", {"host": "::1", "credential": TOKEN}),
        ],
    )  # fmt: skip
    def test_what_is_no_rule(self, field: str, fields: dict[str, Any]) -> None:
        assert field == field_of(lambda: NetworkRule(**{"host": "a.com", **fields}))

    def test_what_needs_the_inside_of_tls(self) -> None:
        assert not NetworkRule("a.com", "443").needs_tls_termination
        for more in ({"methods": ("GET",)}, {"paths": ("/",)}, {"credential": TOKEN}):
            assert NetworkRule("a.com", **cast("Any", more)).needs_tls_termination
        assert NetworkRule("a.com", inspect=True).needs_tls_termination

    def test_json_says_what_is_set(self) -> None:
        rule = NetworkRule("a.com", methods=("post", "GET", "get"), credential=TOKEN)

        assert {"host": "a.com"} == NetworkRule("A.com").to_json()
        assert {
            "host": "a.com",
            "methods": ["GET", "POST"],
            "credential": {"secret": "TOKEN", "header": "authorization", "scheme": "Bearer"},
        } == rule.to_json()


class TestCredentials:
    def test_the_value_of_the_header(self) -> None:
        assert "Bearer x" == TOKEN.value("x")
        assert "x" == Credential("TOKEN", "X-Api-Key", "").value("x")
        assert "x-api-key" == Credential("TOKEN", "X-Api-Key").header

    @pytest.mark.parametrize(
        ("field", "fields"),
        [
            ("secret", {"secret": ""}), ("secret.A-B", {"secret": "A-B"}),
            ("secret", {"secret": None}), ("header", {"header": ""}),
            ("header", {"header": "a: b\r\nc"}), ("header", {"header": "Host"}),
            ("header", {"header": "transfer-encoding"}), ("header", {"header": "é"}),
            ("scheme", {"scheme": "a b"}), ("scheme", {"scheme": "a\n"}),
        ],
    )  # fmt: skip
    def test_what_is_no_credential(self, field: str, fields: dict[str, Any]) -> None:
        assert field == field_of(lambda: Credential(**{"secret": "TOKEN", **fields}))

    @pytest.mark.parametrize(
        "value",
        ["hunter2\r\nHost: b", "hunter2\n", "hunter2\0", "hunter2\u00e9", "\udc80hunter2",
         " hunter2", "hunter2 ", "hunter2\t", "hunter2\x7f", ""],
    )  # fmt: skip
    def test_what_no_header_may_hold(self, value: str) -> None:
        with pytest.raises(InvalidRequest) as refusal:
            check_secret(value, "secrets.TOKEN")

        assert "secrets.TOKEN" == refusal.value.field
        assert "hunter2" not in str(refusal.value)

    def test_what_one_may(self) -> None:
        check_secret("ghp_x-Y.z~/+= a,b;c", "secrets.TOKEN")


class TestPolicies:
    def test_a_port_between_commas_belongs_to_the_rule_before(self) -> None:
        policy = NetworkPolicy.parse("a.com:80, 443,8000-8100,*.b.com,!x.b.com,[::1]:5,6")

        assert (
            "a.com:80,443,8000-8100", "*.b.com", "!x.b.com", "[::1]:5-6",
        ) == policy.allowed_hosts  # fmt: skip
        assert policy == NetworkPolicy.parse(",".join(policy.allowed_hosts))

    @pytest.mark.parametrize("text", ["a.com,443", "443", "a.com:80,", "a.com:80,-", "!a.com", "!"])
    def test_what_is_no_list(self, text: str) -> None:
        assert field_of(lambda: NetworkPolicy.parse(text)).startswith("network.allowed_hosts")

    @pytest.mark.parametrize("text", ["none,a.com", "a.com,unrestricted", "a.com, none"])
    def test_words_for_a_whole_policy_stand_alone(self, text: str) -> None:
        with pytest.raises(InvalidRequest, match="cannot be combined"):
            NetworkPolicy.parse(text)

    @given(some.policies)
    def test_the_text_form_of_the_text_rules_comes_back(self, policy: NetworkPolicy) -> None:
        if policy.allowed_hosts and not policy.allowed_hosts[0].startswith("!"):
            again = NetworkPolicy.parse(",".join(policy.allowed_hosts))

            assert policy.allowed_hosts == again.allowed_hosts

    @given(some.policies)
    def test_all_rules_are_both_kinds(self, policy: NetworkPolicy) -> None:
        texts = [rule.text for rule in policy.all_rules]

        assert list(policy.allowed_hosts) == texts[: len(policy.allowed_hosts)]
        assert policy.rules == policy.all_rules[len(policy.allowed_hosts) :]
        assert policy.is_none == (policy.is_limited and not texts and not policy.learn)

    def test_denies_alone_are_a_mistake(self) -> None:
        """Nothing is allowed by default, so they would be a policy of nothing."""
        assert "allowed_hosts" == field_of(lambda: NetworkPolicy(allowed_hosts=("!a.com",)))
        deny = NetworkRule("a.com", action="deny")
        assert "rules" == field_of(lambda: NetworkPolicy(rules=(deny,)))
        assert not NetworkPolicy(rules=(deny,), learn=True).is_none

    @pytest.mark.parametrize(
        ("field", "fields"),
        [
            ("learn", {"mode": "unrestricted", "learn": True}),
            ("rules", {"mode": "unrestricted", "rules": (NetworkRule("a.com"),)}),
            ("limits", {"mode": "unrestricted", "limits": NetworkLimits(connections=1)}),
            ("learn", {"learn": "yes"}), ("limits", {"limits": {"connections": 1}}),
            ("rules[0]", {"rules": ("a.com",)}), ("rules", {"rules": NetworkRule("a.com")}),
            ("rules", {"rules": (NetworkRule("a.com"),) * 10_001}),
        ],
    )  # fmt: skip
    def test_what_is_no_policy(self, field: str, fields: dict[str, Any]) -> None:
        assert field == field_of(lambda: NetworkPolicy(**fields))

    def test_json_says_what_is_set(self) -> None:
        rule = NetworkRule("a.com", paths=("/v1/*",))
        policy = NetworkPolicy(rules=(rule,), limits=NetworkLimits(connections=7))

        assert {
            "mode": "limited",
            "allowed_hosts": [],
            "rules": [{"host": "a.com", "paths": ["/v1/*"]}],
            "limits": {"connections": 7},
        } == policy.to_json()
        assert policy == NetworkPolicy.from_json(json.loads(json.dumps(policy.to_json())))

    @pytest.mark.parametrize(
        ("field", "form"),
        [
            ("rules[0].hots", {"rules": [{"hots": "a.com"}]}),
            ("rules[0].host", {"rules": [{}]}),
            ("rules[1].paths[0]", {"rules": [{"host": "a"}, {"host": "a", "paths": ["b"]}]}),
            ("rules[0].credential.secret", {"rules": [{"host": "a", "credential": {}}]}),
            ("limits.connection", {"limits": {"connection": 1}}),
            ("limits.idle_s", {"limits": {"idle_s": 0}}),
            ("rule", {"rule": []}),
        ],
    )  # fmt: skip
    def test_errors_in_json_name_the_field(self, field: str, form: dict[str, Any]) -> None:
        assert field == field_of(lambda: NetworkPolicy.from_json({"mode": "limited", **form}))

    def test_the_secrets_that_rules_name(self) -> None:
        rules = tuple(NetworkRule(f"{each}.com", credential=Credential(each)) for each in "BAB")

        assert ("A", "B") == NetworkPolicy(rules=rules).secrets

    def test_limits_have_defaults_without_being_given(self) -> None:
        assert (
            NetworkLimits()
            == NetworkPolicy().limits
            == NetworkPolicy(limits=NetworkLimits()).limits
        )
        assert NetworkPolicy() == NetworkPolicy(limits=NetworkLimits())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("connections", 0), ("connections", 65_537), ("connections", 1.5), ("connections", None),
        ("connections_per_s", 0), ("bytes_per_s", 0), ("header_bytes", 255), ("header_s", 0),
        ("header_s", None), ("connect_s", float("nan")), ("idle_s", float("inf")), ("idle_s", True),
    ],
)  # fmt: skip
def test_limits_that_make_no_sense(name: str, value: object) -> None:
    assert name == field_of(lambda: NetworkLimits(**cast("Any", {name: value})))


@given(some.events, st.text())
def test_events_drive_no_terminal(event: NetworkEvent, text: str) -> None:
    for value in (event.host, event.reason, event.method, event.path):
        assert value.isascii()
        assert value.isprintable()
    assert json.dumps(event.to_json()).isprintable()


def test_events_are_escaped_once() -> None:
    event = NetworkEvent(0.0, "a", "dns", host="a\x1b[2J\n\0é\u202e\ud800b", reason="x" * 5000)

    assert r"a\x1b[2J\n\x00\xe9\u202e\ud800b" == event.host
    assert event == NetworkEvent.from_json(event.to_json())
    assert 2048 == len(event.reason)
