"""Policies in OCI's shape: what each part of one becomes, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from ringfence.errors import InvalidRequest
from ringfence.policy.seccomp import SeccompPolicy
from ringfence.policy.seccomp_forms import own_form

KNOWN = {"read", "write", "mkdir", "personality"}
RULE: dict[str, Any] = {"names": ["read"], "action": "SCMP_ACT_ALLOW"}


def policy(*rules: Any, **more: Any) -> Any:
    return own_form({"defaultAction": "SCMP_ACT_ERRNO", "syscalls": list(rules), **more}, KNOWN)


def condition(**data: Any) -> dict[str, Any]:
    found = policy({**RULE, "args": [data]})["rules"][0]["args"]
    assert 1 == len(found)
    made: dict[str, Any] = found[0]
    return made


@pytest.mark.parametrize(
    "data", [{}, {"rules": []}, [], "text", None, 3, {"default_action": "allow", "rules": []}]
)
def test_what_has_another_shape_stays_as_it_is(data: Any) -> None:
    assert data is own_form(data, KNOWN)


@pytest.mark.parametrize(
    ("action", "number", "own"),
    [
        ("SCMP_ACT_ALLOW", None, "allow"),
        ("scmp_act_log", None, "log"),
        ("SCMP_ACT_TRAP", None, "trap"),
        ("SCMP_ACT_KILL", None, "kill"),
        ("SCMP_ACT_KILL_THREAD", None, "kill"),
        ("SCMP_ACT_KILL_PROCESS", None, "kill"),
        ("SCMP_ACT_ERRNO", None, "errno"),
        ("deny", 38, "ENOSYS"),
        ("SCMP_ACT_ERRNO", 38, "ENOSYS"),
        ("SCMP_ACT_ERRNO", 0, "pretend"),
        ("SCMP_ACT_ALLOW", 38, "allow"),
    ],
)
def test_actions(action: str, number: int | None, own: str) -> None:
    as_default = own_form({"DefaultAction": action, "defaultErrnoRet": number}, KNOWN)
    rule = {"names": ["mkdir"], "action": action, "errnoRet": number}

    assert own == as_default["default_action"]
    assert own == policy(rule)["rules"][0]["action"]


@pytest.mark.parametrize("number", [True, False, -1, 100000, "38", 1.0])
def test_what_is_no_number_of_an_error_is_refused(number: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        policy({"names": ["read"], "action": "SCMP_ACT_ERRNO", "errnoRet": number})
    assert "syscalls[0].action" == refused.value.field


def test_names_of_other_machines_are_left_out_where_they_are_allowed_and_nowhere_else() -> None:
    """A denied name that is not known is a mistake: what it was to deny would go on."""
    names = ["read", "arm_fadvise64_64"]
    for action, kept in (
        ("SCMP_ACT_ALLOW", ["read"]),
        ("SCMP_ACT_LOG", ["read"]),
        ("SCMP_ACT_ERRNO", names),
        ("SCMP_ACT_KILL", names),
        ("SCMP_ACT_TRAP", names),
    ):
        assert [kept] == [
            rule["names"] for rule in policy({"names": names, "action": action})["rules"]
        ]
    assert [] == policy({"name": "arm_fadvise64_64", "action": "SCMP_ACT_ALLOW"})["rules"]
    with pytest.raises(InvalidRequest) as refused:
        SeccompPolicy.from_json(policy({"name": "made_up", "action": "SCMP_ACT_ERRNO"}))
    assert "rules[0].names[0]" == refused.value.field


def test_comparisons() -> None:
    assert {"arg": 0, "bits": 64, "in": [7]} == condition(value=7, op="SCMP_CMP_EQ")
    assert {"arg": 3, "bits": 64, "not_in": [7]} == condition(index=3, value=7, op="SCMP_CMP_NE")
    masked = condition(index=1, value=0xF0, valueTwo=0x10, op="SCMP_CMP_MASKED_EQ")
    assert {"arg": 1, "bits": 64, "mask": 0xF0, "in": [0x10]} == masked


@pytest.mark.parametrize(
    "op", ["SCMP_CMP_LT", "SCMP_CMP_LE", "SCMP_CMP_GE", "SCMP_CMP_GT", "", None]
)
def test_a_comparison_that_there_is_not_is_refused(op: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        condition(value=7, op=op)
    assert "syscalls[0].args[0].op" == refused.value.field


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"flags": ["SECCOMP_FILTER_FLAG_LOG"]}, "flags"),
        ({"listenerPath": "/run/x"}, "listenerPath"),
        ({"syscalls": {}}, None),
        ({"syscalls": "read"}, "syscalls"),
        ({"syscalls": ["read"]}, "syscalls[0]"),
        ({"syscalls": [{**RULE, "includes": {"caps": ["X"]}}]}, "syscalls[0].includes"),
        ({"syscalls": [{**RULE, "excludes": {"caps": ["X"]}}]}, "syscalls[0].excludes"),
        ({"syscalls": [{**RULE, "excludes": {}}]}, None),
        ({"syscalls": [{"action": "SCMP_ACT_ALLOW"}]}, "syscalls[0].names"),
        ({"syscalls": [{"names": [], "action": "SCMP_ACT_ALLOW"}]}, "syscalls[0].names"),
        ({"syscalls": [{"names": "read", "action": "SCMP_ACT_ALLOW"}]}, "syscalls[0].names"),
        ({"syscalls": [{"names": ["read"]}]}, "syscalls[0].action"),
        ({"syscalls": [{**RULE, "args": {}}]}, None),
        ({"syscalls": [{**RULE, "args": "x"}]}, "syscalls[0].args"),
        ({"syscalls": [{**RULE, "args": ["x"]}]}, "syscalls[0].args[0]"),
        (
            {"syscalls": [{**RULE, "args": [{"op": "SCMP_CMP_EQ", "mask": 3}]}]},
            "syscalls[0].args[0].mask",
        ),
    ],
)
def test_what_it_does_not_read_is_refused_by_name(data: dict[str, Any], field: str | None) -> None:
    """Not passed over: a condition that nobody reads would make the rule hold always."""
    whole = {"defaultAction": "SCMP_ACT_ERRNO", **data}
    if field is None:
        own_form(whole, KNOWN)
        return
    with pytest.raises(InvalidRequest) as refused:
        own_form(whole, KNOWN)
    assert field == refused.value.field
