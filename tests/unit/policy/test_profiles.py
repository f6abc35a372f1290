"""A user's own policy: read strictly, compiled as it reads, never without the guards."""

from __future__ import annotations

import errno
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.policy import reading, simulator

from ringfence.errors import InvalidRequest
from ringfence.policy.seccomp import (
    ACTIONS,
    KNOWN_NAMES,
    FilterOptions,
    Rule,
    SeccompPolicy,
    compile_filter,
)

pytestmark = pytest.mark.anyone

X86 = reading.ARCH["x86_64"]


def verdict(policy: SeccompPolicy, name: str, *args: int, **options: bool) -> int:
    program = compile_filter(FilterOptions(**options), policy=policy, machine="x86_64")
    number = reading.TABLES["x86_64"][name]
    return simulator.run(simulator.decode(program), number, args, X86).value


def test_a_short_profile() -> None:
    policy = SeccompPolicy.from_json(
        {
            "default_action": "ENOSYS",
            "rules": [
                {"names": ["read", "write", "exit_group"], "action": "allow"},
                {"names": ["ptrace"], "action": "kill"},
                {"names": ["getpid"], "action": "errno"},
            ],
        }
    )

    assert reading.ALLOW == verdict(policy, "read")
    assert reading.KILL == verdict(policy, "ptrace")
    assert reading.EPERM == verdict(policy, "getpid")
    assert reading.ENOSYS == verdict(policy, "close")


def test_a_profile_can_add_to_the_default() -> None:
    policy = SeccompPolicy.from_json(
        {
            "extends": "os_hardened",
            "rules": [
                {"names": ["keyctl"], "action": "allow"},
                {"names": ["getcwd"], "action": "EACCES"},
            ],
        }
    )

    assert reading.ALLOW == verdict(policy, "keyctl")
    assert reading.fail(errno.EACCES) == verdict(policy, "getcwd")
    assert reading.ALLOW == verdict(policy, "read")
    assert reading.EPERM == verdict(policy, "bpf")
    assert reading.ALLOW == verdict(policy, "ptrace", debug=True)


def test_a_profile_that_allows_everything_keeps_the_guards() -> None:
    everything = {"names": sorted(KNOWN_NAMES), "action": "allow"}
    policy = SeccompPolicy.from_json(
        {"default_action": "allow", "unknown_action": "allow", "rules": [everything]}
    )

    assert reading.ALLOW == verdict(policy, "keyctl")
    assert reading.ENOSYS == verdict(policy, "clone3")
    assert reading.ENOSYS == verdict(policy, "openat2")
    assert reading.ENOSYS == verdict(policy, "io_uring_setup")
    assert reading.EPERM == verdict(policy, "unshare", 0x10000000)
    assert reading.EPERM == verdict(policy, "clone", 0x10000000)
    assert reading.EPERM == verdict(policy, "setns")
    assert reading.EPERM == verdict(policy, "fchmod", 3, 0o4755)
    assert reading.EPERM == verdict(policy, "setrlimit", 15, 1)
    assert reading.EPERM == verdict(policy, "prlimit64", 1, 7, 1)
    assert reading.EPERM == verdict(policy, "prctl", 36)
    assert reading.fail(errno.EAFNOSUPPORT) == verdict(policy, "socket", 1, 1, 0)
    assert reading.ALLOW == verdict(policy, "socket", 1, 1, 0, allow_af_unix=True)


def test_a_system_call_of_another_machine_is_no_mistake() -> None:
    """`open` is not known on aarch64, but it is a system call."""
    policy = SeccompPolicy.from_json({"rules": [{"names": ["open", "read"], "action": "allow"}]})

    program = simulator.decode(compile_filter(policy=policy, machine="aarch64"))

    assert reading.ALLOW == simulator.run(program, 63, (), reading.ARCH["aarch64"]).value


RULE: dict[str, Any] = {"names": ["read"], "action": "allow"}
CONDITION: dict[str, Any] = {"arg": 0, "bits": 32, "in": [1]}


