"""The one JSON form of the models: the dataclass's fields, snake_case, nothing else.

Unknown keys are refused by name: a misspelt limit must never mean "no limit".
"""

from __future__ import annotations

import sys

from ...errors import BadJson, InvalidRequest
from . import checks
from .checks import FrozenMap

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    Readers = Mapping[str, Callable[[Any], Any]]  # how to read fields, by name

_LARGEST = 2**63 - 1
_AS_IT_IS = frozenset({str, int, float, bool, type(None)})


def dump(model: Any, **instead: Any) -> dict[str, Any]:
    """The JSON object of a dataclass instance; of some fields what is given `instead`."""
    form = {}
    for name in model.__match_args__:
        if name in instead:
            form[name] = instead[name]
            continue
        value = getattr(model, name)
        form[name] = value if type(value) in _AS_IT_IS else plain(value)
    return form


def plain(value: Any) -> Any:
    """`value` with only JSON's own types in it."""
    if type(value) is FrozenMap:
        return dict(value)
    if isinstance(value, tuple):
        return [plain(item) for item in value] if value else []
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, dict):
        return dict(value)
    return value


def take(cls: type[Any], data: object) -> dict[str, Any]:
    """The constructor arguments of dataclass `cls` found in the JSON object `data`.

    Raises:
        InvalidRequest: Not an object; an unknown, missing or ill-typed key, named in `field`.
    """
    known = cls.__dataclass_fields__
    given = json_object(data, cls.__name__, f"with any of {', '.join(known)}")
    for key in given:
        if key not in known:
            raise UnknownKey(str(key), cls.__name__, tuple(known))
    for key in _required(cls):
        if key not in given:
            checks.refuse(key, f"missing from {cls.__name__}", f"add {key!r} to the object")
    readers = readers_of(cls)
    return {
        key: _read(value, key, known[key].type, readers.get(key)) for key, value in given.items()
    }


class UnknownKey(InvalidRequest):
    """A key that an object does not have."""

    def __init__(self, key: str, what: str, known: tuple[str, ...]) -> None:
        from ..mistakes import meant

        super().__init__(f"unknown key in {what}", field=key, hint=meant(key, known, of=what))
        self.what, self.known = what, known

    def __reduce__(self) -> tuple[Any, ...]:
        return UnknownKey, (self.field, self.what, self.known)


def widened(read: Callable[[Any], Any], data: object, what: str, names: tuple[str, ...]) -> Any:
    """`read(data)` of an object that is written with `names` of another one beside its own."""
    try:
        return read(data)
    except UnknownKey as exc:
        raise UnknownKey(exc.field, what, (*names, *exc.known)) from exc


def json_object(data: object, what: str, hint: str = "") -> dict[str, Any]:
    """`data` as a dict, or an `InvalidRequest` that says what was expected."""
    if isinstance(data, bytes):  # of a body that does not say what it is, or something else
        raise InvalidRequest(
            f"{what} must be a JSON object, but its Content-Type is not JSON",
            hint="send `Content-Type: application/json`: use `curl --json` instead of `curl -d`",
        )
    if not hasattr(data, "keys") or not hasattr(data, "items"):
        said = f"{what} must be a JSON object, not {type(data).__name__}"
        raise InvalidRequest(said, hint=hint or 'as {"name": "value"}')
    return dict(data.items())


def loads(text: str | bytes, *, unique: bool = False) -> Any:
    """Parse JSON text.

    Args:
        unique: Refuse an object that has a name twice, as a file that a person wrote may.

    Raises:
        BadJson: It is not JSON, or nested deeper than Python can follow.
    """
    import json

    try:
        return json.loads(text, object_pairs_hook=_once) if unique else json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise BadJson(f"not JSON: {exc}") from exc


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {name!r} is there twice")
        found[name] = value
    return found


def within(field: str, read: Callable[[Any], Any], value: object) -> Any:
    """`read(value)`; errors name the field below `field`."""
    try:
        return read(value)
    except InvalidRequest as exc:
        inner = join(field, exc.field)
        raise InvalidRequest(exc.message, hint=exc.hint, field=inner) from exc


def join(outer: str, inner: str) -> str:
    """The dotted name of field `inner` of `outer`: `mounts` + `[0].target`."""
    dot = "" if not inner or inner.startswith("[") or not outer else "."
    return f"{outer}{dot}{inner}"


