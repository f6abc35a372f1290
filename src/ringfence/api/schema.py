"""JSON schemas of the nouns, made from the classes that read and write them."""

from __future__ import annotations

import enum
import re
from typing import Any

from ..model import capabilities as _capabilities
from ..model import client_session as _client_session
from ..model import limits as _limits
from ..model import mount as _mount
from ..model import netlimits as _netlimits
from ..model import network as _network
from ..model import rules as _rules
from ..model import spec as _spec
from ..model.create import OWN, CreateRequest
from ..model.event import EVENTS
from ..model.exec import ExecRequest
from ..model.exec_start import OWN as START_OWN
from ..model.exec_start import StartRequest
from ..model.files import KINDS
from ..model.noun import Noun
from ..model.words import StrEnum
from .nouns import MARK

Schema = dict[str, Any]

_READ_LATER = (_netlimits, _rules)  # nobody imports them before they are needed

_STRING: Schema = {"type": "string"}
_BY_KIND: dict[str, Schema] = {
    "str": _STRING,
    "bool": {"type": "boolean"},
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bytes": _STRING,
    "Mapping[str, Any]": {"type": "object"},
    "Mapping[str, str]": {"type": "object", "additionalProperties": _STRING},
    "tuple[int, int]": {
        "type": "array",
        "items": {"type": "integer"},
        "minItems": 2,
        "maxItems": 2,
    },
}
_PTY: Schema = {
    "type": "array",
    "items": {"type": "integer", "minimum": 1, "maximum": 65_535},
    "minItems": 2,
    "maxItems": 2,
}
_ID: Schema = {"type": "string", "minLength": 1, "maxLength": 63}
_SPECIAL: dict[tuple[str, str], Schema] = {
    ("SandboxSpec", "tier"): {"enum": list(_spec.TIERS)},
    ("SandboxSpec", "id"): {"anyOf": [_ID, {"type": "null"}]},
    ("Mount", "access"): {"enum": list(_mount.ACCESS)},
    ("NetworkPolicy", "mode"): {"enum": list(_network.MODES)},
    ("SessionTimeouts", "on_idle"): {"enum": list(_client_session.ON_IDLE)},
    ("FileInfo", "kind"): {"enum": list(KINDS)},
    ("Event", "kind"): {"enum": list(EVENTS)},
    ("SandboxSpec", "allow_degraded"): {
        "type": "array",
        "items": {"enum": ["*", *sorted(_capabilities.MAY_BE_WEAKER)]},
    },
    ("ExecRequest", "argv"): {"type": "array", "items": _STRING, "minItems": 1},
    ("ExecRequest", "pty"): {"anyOf": [_PTY, {"type": "null"}]},
    ("ExecutionRequest", "command"): {"type": "string", "pattern": "\\S"},
    ("Mount", "target"): {"type": "string", "pattern": "^/"},
    ("PoolConfig", "profiles"): {"type": "object", "additionalProperties": {MARK: "SandboxSpec"}},
}
_NETWORK_BOUNDS: dict[str, tuple[float, float]] = {
    "connections": (1, 65_536),
    "header_bytes": (256, 2**20),
    "bytes_per_s": (1, 2**50),
    **dict.fromkeys(("connections_per_s", "header_s", "connect_s", "idle_s"), (0.001, 86_400)),
}
_NOT_WRITTEN = {
    ("SandboxSpec", "secrets"),
    # Paths of the host are for admins.
    ("ResolvedMount", "host_path"),
    ("ExecutionConfig", "allowed_paths"),
    ("ExecutionConfig", "denied_paths"),
}
_TIME: Schema = {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "null"}]}
_COUNT: Schema = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
_BESIDE: dict[str, dict[str, Schema]] = {
    "ExecutionResult": {"start_time": _TIME, "end_time": _TIME, "duration": _COUNT},
    "ExecutionUsage": {"memory_peak_bytes": _COUNT},
}
"""What is written beside the fields, in the spelling of other services."""
_PLAIN: dict[str, dict[str, Schema]] = {"ExecutionResult": {"error": _STRING}}
"""What a field may be instead, with `plain`."""
_SOMETIMES_ABSENT = (
    "Limits",
    "ManagerStats",
    "NetworkPolicy",
    "NetworkRule",
    "Credential",
    "NetworkLimits",
)
_HIDDEN = {("CreateRequest", "spec"), ("CreateRequest", "given")}