@pytest.mark.parametrize(
    ("profile", "field"),
    [
        ([], ""),
        ("{}", ""),
        ({}, "rules"),
        ({"rules": {}}, "rules"),
        ({"rules": [RULE], "syscalls": []}, "syscalls"),
        ({"rules": [RULE], "guards": []}, "guards"),
        ({"rules": [RULE], "default_action": "SCMP_ACT_ALLOW"}, "default_action"),
        ({"rules": [RULE], "default_action": 1}, "default_action"),
        ({"rules": [RULE], "unknown_action": None}, "unknown_action"),
        ({"rules": [RULE], "extends": "debug"}, "extends"),
        ({"rules": [RULE], "about": 3}, "about"),
        ({"rules": [RULE, "read"]}, "rules[1]"),
        ({"rules": [{"names": ["read"]}]}, "rules[0].action"),
        ({"rules": [{"action": "allow"}]}, "rules[0].names"),
        ({"rules": [RULE | {"names": []}]}, "rules[0].names"),
        ({"rules": [RULE | {"names": "read"}]}, "rules[0].names"),
        ({"rules": [RULE | {"names": ["read", "raed"]}]}, "rules[0].names[1]"),
        ({"rules": [RULE | {"names": [0]}]}, "rules[0].names[0]"),
        ({"rules": [RULE | {"names": [["read"]]}]}, "rules[0].names[0]"),
        ({"rules": [RULE | {"action": "EWHATEVER"}]}, "rules[0].action"),
        ({"rules": [RULE | {"if": "tag_key"}]}, "rules[0].if"),
        ({"rules": [RULE | {"unless": []}]}, "rules[0].unless"),
        ({"rules": [RULE | {"if": None}]}, "rules[0].if"),
        ({"rules": [RULE | {"comment": ""}]}, "rules[0].comment"),
        ({"rules": [RULE | {"args": CONDITION}]}, "rules[0].args"),
        ({"rules": [RULE | {"args": [1]}]}, "rules[0].args[0]"),
        ({"rules": [RULE | {"args": [CONDITION | {"arg": 6}]}]}, "rules[0].args[0].arg"),
        ({"rules": [RULE | {"args": [CONDITION | {"arg": -1}]}]}, "rules[0].args[0].arg"),
        ({"rules": [RULE | {"args": [CONDITION | {"arg": True}]}]}, "rules[0].args[0].arg"),
        ({"rules": [RULE | {"args": [CONDITION | {"bits": 16}]}]}, "rules[0].args[0].bits"),
        ({"rules": [RULE | {"args": [CONDITION | {"bits": 32.0}]}]}, "rules[0].args[0].bits"),
        ({"rules": [RULE | {"args": [{"arg": 0, "in": [1]}]}]}, "rules[0].args[0].bits"),
        ({"rules": [RULE | {"args": [{"arg": 0, "bits": 64}]}]}, "rules[0].args[0]"),
        ({"rules": [RULE | {"args": [CONDITION | {"not_in": [2]}]}]}, "rules[0].args[0]"),
        ({"rules": [RULE | {"args": [CONDITION | {"in": []}]}]}, "rules[0].args[0].in"),
        ({"rules": [RULE | {"args": [CONDITION | {"in": 1}]}]}, "rules[0].args[0].in"),
        ({"rules": [RULE | {"args": [CONDITION | {"in": [1 << 32]}]}]}, "rules[0].args[0].in[0]"),
        ({"rules": [RULE | {"args": [CONDITION | {"in": ["x"]}]}]}, "rules[0].args[0].in[0]"),
        ({"rules": [RULE | {"args": [CONDITION | {"in": [1.5]}]}]}, "rules[0].args[0].in[0]"),
        ({"rules": [RULE | {"args": [CONDITION | {"mask": -1}]}]}, "rules[0].args[0].mask"),
        ({"rules": [RULE] * 1001}, "rules"),
    ],
    ids=str,
)
def test_a_mistake_is_named(profile: object, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SeccompPolicy.from_json(profile)

    assert field == caught.value.field


def test_a_value_that_the_mask_hides_is_a_mistake() -> None:
    """(argument & 0xf) is never 0x10: such a rule never matches, which nobody means."""
    condition = {"arg": 0, "bits": 32, "mask": "0xf", "in": [1, "0x10"]}

    with pytest.raises(InvalidRequest) as caught:
        SeccompPolicy.from_json({"rules": [RULE | {"args": [condition]}]})

    assert "rules[0].args[0].in[1]" == caught.value.field


def test_too_many_conditions_are_refused() -> None:
    values = list(range(0, 2000, 2))
    rules = [
        RULE | {"names": [name], "args": [{"arg": i, "bits": 64, "in": values[i:]}]}
        for i, name in enumerate(["read", "write", "close", "lseek", "mmap"])
    ]

    with pytest.raises(InvalidRequest) as caught:
        compile_filter(policy=SeccompPolicy.from_json({"rules": rules}))

    assert "rules" == caught.value.field


def test_the_json_form_reads_back() -> None:
    policy = SeccompPolicy.default()

    assert policy == SeccompPolicy.from_json(json.loads(json.dumps(policy.to_json())))


# -- any profile compiles to what it says -------------------------------------------------------

NAMES = ["read", "openat", "socket", "prlimit64", "fcntl", "clone"]


@st.composite
def conditions(draw: st.DrawFn) -> dict[str, Any]:
    bits = draw(st.sampled_from([32, 64]))
    small, large = st.integers(0, 7), st.integers(0, (1 << bits) - 1)
    mask = draw(st.one_of(st.just((1 << bits) - 1), st.integers(1, 15), large))
    words = st.one_of(small, large).map(lambda value: value & mask)
    values = draw(st.lists(words, min_size=1, max_size=8))
    key = draw(st.sampled_from(["in", "not_in"]))
    return {"arg": draw(st.integers(0, 2)), "bits": bits, "mask": mask, key: values}


RULES = st.fixed_dictionaries(
    {
        "names": st.lists(st.sampled_from(NAMES), min_size=1, max_size=4),
        "action": st.sampled_from(["allow", "log", "trap", "kill", "errno", "ENOENT", "EIO"]),
        "args": st.lists(conditions(), max_size=3),
    },
    optional={"if": st.sampled_from(["debug", "aio"]), "unless": st.sampled_from(["strict"])},
)
ARGUMENTS = st.tuples(
    *[
        st.one_of(
            st.integers(0, 31),
            st.integers(0, (1 << 64) - 1),
            st.builds(lambda low, high: high << 32 | low, st.integers(0, 7), st.integers(0, 7)),
        )
    ]
    * 6
)


def read_naively(policy: SeccompPolicy, name: str, args: tuple[int, ...], **on: bool) -> int:
    for rule in [*policy.guards, *policy.rules]:
        if name in rule.names and _counts(rule, on) and _holds(rule, args):
            return ACTIONS[rule.action]
    return ACTIONS[policy.default_action]


def _counts(rule: Rule, on: dict[str, bool]) -> bool:
    return (not rule.needs or on[rule.needs]) and not (rule.unless and on[rule.unless])


def _holds(rule: Rule, args: tuple[int, ...]) -> bool:
    for condition in rule.args:
        value = args[condition.arg] & ((1 << condition.bits) - 1)
        if ((value & condition.mask) in condition.values) == condition.negated:
            return False
    return True


@pytest.mark.full
@settings(max_examples=100, deadline=None)
@given(
    rules=st.lists(RULES, max_size=10),
    default=st.sampled_from(["allow", "EPERM", "kill"]),
    on=st.fixed_dictionaries(
        dict.fromkeys(["debug", "aio", "strict", "allow_af_unix", "by_init"], st.booleans())
    ),
    calls=st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=25),
)
def test_any_profile_compiles_to_what_it_says(
    rules: list[dict[str, Any]],
    default: str,
    on: dict[str, bool],
    calls: list[tuple[str, tuple[int, ...]]],
) -> None:
    policy = SeccompPolicy.from_json({"rules": rules, "default_action": default})
    options = FilterOptions(**on)
    for machine, table in reading.TABLES.items():
        program = simulator.decode(compile_filter(options, policy=policy, machine=machine))
        simulator.check(program)
        for name, args in calls:
            found = simulator.run(program, table[name], args, reading.ARCH[machine]).value
            assert hex(read_naively(policy, name, args, **on)) == hex(found)
