"""Validation errors of parameters and small bodies, in our wording rather than the framework's."""

from __future__ import annotations

import re

from ..contexts.context import LANGUAGE, LANGUAGE_WORDS
from ..errors import BadJson, InvalidRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from ..errors import RingfenceError

_WHOLE, _NUMBER = "must be a whole number", "must be a number"
_FLAG, _TEXT, _OBJECT = "must be true or false", "must be a string", "must be a JSON object"
_KINDS = {
    "int_parsing": _WHOLE,
    "int_type": _WHOLE,
    "int_from_float": _WHOLE,
    "int_parsing_size": _WHOLE,
    "float_parsing": _NUMBER,
    "float_type": _NUMBER,
    "finite_number": _NUMBER,
    "bool_parsing": _FLAG,
    "bool_type": _FLAG,
    "greater_than_equal": "must be at least {ge:.12g}",
    "greater_than": "must be more than {gt:.12g}",
    "less_than_equal": "must be at most {le:.12g}",
    "less_than": "must be less than {lt:.12g}",
}
"""By pydantic's name of what is wrong: what it should be, to which is added what it was."""

_OTHERS = {
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
    "too_long": "must have at most {max_length} items",
    "string_type": _TEXT,
    "list_type": "must be a list",
    "dict_type": _OBJECT,
    "model_type": _OBJECT,
    "model_attributes_type": _OBJECT,
    "extra_forbidden": "no such field",
}
"""The same, where what it was is too long to say, or says nothing."""

_PATTERNS = {
    r"^([0-9]{1,18}(\.[0-9]{1,18})?)?$": "must be a number, or two and a dot",
    r"^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)?$": "is not the next_cursor of a page",
    r"^[^\x00-\x1f\x7f-\xa0]*$": "must be printable characters",
    r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$": "is not an id: use up to 63 of a-z, 0-9 and inner dashes",
    "^[^=]+=": "is not KEY=VALUE",
    "^[A-Za-z0-9_=-]*$": "is not the next_cursor of a page",
    f"^({LANGUAGE.pattern})$": f"must be {LANGUAGE_WORDS}",
    r"^0?[0-7]{3}$": "must be three octal digits, such as 644",
}
_WORDS = re.compile(r"\^\(([a-z_|]+)\)\$")
_LONGEST = 80  # of what is repeated to whoever sent it


def error_of(errors: Sequence[Any]) -> RingfenceError:
    first: Mapping[str, Any] = errors[0] if errors else {}
    kind, context = first.get("type", ""), first.get("ctx") or {}
    if kind == "json_invalid":
        return BadJson(f"not JSON: {context.get('error', '')}")
    place, *way = first.get("loc") or ("",)
    hint = ""
    if kind == "missing":
        hint = "add it to the query string" if place == "query" else f"add it to the {place}"
    said = _said(kind, context, first)
    return InvalidRequest(said, field=_field(way), hint=hint)


def _said(kind: str, context: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    if kind in _KINDS:
        given = first.get("input")
        # A number that came as text is shown as one.
        shown = _cut(given) if isinstance(given, str) and "{" in _KINDS[kind] else _shown(given)
        return f"{_KINDS[kind].format(**context)}, not {shown}"
    if kind in _OTHERS:
        return _OTHERS[kind].format(**context)
    if kind == "missing":
        return "is missing"
    if kind == "string_pattern_mismatch":
        return _not_like(str(context.get("pattern", "")), first.get("input"))
    return str(first.get("msg", "is malformed"))  # those that are ours already


def _not_like(pattern: str, given: object) -> str:
    if found := _WORDS.fullmatch(pattern):
        *most, last = found[1].split("|")
        return f"must be {', '.join(most)} or {last}, not {_shown(given)}"
    said = _PATTERNS.get(pattern, "is malformed")
    return f"{_shown(given)} {said}" if said.startswith("is ") else f"{said}, not {_shown(given)}"


def _shown(given: object) -> str:
    return _cut(repr(given))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _field(way: Sequence[object]) -> str:
    """`state[0]`, as the model says it."""
    parts = [f"[{each}]" if isinstance(each, int) else f".{each}" for each in way]
    return "".join(parts).removeprefix(".")
