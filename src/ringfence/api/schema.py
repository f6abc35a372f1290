"""JSON schemas of the models, made from the classes that read and write them."""

from __future__ import annotations

import enum
import re
from typing import Any

from ..model import capabilities as _capabilities
from ..model import client_session as _client_session
from ..model import limits as _limits
from ..model import mount as _mount
from ..model import spec as _spec
from ..model import template as _template
from ..model.base import checks as _checks
from ..model.base.model import Model
from ..model.base.words import StrEnum
from ..model.create import OWN, CreateRequest
from ..model.event import EVENTS
from ..model.execs.exec import ExecRequest
from ..model.execs.exec_start import OWN as START_OWN
from ..model.execs.exec_start import StartRequest
from ..model.files import KINDS
from ..model.net import netlimits as _netlimits
from ..model.net import network as _network
from ..model.net import rules as _rules
from .models import MARK
from .schemas import LINE

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
    "Mapping[str, str]": {
        "type": "object",
        "propertyNames": {"minLength": 1},
        "additionalProperties": _STRING,
    },
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
_NULL: Schema = {"type": "null"}


def _like(pattern: str, most: int | None = None) -> Schema:
    return {**_STRING, "pattern": pattern} | ({} if most is None else {"maxLength": most})


def _map(keys: Schema, values: Schema = _STRING, **more: int) -> Schema:
    return {"type": "object", "propertyNames": keys, "additionalProperties": values, **more}


def _list(items: Schema, most: int = _checks.MOST_PATHS) -> Schema:
    return {"type": "array", "items": items, "maxItems": most}


def _or_null(form: Schema) -> Schema:
    return {"anyOf": [form, _NULL]}


