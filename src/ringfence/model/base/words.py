"""Named words, as `enum.StrEnum` has them, without the 3 ms that importing `enum` takes."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, ClassVar, Self


class _Words(type):
    """Iterating over the class gives its members."""

    __members__: dict[str, Any]

    def __iter__(cls) -> Iterator[Any]:
        return iter(cls.__members__.values())

    def __len__(cls) -> int:
        return len(cls.__members__)

    def __contains__(cls, value: object) -> bool:
        return any(value == member for member in cls)


class StrEnum(str, metaclass=_Words):
    """Base of a class whose upper-case attributes are its members: strings, each one object."""

    name: str
    __members__: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        words = {name: value for name, value in vars(cls).items() if name.isupper()}
        cls.__members__ = {}
        for name, value in words.items():
            member = str.__new__(cls, value)
            member.name = name
            cls.__members__[name] = member
            setattr(cls, name, member)

    def __new__(cls, value: str) -> Self:
        """The member of that value."""
        for member in cls.__members__.values():
            if member == value:
                return member  # type: ignore[no-any-return]
        raise ValueError(f"{value!r} is not a valid {cls.__name__}")

    @property
    def value(self) -> str:
        """The plain string."""
        return str.__str__(self)

    def __str__(self) -> str:
        return str.__str__(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {self.value!r}>"

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        return type(self), (self.value,)

    __hash__ = str.__hash__
