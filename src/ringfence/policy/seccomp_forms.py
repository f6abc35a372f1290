"""System-call policies in the shapes of others: OCI's, and the same keys as Go spells them. Pure."""

from __future__ import annotations

import errno

from ..errors import InvalidRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container
    from typing import Any

_ACTIONS = {
    "allow": "allow",
    "log": "log",
    "trap": "trap",
    "errno": "errno",
    "deny": "errno",
    "kill": "kill",
    "kill_thread": "kill",  # a thread that is killed alone leaves a program in no state of its own
    "kill_process": "kill",
}
_OF_A_POLICY = ("defaultaction", "defaulterrnoret", "architectures", "syscalls")
_OF_A_RULE = ("names", "name", "action", "errnoret", "args", "comment")
_OF_AN_ARGUMENT = ("index", "value", "valuetwo", "op")
_NEVER = "Ringfence reads the shape of OCI's runtime specification, without conditions of Docker's"


def own_form(data: Any, known: Container[str]) -> Any:
    """A policy of one of those shapes as `SeccompPolicy.from_json` reads it; any other as it is.

    Names that no architecture here knows are left out of rules that allow: lists that are made for all
    architectures have many. In a rule that denies they are refused.

    Args:
        known: The system calls that there are.

    Raises:
        InvalidRequest: `field` names what cannot be read.
    """
    if not hasattr(data, "keys") or "defaultaction" not in {str(key).lower() for key in data}:
        return data
    given = _lower(data, "", _OF_A_POLICY)
    rules = given.get("syscalls") or []
    if not isinstance(rules, list):
        raise InvalidRequest("must be a list", field="syscalls")
    default = _action(given["defaultaction"], given.get("defaulterrnoret"), "defaultAction")
    made = [_rule(rule, f"syscalls[{i}]", known) for i, rule in enumerate(rules)]
    return {"default_action": default, "rules": [rule for rule in made if rule["names"]]}


def _lower(data: Any, field: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """The object with its keys in lower case, as Go reads them; others are refused by name."""
    if not hasattr(data, "keys"):
        raise InvalidRequest(f"must be an object, not {type(data).__name__}", field=field)
    found = {str(key).lower(): value for key, value in data.items() if value is not None}
    for key in data:
        if str(key).lower() not in keys and data[key] not in (None, [], {}, ""):
            at = f"{field}.{key}".strip(".")
            raise InvalidRequest("unknown key of a system-call policy", field=at, hint=_NEVER)
    return found


def _action(value: object, number: object, field: str) -> str:
    name = str(value).upper().removeprefix("SCMP_ACT_").lower()
    if name not in _ACTIONS:
        hint = f"one of {', '.join(f'SCMP_ACT_{each.upper()}' for each in _ACTIONS)}"
        raise InvalidRequest(f"no action {value!r}", field=field, hint=hint)
    if _ACTIONS[name] == "errno" and number is not None:
        if type(number) is not int or (number and number not in errno.errorcode):
            raise InvalidRequest(f"no error number {number!r}", field=field)
        return errno.errorcode[number] if number else "pretend"
    return _ACTIONS[name]


def _rule(data: object, field: str, known: Container[str]) -> dict[str, Any]:
    given = _lower(data, field, _OF_A_RULE)
    names = given.get("names", [given["name"]] if "name" in given else None)
    if not isinstance(names, list) or not names:
        raise InvalidRequest("must be a list of system calls", field=f"{field}.names")
    action = _action(given.get("action"), given.get("errnoret"), f"{field}.action")
    if action in ("allow", "log"):
        names = [name for name in names if name in known]
    args = given.get("args") or []
    if not isinstance(args, list):
        raise InvalidRequest("must be a list", field=f"{field}.args")
    conditions = [_condition(each, f"{field}.args[{i}]") for i, each in enumerate(args)]
    return {"names": names, "action": action, "args": conditions}


def _condition(data: object, field: str) -> dict[str, Any]:
    given = _lower(data, field, _OF_AN_ARGUMENT)
    op = str(given.get("op", "")).upper()
    form: dict[str, Any] = {"arg": given.get("index", 0), "bits": 64}
    if op == "SCMP_CMP_MASKED_EQ":
        return {**form, "mask": given.get("value", 0), "in": [given.get("valuetwo", 0)]}
    keys = {"SCMP_CMP_EQ": "in", "SCMP_CMP_NE": "not_in"}
    if op not in keys:
        hint = "one of SCMP_CMP_EQ, SCMP_CMP_NE, SCMP_CMP_MASKED_EQ"
        raise InvalidRequest(f"no comparison {given.get('op')!r}", field=f"{field}.op", hint=hint)
    return {**form, keys[op]: [given.get("value", 0)]}
