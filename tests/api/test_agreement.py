"""The document allows of a body what its reader takes, value by value.

Fuzzing finds by chance, and once in some runs, what these find at once.
"""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest

from ringfence.errors import RingfenceError
from ringfence.model.base.model import Model
from tests.api.fuzz_rules import cannot_be_said
from tests.api.test_openapi import DOCUMENT, models_read

pytestmark = pytest.mark.anyone

_SCALARS: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    1.0,
    -1,
    0.5,
    -0.5,
    2**70,
    "",
    " ",
    "a",
    "A",
    "a b",
    "é",
]
_SCALARS += ["/", "//", "/a", "a/b", "0", "-1", "1.0", "x" * 300, "terminate", "ro", "../x", "a\nb"]
_VALUES: list[Any] = [
    *_SCALARS,
    [],
    {},
    *([each] for each in _SCALARS),
    *({"a": each} for each in _SCALARS),
    *({each: "a"} for each in _SCALARS if isinstance(each, str)),
    *([["a"]], [{}], {"a": {}}, {"a": ["a"]}, ["a", "a"], [1, 2], [1, 2, 3]),
]
_REQUIRED: dict[str, dict[str, Any]] = {
    "AttachRequest": {"sandbox_id": "a", "client_id": "c"},
    "ExecRequest": {"argv": ["x"]},
    "ExecutionRequest": {"command": "x"},
    "Mount": {"target": "/a"},
    "NetworkPolicy": {"mode": "limited"},
    "NetworkRule": {"host": "a.org"},
    "StartRequest": {"argv": ["x"]},
    "TemplateRequest": {"name": "x"},
}
_PLACES = {"TemplateStep": "steps[0]."}
"""Where in a request a model is; the others are bodies."""


_MODELS = {model.__name__: (model, form) for model, form in models_read()}


@pytest.mark.parametrize(("model", "form"), _MODELS.values(), ids=[*_MODELS])
def test_a_body_is_read_as_it_is_described(model: type[Model], form: dict[str, Any]) -> None:
    one = {**form, "required": [], "components": DOCUMENT["components"]}
    one.pop("oneOf", None)
    described = jsonschema_rs.validator_for(one)
    apart = []
    for key in form["properties"]:
        for value in _VALUES:
            is_allowed, error = described.is_valid({key: value}), _refusal(model, key, value)
            is_other = error is not None and "missing" in error.message and error.field != key
            has_rule = error is not None and is_allowed and _has_a_rule(model, error)
            if is_allowed != (error is None) and not (is_other or has_rule):
                apart.append((key, value, str(error)))
    assert [] == apart


def _refusal(model: type[Model], key: str, value: Any) -> RingfenceError | None:
    body = {**_REQUIRED.get(model.__name__, {}), key: value}
    if key == "script":
        del body["argv"]
    try:
        model.from_json(body)
    except RingfenceError as exc:
        return exc
    return None


def _has_a_rule(model: type[Model], error: RingfenceError) -> bool:
    field = _PLACES.get(model.__name__, "") + error.field
    return cannot_be_said({"code": error.code, "field": field, "detail": error.message})