def schema_of(noun: type[Noun], *, written: bool) -> Schema:
    """The schema of a noun as it is read, or as it is written."""
    if noun is CreateRequest:
        return _of_create(written)
    if noun is StartRequest:
        return _of_start()
    name, fields = noun.__name__, noun.__dataclass_fields__
    properties = {
        key: _of_field(name, key, str(field.type))
        for key, field in fields.items()
        if (name, key) not in _HIDDEN
    }
    for key in [key for key, field in fields.items() if "bytes" in str(field.type)]:
        properties[f"{key}_base64"] = {**_STRING, "description": "where text loses bytes"}
    if written:
        properties |= _BESIDE.get(name, {})
    for key in _PLAIN.get(name, {}) if written else ():
        properties[key] = {"anyOf": [properties[key], _PLAIN[name][key]]}
    if name == "ExecutionRequest":  # null is "not set" in each
        for key in ("args", "env", "tier"):
            properties[key] = {"anyOf": [properties[key], {"type": "null"}]}
    required = [key for key, field in fields.items() if _is_required(field)]
    if name == "NetworkPolicy":
        required = ["mode"]
    if written and name not in _SOMETIMES_ABSENT:
        required = [key for key in fields if (name, key) not in _NOT_WRITTEN]
    form: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    if required:
        form["required"] = required
    if text := (noun.__doc__ or "").strip():
        form["description"] = re.sub(r"\s*\n\s*", " ", text.split("\n\n")[0])
    return form


def _of_create(written: bool) -> Schema:
    """Flat: the fields of the spec, and its own."""
    spec = schema_of(_spec.SandboxSpec, written=False)
    own = CreateRequest.__dataclass_fields__
    more = {key: _of_field("CreateRequest", key, str(own[key].type)) for key in OWN}
    more["idle_timeout_s"] = {"type": ["number", "null"]}
    del written
    description = "A sandbox, and how to come by it."
    return {**spec, "properties": {**spec["properties"], **more}, "description": description}


def _of_start() -> Schema:
    """Flat, too: the fields of the command, what is short for some of them, and its own."""
    command = schema_of(ExecRequest, written=False)
    own = StartRequest.__dataclass_fields__
    more = {key: _of_field("StartRequest", key, str(own[key].type)) for key in START_OWN}
    size: Schema = {"type": "integer", "minimum": 1, "maximum": 65_535}
    short: Schema = {
        "script": {**_STRING, "description": "for a POSIX shell, instead of argv"},
        "tty": {"type": "boolean", "description": "short for pty"},
        "rows": size,
        "cols": size,
    }
    del command["required"]
    return {
        **command,
        "properties": {**command["properties"], **short, **more},
        "oneOf": [{"required": ["argv"]}, {"required": ["script"]}],
        "description": "A command, and whether to wait for it.",
    }


def _is_required(field: Any) -> bool:
    from dataclasses import MISSING

    return field.default is MISSING and field.default_factory is MISSING


def _of_field(noun: str, key: str, kind: str) -> Schema:
    if (noun, key) in _SPECIAL:
        return _SPECIAL[noun, key]
    plain = kind.removesuffix(" | None")
    form = _of_kind(plain)
    bounds = _bounds(noun, key)
    if bounds:
        form = {**form, "minimum": bounds[0], "maximum": bounds[1]}
    return form if plain == kind else {"anyOf": [form, {"type": "null"}]}


def _of_kind(kind: str) -> Schema:
    if kind in _BY_KIND:
        return _BY_KIND[kind]
    if many := re.fullmatch(r"tuple\[(.+), \.\.\.\]", kind):
        return {"type": "array", "items": _of_kind(many[1])}
    found = _named(kind)
    if issubclass(found, Noun):
        return {MARK: kind}
    return {"type": "string", "enum": [str(each) for each in found]}


def _bounds(noun: str, key: str) -> tuple[float, float] | None:
    if noun == "Limits":
        return _limits.bounds(key)
    return _NETWORK_BOUNDS.get(key) if noun == "NetworkLimits" else None


def _named(name: str) -> type[Any]:
    """The noun or the set of words of that name, among those that routes have imported."""
    waiting: list[type[Any]] = [Noun, StrEnum, enum.StrEnum]
    while waiting:
        cls = waiting.pop()
        if cls.__name__ == name:
            return cls
        waiting.extend(cls.__subclasses__())
    raise TypeError(f"no schema for {name!r}")


def with_nouns(document: Schema) -> Schema:
    """The OpenAPI document with every mark replaced by a reference, and the schemas behind them."""
    wanted: set[tuple[str, bool]] = set()
    document = _refer(document, wanted, written=False)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    done: set[tuple[str, bool]] = set()
    while more := sorted(wanted - done):
        for name, written in more:
            done.add((name, written))
            form = schema_of(_named(name), written=written)
            schemas[_called(name, written)] = _refer(form, wanted, written=written)
    return document


def _called(name: str, written: bool) -> str:
    """Of those that are both read and written, the two forms differ."""
    return f"{name}Written" if written else name


def _refer(value: Any, wanted: set[tuple[str, bool]], *, written: bool) -> Any:
    if isinstance(value, list):
        return [_refer(each, wanted, written=written) for each in value]
    if not isinstance(value, dict):
        return value
    if MARK in value:
        written = value.get("x-mode", "serialization" if written else "") == "serialization"
        wanted.add((value[MARK], written))
        return {"$ref": f"#/components/schemas/{_called(value[MARK], written)}"}
    return {key: _refer(each, wanted, written=written) for key, each in value.items()}