_ID = _like(r"^\s*[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\s*$")
_NAME = _like(r"^[a-z0-9_][a-z0-9_.-]{0,62}$")
_NAME_OR_NONE = _like(r"^([a-z0-9_][a-z0-9_.-]{0,62})?$")
_LINE = _like(LINE, 255)
_LABEL = {**_LINE, "maxLength": _checks.LABELS_BYTES}
_PATH: Schema = {**_STRING, "minLength": 1, "maxLength": 4095}
_ABSOLUTE = _like("^/", 4095)
_TARGET = _like("^/+[^/]", 4095)
_BASE64 = _like("^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$")
VARIABLE = _like("^[A-Za-z_][A-Za-z0-9_]*$")
_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"  # RFC 9110, section 5.6.2
_USER: Schema = {
    "anyOf": [
        _like("^([0-9]{1,9}|[a-z_][a-z0-9_.-]{0,31})$"),
        {"type": "integer", "minimum": 0, "maximum": 2**32 - 2},
        _NULL,
    ]
}
_DEGRADED: Schema = {
    "type": "array",
    "items": {"enum": ["*", *sorted(_capabilities.MAY_BE_WEAKER)]},
}
_BY_NAME: dict[str, Schema] = {
    "env": _map(VARIABLE),
    "secrets": _map(VARIABLE),
    "labels": _map({**_LABEL, "minLength": 1}, _LABEL, maxProperties=_checks.MOST_LABELS),
    "user": _USER,
    "snapshot_id": _or_null(_ID),
    "preferred_id": _or_null(_ID),
}
_BY_NAME["required_labels"] = _BY_NAME["labels"]
"""What fields of these names are in every model that is read."""
_SPECIAL: dict[tuple[str, str], Schema] = {
    ("SandboxSpec", "tier"): {"enum": list(_spec.TIERS)},
    ("SandboxSpec", "id"): _or_null(_ID),
    ("SandboxSpec", "profile"): _NAME,
    ("SandboxSpec", "template"): _NAME,
    ("SandboxSpec", "image"): _or_null({**_STRING, "minLength": 1, "maxLength": 1000}),
    ("SandboxSpec", "workdir"): _or_null(_ABSOLUTE),
    ("SandboxSpec", "memory_dir"): _or_null(_ABSOLUTE),
    ("SandboxSpec", "mounts"): _list({MARK: "Mount"}, _spec.MOST_MOUNTS),
    ("SandboxSpec", "protect"): _or_null(_list(_PATH)),
    ("SandboxSpec", "unprotect"): _list(_PATH),
    ("SandboxSpec", "deny"): _list(_TARGET),
    ("Mount", "access"): {"enum": [*_mount.ACCESS, "ro", "rw"]},
    ("Mount", "protect"): _or_null(_list(_like("^[^/]", 4095))),
    ("NetworkPolicy", "mode"): {"enum": list(_network.MODES)},
    ("NetworkPolicy", "allowed_hosts"): _list({**_STRING, "minLength": 1}, _network.MOST_RULES),
    ("NetworkPolicy", "rules"): _list({MARK: "NetworkRule"}, _network.MOST_RULES),
    ("NetworkRule", "host"): {**_STRING, "minLength": 1},
    ("NetworkRule", "ports"): _like("^[0-9, -]*$"),
    ("NetworkRule", "action"): {"enum": list(_rules.ACTIONS)},
    ("NetworkRule", "methods"): _list(_like(f"^{_TOKEN}$"), 64),
    ("NetworkRule", "paths"): _list({**_STRING, "minLength": 1}),
    ("Credential", "secret"): VARIABLE,
    ("TemplateStep", "env"): _map(VARIABLE),
    ("Credential", "header"): _like(f"^{_TOKEN}$"),
    ("Credential", "scheme"): _like(f"^({_TOKEN})?$"),
    ("SessionTimeouts", "on_idle"): {"enum": list(_client_session.ON_IDLE)},
    ("SessionTimeouts", "on_expiry"): {"enum": list(_client_session.ON_EXPIRY)},
    ("CreateRequest", "name"): _LINE,
    ("CreateRequest", "backend"): _NAME_OR_NONE,
    ("AcquireOptions", "preferred_backend"): _NAME_OR_NONE,
    ("AcquireOptions", "key"): _LINE,
    ("AttachRequest", "sandbox_id"): _ID,
    ("AttachRequest", "client_id"): _LINE,
    ("RequiredCapabilities", "readable_paths"): _list(_ABSOLUTE),
    ("RequiredCapabilities", "writable_paths"): _list(_ABSOLUTE),
    ("FileInfo", "kind"): {"enum": list(KINDS)},
    ("Event", "kind"): {"enum": list(EVENTS)},
    ("SandboxSpec", "allow_degraded"): _DEGRADED,
    ("ExecutionConfig", "allow_degraded"): _DEGRADED,
    ("ExecRequest", "argv"): {
        "type": "array",
        "items": _STRING,
        "prefixItems": [_like("\\S")],
        "minItems": 1,
    },
    ("ExecRequest", "cwd"): _or_null(_PATH),
    ("ExecRequest", "pty"): _or_null(_PTY),
    ("ExecutionRequest", "command"): _like("\\S"),
    ("ExecutionRequest", "tier"): _or_null({"enum": ["", *_spec.TIERS]}),
    ("ExecutionRequest", "id"): _or_null({"anyOf": [_ID, {"const": ""}]}),
    ("Mount", "target"): _TARGET,
    ("TemplateRequest", "name"): _NAME,
    ("TemplateRequest", "backend"): _NAME_OR_NONE,
    ("TemplateRequest", "steps"): _list({MARK: "TemplateStep"}, _template.MOST_STEPS),
    ("TemplateStep", "run"): {"anyOf": [_STRING, {"type": "array", "items": _STRING}]},
    ("TemplateStep", "copy"): _like("^([0-9a-f]{64})?$"),
    ("TemplateStep", "mode"): _like("^[0-7]{0,4}$"),
    ("TemplateStep", "workdir"): _like("^(/.*)?$", 4095),
    ("TemplateStep", "user"): {
        "anyOf": [
            _like("^([0-9]{1,9}|[a-z_][a-z0-9_.-]{0,31})?$"),
            {"type": "integer", "minimum": 0, "maximum": 2**32 - 2},
        ]
    },
    ("PoolConfig", "profiles"): _map(_NAME, {MARK: "SandboxSpec"}),
    ("PoolConfig", "warm_profiles"): {"type": "array", "items": _NAME},
    ("ExecutionConfig", "work_dir"): _ABSOLUTE,
    ("ExecutionConfig", "allowed_paths"): {"type": "array", "items": _TARGET},
    ("ExecutionConfig", "denied_paths"): {"type": "array", "items": _TARGET},
    ("ExecutionConfig", "strong_runtime"): {
        "type": "object",
        "properties": {
            "backend": _NAME,
            "memory_mb": _like("^[1-9][0-9]{0,5}$"),
            "cpus": _like(r"^[1-9][0-9]{0,2}(\.[0-9]{1,3})?$"),
            "vm_kernel": _ABSOLUTE,
        },
        "additionalProperties": False,
    },
}
_YEAR_S, _DAY_S = 366 * 86_400, 86_400
_NUMBERS: dict[tuple[str, str], tuple[float, float]] = {
    ("SandboxSpec", "ttl_s"): (0.001, _YEAR_S),
    **{
        ("SessionTimeouts", f"{state}_s"): (0.001, 10 * _YEAR_S)
        for state in ("idle", "detach", "suspend")
    },
    ("RequiredCapabilities", "minimum_memory_bytes"): (1, 2**46),
    ("ExecRequest", "timeout_s"): (0.001, _YEAR_S),
    ("ExecRequest", "max_output_bytes"): (0, 2**40),
    ("StartRequest", "wait_s"): (0, _DAY_S),
    ("TemplateRequest", "timeout_s"): (0.001, _DAY_S),
    ("TemplateStep", "timeout_s"): (0.001, _DAY_S),
    ("PoolConfig", "min_warm"): (0, 100_000),
    ("PoolConfig", "max_warm"): (0, 100_000),
    ("PoolConfig", "warm_ttl_s"): (0.001, _YEAR_S),
    ("ExecutionConfig", "max_processes"): (1, 4_194_304),
    ("ExecutionConfig", "max_concurrent"): (1, 10_000),
    ("ExecutionConfig", "max_pending"): (0, 1_000_000),
    ("ExecutionConfig", "max_output_bytes"): (0, 2**30),
    ("ExecutionConfig", "keep_results_secs"): (0, _YEAR_S),
    **{
        ("ExecutionConfig", f"{which}_{name}"): bounds
        for which in ("default", "max")
        for name, bounds in (
            ("timeout_secs", (0.001, _YEAR_S)),
            ("memory_mb", (1, 2**26)),
            ("cpus", (0.001, 8192)),
        )
    },
}
_OR_ZERO: dict[str, tuple[float, float]] = {
    "timeout_secs": (0.001, _YEAR_S),
    "memory_mb": (1, 2**26),
    "cpus": (0.001, 8192),
}
"""Of an `ExecutionRequest`: 0 is "not set", as null is."""
_READ = (
    "SandboxSpec",
    "AcquireOptions",
    "CreateRequest",
    "ExecRequest",
    "StartRequest",
    "ExecutionRequest",
)
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
"""Fields written beside those of the class, in the spelling of other services."""
_PLAIN: dict[str, dict[str, Schema]] = {"ExecutionResult": {"error": _STRING}}
"""Alternative form of a field with `plain`."""
_SOMETIMES_ABSENT = (
    "Limits",
    "ManagerStats",
    "NetworkPolicy",
    "NetworkRule",
    "Credential",
    "NetworkLimits",
    "TemplateStep",
)
_HIDDEN = {("CreateRequest", "spec"), ("CreateRequest", "given")}