def each(read: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    """A reader of a JSON list whose items `read` reads."""

    def read_all(value: object) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            what = f"must be a list of objects, not {type(value).__name__}"
            checks.refuse("", what, 'as [{"name": "value"}]')
        given = checks.items(value, "")
        return tuple(within(f"[{i}]", read, item) for i, item in enumerate(given))

    return read_all


def bytes_to_json(key: str, value: bytes) -> dict[str, str]:
    """Text under `key`, plus `key_base64` when text alone would lose bytes."""
    text = value.decode("utf-8", "replace")
    if text.encode("utf-8") == value:
        return {key: text}
    import binascii

    return {key: text, f"{key}_base64": binascii.b2a_base64(value, newline=False).decode("ascii")}


def bytes_from_json(given: dict[str, Any], key: str) -> None:
    """Replace what `bytes_to_json` wrote in `given` by the bytes, in place."""
    exact = given.pop(f"{key}_base64", None)
    if exact is not None:
        if given.get(key) is not None and not isinstance(given[key], (str, bytes)):
            checks.refuse(key, f"must be a string, not {type(given[key]).__name__}")
        given[key] = _decode_base64(exact, f"{key}_base64")
    elif isinstance(given.get(key), str):
        try:
            given[key] = given[key].encode("utf-8")
        except UnicodeEncodeError:
            checks.refuse(key, "holds a lone surrogate", f"send {key}_base64 instead")


def _decode_base64(value: object, field: str) -> bytes:
    import binascii

    try:
        return binascii.a2b_base64(checks.text(value, field).encode("ascii"), strict_mode=True)
    except ValueError as exc:
        raise InvalidRequest(f"is not base64: {exc}", field=field) from exc


def word(kind: Any, value: object) -> Any:
    """The member of an enumeration that a word of JSON names."""
    if not isinstance(value, str) or value not in tuple(kind):
        raise InvalidRequest(f"must be one of {', '.join(kind)}, not {value!r}")
    return kind(value)


_READERS: dict[type[Any], Readers] = {}
_REQUIRED: dict[type[Any], tuple[str, ...]] = {}


def readers_of(cls: type[Any]) -> Readers:
    """How to read the fields of a class that are models or words; looked up once for each class.

    A field's annotation is a name in the class's module, or a tuple of such. What it does not tell
    is in `_nested`.
    """
    found = _READERS.get(cls)
    if found is None:
        names = vars(sys.modules[cls.__module__])
        kinds = {name: spec.type for name, spec in cls.__dataclass_fields__.items()}
        told = {name: _reader_of(names, kind) for name, kind in kinds.items()}
        found = _READERS[cls] = {
            **{name: read for name, read in told.items() if read is not None},
            **cls._nested(),
        }
    return found


def _reader_of(names: Mapping[str, Any], kind: str) -> Callable[[Any], Any] | None:
    kind = kind.removesuffix(" | None")
    one = kind.removeprefix("tuple[").removesuffix(", ...]")
    named = names.get(one)
    if hasattr(named, "__members__"):
        return lambda value: word(named, value)
    read = getattr(named, "from_json", None)
    return read if read is None or one == kind else each(read)


def _required(cls: type[Any]) -> tuple[str, ...]:
    """The fields without a default; looked up once for each class."""
    found = _REQUIRED.get(cls)
    if found is None:
        from dataclasses import MISSING

        fields = cls.__dataclass_fields__.items()
        found = _REQUIRED[cls] = tuple(
            name
            for name, spec in fields
            if spec.default is MISSING and spec.default_factory is MISSING
        )
    return found


def _read(value: Any, key: str, kind: str, nested: Callable[[Any], Any] | None) -> Any:
    if value is None and "None" in kind:
        return None
    if nested is not None:
        return within(key, nested, value)
    if key == "user" and type(value) is int:  # a uid, as the document has it
        return str(value)
    check = _BY_KIND.get(kind.removesuffix(" | None"))
    return check(value, key) if check is not None else value


# By the field's annotation. Input models check more in their constructors; output models
# are made by typed code and need a check only here, where they come from outside.
_BY_KIND: dict[str, Callable[[Any, str], Any]] = {
    "str": checks.text,
    "bool": checks.flag,
    "int": lambda value, key: checks.integer(value, key, -_LARGEST, _LARGEST),
    "float": lambda value, key: checks.number(value, key, -1e18, 1e18),
    "bytes": checks.binary,
    "tuple[str, ...]": checks.texts,
    "Mapping[str, str]": checks.string_map,
}
