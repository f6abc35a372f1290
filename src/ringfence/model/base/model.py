"""Base of all model classes: value equality, a readable repr, one JSON form."""

from __future__ import annotations

from ...errors import InvalidRequest
from . import jsonform

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Self


class Model:
    """Base of the frozen dataclasses of this package.

    Equality, hash and repr are written once here, not generated for each class (`eq=False,
    repr=False`): generating them would take a third of the time the model needs to import.
    """

    __dataclass_fields__: Mapping[str, Any]
    __match_args__: tuple[str, ...]  # the names of the fields, in order
    _in_bytes: tuple[str, ...] = ()  # those that hold bytes

    def _values(self) -> tuple[object, ...]:
        return tuple([getattr(self, name) for name in self.__match_args__])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Model) or type(other) is not type(self):
            return NotImplemented
        return self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        shown = [name for name, spec in self.__dataclass_fields__.items() if spec.repr]
        inner = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
        return f"{type(self).__name__}({inner})"

    def altered(self, **changes: Any) -> Self:
        """A copy with other values in some fields, and nothing checked again.

        Preconditions: each is a value that the constructor would have kept as it is.
        """
        made = object.__new__(type(self))
        values = made.__dict__
        values.update(self.__dict__)
        values.update(changes)
        if len(values) > len(self.__match_args__):
            from ..mistakes import refuse_names

            known = self.__match_args__
            refuse_names("altered", [name for name in changes if name not in known], known)
        return made

    def to_json(self) -> dict[str, Any]:
        """The JSON object of all fields; bytes as text, plus `*_base64` where text loses some."""
        form = jsonform.dump(self)
        for name in self._in_bytes:
            if (value := getattr(self, name)) is not None:
                form.update(jsonform.bytes_to_json(name, value))
        return form

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read `to_json`'s form; one of this class is taken as it is.

        Raises:
            InvalidRequest: Not an object; an unknown, missing or bad field, named in `field`.
        """
        if isinstance(data, cls):
            return data
        if cls._in_bytes:
            data = jsonform.json_object(data, cls.__name__)
            for name in cls._in_bytes:
                jsonform.bytes_from_json(data, name)
        return cls(**jsonform.take(cls, data))

    @classmethod
    def taken(cls, value: object, field: str) -> Self:
        """The object itself, or one read from a mapping of its JSON form, named `field` in errors.

        Raises:
            InvalidRequest: It is neither, or malformed.
        """
        if isinstance(value, cls):
            return value
        if not hasattr(value, "keys"):
            said = f"must be a {cls.__name__} or a mapping of its fields"
            raise InvalidRequest(f"{said}, not {type(value).__name__}", field=field)
        read: Self = jsonform.within(field, cls.from_json, value)
        return read

    @classmethod
    def _nested(cls) -> jsonform.Readers:
        """How to read the fields whose annotation does not tell it, by name."""
        return {}
