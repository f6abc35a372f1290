"""The seccomp policy: what it says, as data, and how it becomes a BPF program.

A policy is a list of rules; the first that matches a system call decides. The default one is
`seccomp_policy.json` beside this file; `SeccompPolicy.from_json` reads a user's own. The guards of
the default policy come first in every policy: they keep Ringfence's own promises.

`python -m ringfence.policy.seccomp --write` compiles the programs that `filters.py` loads.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, fields, replace

from ..errors import InvalidRequest, Unsupported
from . import bpf, filters, syscalls_aarch64, syscalls_x86_64
from .seccomp_forms import own_form

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

# include/uapi/linux/seccomp.h
SECCOMP_RET_KILL_PROCESS = 0x80000000
SECCOMP_RET_TRAP = 0x00030000
SECCOMP_RET_ERRNO = 0x00050000
SECCOMP_RET_LOG = 0x7FFC0000
SECCOMP_RET_ALLOW = 0x7FFF0000
_NOTIFICATIONS = 0xC0502100, 0xC0182101, 0x40082102  # SECCOMP_IOCTL_NOTIF_RECV, SEND, ID_VALID
_ADD_DESCRIPTOR = 0x40182103  # SECCOMP_IOCTL_NOTIF_ADDFD: sockets that an agent makes
X32_SYSCALL_BIT = 0x40000000  # arch/x86/include/uapi/asm/unistd.h

ACTIONS = {
    "allow": SECCOMP_RET_ALLOW,
    "log": SECCOMP_RET_LOG,
    "trap": SECCOMP_RET_TRAP,
    "kill": SECCOMP_RET_KILL_PROCESS,
    "errno": SECCOMP_RET_ERRNO | errno.EPERM,
    "pretend": SECCOMP_RET_ERRNO | 0,  # nothing is done, and the caller is told that it was
    **{name: SECCOMP_RET_ERRNO | number for number, name in errno.errorcode.items()},
}
DEFAULT = "os_hardened"  # what a policy can extend
_MOST_RULES = 1000
_POLICY_FILE = os.path.join(os.path.dirname(__file__), "seccomp_policy.json")
_EGRESS_FILE = os.path.join(os.path.dirname(__file__), "egress_policy.json")
_VIEW_FILE = os.path.join(os.path.dirname(__file__), "view_policy.json")


@dataclass(frozen=True)
class Machine:
    """A processor architecture as the kernel names it, and its system-call numbers."""

    audit_arch: int  # AUDIT_ARCH_*, include/uapi/linux/audit.h
    numbers: Mapping[str, int]
    has_x32: bool = False


MACHINES = {
    "x86_64": Machine(0xC000003E, syscalls_x86_64.NUMBERS, has_x32=True),
    "aarch64": Machine(0xC00000B7, syscalls_aarch64.NUMBERS),
}
KNOWN_NAMES = frozenset(name for machine in MACHINES.values() for name in machine.numbers)


@dataclass(frozen=True)
class FilterOptions:
    """Options of the policy for one sandbox; see `filters.load_filter`."""

    debug: bool = False
    aio: bool = False
    allow_af_unix: bool = False
    by_init: bool = False
    strict: bool = False
    tag_key: int | None = None

    def is_on(self, name: str) -> bool:
        return bool(getattr(self, name))


SWITCHES = tuple(field.name for field in fields(FilterOptions) if field.name != "tag_key")


@dataclass(frozen=True)
class Condition:
    """A test of one argument: whether (argument & mask) is one of `values`, or is none of them."""

    arg: int
    bits: int  # 32 for C's int: the kernel ignores the upper half, and so must we; 64 for pointers
    mask: int
    values: tuple[int, ...]
    negated: bool = False

    @classmethod
    def from_json(cls, data: object, field: str) -> Condition:
        given = _object(data, field, {"arg", "bits", "mask", "in", "not_in"}, {"arg", "bits"})
        arg = _integer(given["arg"], f"{field}.arg", 5)
        bits = given["bits"]
        if type(bits) is not int or bits not in (32, 64):
            raise InvalidRequest(
                "must be 32 or 64",
                field=f"{field}.bits",
                hint="32 for a C int, of which the kernel ignores the upper half; 64 for a pointer",
            )
        largest = (1 << bits) - 1
        mask = _integer(given.get("mask", largest), f"{field}.mask", largest)
        if ("in" in given) == ("not_in" in given):
            raise InvalidRequest("needs either `in` or `not_in`", field=field)
        key = "in" if "in" in given else "not_in"
        values = tuple(
            _integer(value, f"{field}.{key}[{i}]", largest)
            for i, value in enumerate(_list(given[key], f"{field}.{key}"))
        )
        for i, value in enumerate(values):
            if value & ~mask:
                raise InvalidRequest(
                    f"{value:#x} has bits outside the mask {mask:#x}", field=f"{field}.{key}[{i}]"
                )
        return cls(arg, bits, mask, values, negated=key == "not_in")

    def to_json(self) -> dict[str, Any]:
        key = "not_in" if self.negated else "in"
        return {
            "arg": self.arg,
            "bits": self.bits,
            "mask": self.mask,
            key: list(self.values),
        }


@dataclass(frozen=True)
class Rule:
    """Action for some system calls when every condition holds."""

    names: tuple[str, ...]
    action: str
    args: tuple[Condition, ...] = ()
    needs: str = ""  # the option with which the rule counts; "" for always
    unless: str = ""  # the option with which it does not
    about: str = ""

    @classmethod
    def from_json(cls, data: object, field: str) -> Rule:
        known = {"names", "action", "args", "if", "unless", "about"}
        given = _object(data, field, known, {"names", "action"})
        names = _list(given["names"], f"{field}.names")
        for i, name in enumerate(names):
            if not isinstance(name, str) or name not in KNOWN_NAMES:
                raise InvalidRequest(f"no system call {name!r}", field=f"{field}.names[{i}]")
        args = _list(given.get("args", []), f"{field}.args", empty=True)
        return cls(
            tuple(names),
            _action(given["action"], f"{field}.action"),
            tuple(Condition.from_json(item, f"{field}.args[{i}]") for i, item in enumerate(args)),
            _switch(given, "if", field),
            _switch(given, "unless", field),
            _text(given.get("about", ""), f"{field}.about"),
        )

    def to_json(self) -> dict[str, Any]:
        optional: dict[str, Any] = {
            "args": [condition.to_json() for condition in self.args],
            "if": self.needs,
            "unless": self.unless,
            "about": self.about,
        }
        present = {key: value for key, value in optional.items() if value}
        return {"names": list(self.names), "action": self.action, **present}

    def counts(self, options: FilterOptions) -> bool:
        """Return whether the rule is part of the policy with `options`."""
        if self.unless and options.is_on(self.unless):
            return False
        return not self.needs or options.is_on(self.needs)


@dataclass(frozen=True)
class SeccompPolicy:
    """Rules, and what happens where none matches."""

    default_action: str  # for a system call that the tables know
    unknown_action: str  # for any other number
    guards: tuple[Rule, ...]
    rules: tuple[Rule, ...]

    @classmethod
    def default(cls) -> SeccompPolicy:
        import json

        with open(_POLICY_FILE, encoding="utf-8") as file:
            data = json.load(file)
        return cls(
            _action(data["default_action"], "default_action"),
            _action(data["unknown_action"], "unknown_action"),
            _rules(data["guards"], "guards"),
            _rules(data["rules"], "rules"),
        )

    @classmethod
    def of_egress(cls) -> SeccompPolicy:
        """Load the policy that the egress process applies to itself."""
        return cls._of_file(_EGRESS_FILE)

    @classmethod
    def of_view(cls) -> SeccompPolicy:
        """Load the policy of the process that serves host files to guests."""
        # The policy is an allow list. The guards refuse openat2(2), which the process needs to find
        # files.
        return replace(cls._of_file(_VIEW_FILE), guards=())

    @classmethod
    def _of_file(cls, path: str) -> SeccompPolicy:
        import json

        with open(path, encoding="utf-8") as file:
            return cls.from_json(json.load(file))

    @classmethod
    def from_json(cls, data: object) -> SeccompPolicy:
        """A user's own policy: a default action, and rules of names and an action.

        An action is "allow", "log", "trap", "kill", "errno" (EPERM), "pretend" or the name of an errno.
        `"extends": "os_hardened"` puts the rules before those of the default policy. The guards
        of the default policy hold in any case. OCI's shape is read too: see `seccomp_forms`.

        Raises:
            InvalidRequest: `field` names the part that is wrong.
        """
        data = own_form(data, KNOWN_NAMES)
        keys = {"about", "extends", "default_action", "unknown_action", "rules"}
        given = _object(data, "", keys, {"rules"})
        base = cls.default()
        rules = _rules(given["rules"], "rules")
        if "extends" in given:
            if given["extends"] != DEFAULT:
                raise InvalidRequest(f"must be {DEFAULT!r}", field="extends")
            rules += base.rules
        _text(given.get("about", ""), "about")
        default = _action(given.get("default_action", base.default_action), "default_action")
        unknown = _action(given.get("unknown_action", base.unknown_action), "unknown_action")
        return cls(default, unknown, base.guards, rules)

    def to_json(self) -> dict[str, Any]:
        """The form `from_json` reads; the guards are not part of it."""
        return {
            "default_action": self.default_action,
            "unknown_action": self.unknown_action,
            "rules": [rule.to_json() for rule in self.rules],
        }


def compile_filter(
    options: FilterOptions | None = None,
    *,
    policy: SeccompPolicy | None = None,
    machine: str | None = None,
) -> bytes:
    """The program, packed `struct sock_filter`, that enforces `policy`.

    Raises:
        Unsupported: There is no table of system calls for this machine.
        InvalidRequest: The policy needs more instructions than the kernel accepts.
    """
    machine = machine or os.uname().machine
    if machine not in MACHINES:
        raise Unsupported(
            f"no system-call filter for {machine}",
            backend="native",
            operation="seccomp",
            hint=f"there is one for {' and '.join(MACHINES)}",
        )
    root = _root(options or FilterOptions(), policy or SeccompPolicy.default(), MACHINES[machine])
    try:
        return bpf.assemble(root)
    except ValueError as exc:
        raise InvalidRequest(str(exc), field="rules", hint="use fewer conditions") from exc


def _root(options: FilterOptions, policy: SeccompPolicy, machine: Machine) -> bpf.Node:
    graph = bpf.Graph()
    kill = graph.give(SECCOMP_RET_KILL_PROCESS)
    unknown = graph.give(ACTIONS[policy.unknown_action])
    verdicts = _verdicts(graph, options, policy)
    default = graph.give(ACTIONS[policy.default_action])
    starts: dict[int, bpf.Node] = {0: unknown}
    for name, number in sorted(machine.numbers.items(), key=lambda item: item[1]):
        starts[number] = verdicts.get(name, default)
        starts[number + 1] = unknown
    if machine.has_x32:
        starts |= {X32_SYSCALL_BIT: kill, 0x80000000: unknown, 0xC0000000: kill}
        # A tracer that cancels a system call makes its number -1: not a call of x32.
        starts[bpf.WORD] = unknown
    by_number = graph.ranges(bpf.NUMBER, sorted(starts.items()))
    return graph.test(bpf.ARCH, bpf.WORD, bpf.JUMP_EQ, machine.audit_arch, by_number, kill)


def _verdicts(
    graph: bpf.Graph, options: FilterOptions, policy: SeccompPolicy
) -> dict[str, bpf.Node]:
    """The node that judges each system call that a rule names."""
    verdicts: dict[str, bpf.Node] = {}
    default = graph.give(ACTIONS[policy.default_action])
    rules = [*_tag_rules(options), *policy.guards, *policy.rules]
    for rule in reversed(rules):
        if not rule.counts(options):
            continue
        action = graph.give(ACTIONS[rule.action])
        for name in rule.names:
            otherwise = verdicts.get(name, default)
            verdicts[name] = _all_of(graph, rule.args, action, otherwise)
    return verdicts


def _tag_rules(options: FilterOptions) -> list[Rule]:
    """Let PID 1, who knows the key, set the tag; the kernel ignores the halves the key is in.

    And let it answer for netlink sockets: nobody else has a descriptor that knows these requests.
    """
    if options.tag_key is None:
        return []
    high, low = divmod(filters.checked_key(options.tag_key), 1 << 32)
    everything = (1 << 64) - 1
    pid = Condition(0, 64, everything, (high << 32,))
    resource = Condition(1, 64, everything, (low << 32 | 15,))  # RLIMIT_RTTIME
    answer = Condition(
        1, 32, bpf.WORD, (*_NOTIFICATIONS, *([_ADD_DESCRIPTOR] if options.by_init else ()))
    )
    return [
        Rule(("prlimit64",), "allow", (pid, resource)),
        Rule(("ioctl",), "allow", (answer,)),
    ]


def _all_of(
    graph: bpf.Graph, conditions: Sequence[Condition], yes: bpf.Node, no: bpf.Node
) -> bpf.Node:
    for condition in reversed(conditions):
        yes = _either(graph, condition, yes, no)
    return yes


def _either(graph: bpf.Graph, condition: Condition, yes: bpf.Node, no: bpf.Node) -> bpf.Node:
    if condition.negated:
        yes, no = no, yes
    low_field = bpf.argument(condition.arg)
    low_mask, high_mask = condition.mask & bpf.WORD, condition.mask >> 32
    by_high: dict[int, set[int]] = {}
    for value in condition.values:
        if value & ~condition.mask == 0:
            by_high.setdefault(value >> 32, set()).add(value & bpf.WORD)
    points = {
        high: graph.member(low_field, low_mask, lows, yes, no) for high, lows in by_high.items()
    }
    if not high_mask:
        return points.get(0, no)
    high_field = bpf.argument(condition.arg, high=True)
    return graph.switch(high_field, points, no, mask=high_mask)


# -- reading a policy -------------------------------------------------------------------------


def _object(data: object, field: str, known: set[str], needed: set[str]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise InvalidRequest(f"must be an object, not {type(data).__name__}", field=field)
    prefix = f"{field}." if field else ""
    for key in data:
        if key not in known:
            hint = f"known: {', '.join(sorted(known))}"
            raise InvalidRequest("unknown key", field=f"{prefix}{key}", hint=hint)
    for key in sorted(needed - data.keys()):
        raise InvalidRequest("is missing", field=f"{prefix}{key}")
    return data


def _list(data: object, field: str, *, empty: bool = False) -> list[Any]:
    if not isinstance(data, list) or len(data) > _MOST_RULES or not (data or empty):
        raise InvalidRequest(f"must be a list of 1 to {_MOST_RULES} items", field=field)
    return data


def _integer(data: object, field: str, largest: int) -> int:
    """A number from 0 to `largest`, or one in a string ("0x5401", "0o6000")."""
    try:
        number = int(data, 0) if isinstance(data, str) else data
    except ValueError:
        number = None
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= largest:
        raise InvalidRequest(f"must be a number from 0 to {largest:#x}", field=field)
    return number


def _text(data: object, field: str) -> str:
    if not isinstance(data, str):
        raise InvalidRequest(f"must be text, not {type(data).__name__}", field=field)
    return data


def _action(data: object, field: str) -> str:
    if not isinstance(data, str) or data not in ACTIONS:
        hint = "allow, log, trap, kill, errno, or an errno such as EPERM or ENOSYS"
        raise InvalidRequest(f"no action {data!r}", field=field, hint=hint)
    return data


def _switch(given: Mapping[str, Any], key: str, field: str) -> str:
    name = given.get(key, "")
    if name != "" and name not in SWITCHES:
        hint = f"known: {', '.join(SWITCHES)}"
        raise InvalidRequest(f"no option {name!r}", field=f"{field}.{key}", hint=hint)
    return str(name)


def _rules(data: object, field: str) -> tuple[Rule, ...]:
    items = _list(data, field, empty=True)
    return tuple(Rule.from_json(item, f"{field}[{i}]") for i, item in enumerate(items))


# -- compiling ahead of time ------------------------------------------------------------------


def shipped_programs() -> dict[str, bytes]:
    policy, egress = SeccompPolicy.default(), SeccompPolicy.of_egress()
    of_view = SeccompPolicy.of_view()
    with_unix = FilterOptions(allow_af_unix=True)
    programs = {
        filters.egress_file_name(machine): compile_filter(with_unix, policy=egress, machine=machine)
        for machine in filters.MACHINES
    } | {
        filters.view_file_name(machine): compile_filter(policy=of_view, machine=machine)
        for machine in filters.MACHINES
    }
    return programs | {
        filters.file_name(machine, on): compile_filter(
            FilterOptions(**dict.fromkeys(on, True), tag_key=filters.PLACEHOLDER_KEY),
            policy=policy,
            machine=machine,
        )
        for machine in filters.MACHINES
        for on in filters.SHIPPED
    }


def main(arguments: Sequence[str]) -> int:
    """Compare or, with --write, write the compiled programs; 1 when they are not up to date."""
    directory = os.path.join(os.path.dirname(__file__), "compiled")
    stale = 0
    for name, program in shipped_programs().items():
        path = os.path.join(directory, name)
        if "--write" in arguments:
            with open(path, "wb") as file:
                file.write(program)
        with open(path, "rb") as file:
            same = file.read() == program
        stale += not same
        print(f"{len(program) // 8:5} instructions  {name}{'' if same else '  OUT OF DATE'}")  # noqa: T201
    return int(stale > 0)


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