def schema_of(model: type[Model], *, written: bool) -> Schema:
    """The schema of a model as it is read, or as it is written."""
    if model is CreateRequest:
        return _of_create(written)
    if model is StartRequest:
        return _of_start()
    name, fields = model.__name__, model.__dataclass_fields__
    properties = {
        key: _of_field(name, key, str(field.type))
        for key, field in fields.items()
        if (name, key) not in _HIDDEN
    }
    for key in [key for key, field in fields.items() if "bytes" in str(field.type)]:
        form = {**_BASE64, "description": "where text loses bytes"}
        properties[f"{key}_base64"] = form if written else _or_null(form)
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
    form = {"type": "object", "properties": properties, "additionalProperties": False}
    if required:
        form["required"] = required
    if text := (model.__doc__ or "").strip():
        form["description"] = re.sub(r"\s*\n\s*", " ", text.split("\n\n")[0])
    return form


def _of_create(written: bool) -> Schema:
    """Flat: the fields of the spec, and its own."""
    spec = schema_of(_spec.SandboxSpec, written=False)
    own = CreateRequest.__dataclass_fields__
    more = {key: _of_field("CreateRequest", key, str(own[key].type)) for key in OWN}
    more["idle_timeout_s"] = _of_field("Limits", "idle_timeout_s", "float | None")
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


def _of_field(model: str, key: str, kind: str) -> Schema:
    if (model, key) in _SPECIAL:
        return _SPECIAL[model, key]
    if key in _BY_NAME and model in _READ:
        return _BY_NAME[key]
    plain = kind.removesuffix(" | None")
    form = _of_kind(plain)
    bounds = _bounds(model, key)
    if bounds:
        form = {**form, "minimum": bounds[0], "maximum": bounds[1]}
    if model == "ExecutionRequest" and key in _OR_ZERO:
        form = {"anyOf": [form, {"const": 0}]}
    return form if plain == kind else {"anyOf": [form, {"type": "null"}]}


def _of_kind(kind: str) -> Schema:
    if kind in _BY_KIND:
        return _BY_KIND[kind]
    if many := re.fullmatch(r"tuple\[(.+), \.\.\.\]", kind):
        return {"type": "array", "items": _of_kind(many[1])}
    found = _named(kind)
    if issubclass(found, Model):
        return {MARK: kind}
    return {"type": "string", "enum": [str(each) for each in found]}


def _bounds(model: str, key: str) -> tuple[float, float] | None:
    if model == "Limits":
        return _limits.bounds(key)
    if model == "NetworkLimits":
        return _NETWORK_BOUNDS.get(key)
    return _OR_ZERO.get(key) if model == "ExecutionRequest" else _NUMBERS.get((model, key))


def _named(name: str) -> type[Any]:
    """The model or the set of words of that name, among those that routes have imported."""
    waiting: list[type[Any]] = [Model, StrEnum, enum.StrEnum]
    while waiting:
        cls = waiting.pop()
        if cls.__name__ == name:
            return cls
        waiting.extend(cls.__subclasses__())
    raise TypeError(f"no schema for {name!r}")


def with_models(document: Schema) -> Schema:
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
