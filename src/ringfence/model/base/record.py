"""Frozen dataclasses, but `dataclasses` itself is imported only when somebody looks at the fields.

`dataclasses` pulls in `inspect` and `re`: 12 ms, which is more than Python's own start, and every
`ringfence run` would pay it. What `fields`, `replace`, `asdict`, `is_dataclass` and
`inspect.signature` ask for is answered by a real dataclass of the same shape, made on first use.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    AnyClass = type[Any]

_MISSING: Any = object()
# Attributes that `dataclasses` and `inspect` read.
_ASKED_FOR = ("__dataclass_fields__", "__dataclass_params__", "__signature__")


class Default:
    __slots__ = ("factory", "repr")

    def __init__(self, factory: Callable[[], Any], shown: bool) -> None:
        self.factory, self.repr = factory, shown


if TYPE_CHECKING:
    # For type checkers the names of the standard library, whose decorator they know.
    from dataclasses import dataclass as dataclass
    from dataclasses import field as field
else:

    def field(*, default_factory: Callable[[], Any], repr: bool = True) -> Any:
        """As `dataclasses.field`, as far as the models need it."""
        return Default(default_factory, repr)

    def dataclass(*, frozen: bool, eq: bool, repr: bool) -> Callable[[AnyClass], AnyClass]:
        """As `dataclasses.dataclass(frozen=True, eq=False, repr=False)`, and nothing else."""
        assert frozen
        assert not eq
        assert not repr
        return _make


def _make(cls: AnyClass) -> AnyClass:
    names = tuple(cls.__annotations__)
    given = {name: cls.__dict__[name] for name in names if name in cls.__dict__}
    factories = {name: each.factory for name, each in given.items() if type(each) is Default}
    for name in factories:
        delattr(cls, name)  # as dataclasses does: there is no default to read from the class
    dataclass = _AsDataclass(cls, names, given)
    attributes = {
        "__match_args__": names,
        "__init__": _initializer(cls, names, given, factories),
        "__setattr__": _refuse,
        "__delattr__": _refuse,
        "__replace__": _replace,
        **{name: _Lazy(dataclass, name) for name in _ASKED_FOR},
    }
    for name, value in attributes.items():
        setattr(cls, name, value)
    return cls


def _initializer(
    cls: AnyClass,
    names: tuple[str, ...],
    given: dict[str, Any],
    factories: dict[str, Callable[[], Any]],
) -> Callable[..., None]:
    blank = {name: _MISSING if name in factories else given.get(name, _MISSING) for name in names}
    required = frozenset(name for name in names if name not in given)
    checks = hasattr(cls, "__post_init__")

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if args:
            if len(args) > len(names):
                raise _wrong(cls, f"takes {len(names)} positional arguments, not {len(args)}")
            if twice := kwargs.keys() & names[: len(args)]:
                raise _wrong(cls, f"got multiple values for argument {min(twice)!r}")
            kwargs.update(zip(names, args, strict=False))
        values = self.__dict__
        values.update(blank)
        values.update(kwargs)
        if len(values) > len(blank):
            name = next(name for name in kwargs if name not in blank)
            from ..mistakes import meant

            hint = meant(name, names, of=cls.__name__)
            raise _wrong(cls, f"got an unexpected keyword argument {name!r} ({hint})")
        if not kwargs.keys() >= required:
            name = next(name for name in names if name in required - kwargs.keys())
            raise _wrong(cls, f"missing a required argument: {name!r}")
        for name, factory in factories.items():
            if name not in kwargs:
                values[name] = factory()
        if checks:
            self.__post_init__()

    __init__.__qualname__ = f"{cls.__qualname__}.__init__"
    return __init__


def _wrong(cls: AnyClass, what: str) -> TypeError:
    return TypeError(f"{cls.__name__}.__init__() {what}")


def _refuse(self: Any, name: str, _value: Any = None) -> NoReturn:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot assign to field {name!r} of a {type(self).__name__}")


def _replace(self: Any, /, **changes: Any) -> Any:
    values = self.__dict__
    kept = {name: values[name] for name in self.__match_args__ if name in values}
    return type(self)(**{**kept, **changes})


class _AsDataclass:
    """The real dataclass of the same shape, made when it is asked for."""

    def __init__(self, cls: AnyClass, names: tuple[str, ...], given: dict[str, Any]) -> None:
        self._cls, self._names, self._given = cls, names, given
        self._made: AnyClass | None = None

    def made(self) -> AnyClass:
        if self._made is None:
            import dataclasses
            import inspect

            kinds = self._cls.__annotations__
            body: dict[str, Any] = {"__module__": self._cls.__module__}
            body["__annotations__"] = {name: kinds[name] for name in self._names}
            for name, value in self._given.items():
                if type(value) is Default:
                    value = dataclasses.field(default_factory=value.factory, repr=value.repr)
                body[name] = value
            dataclass = type(self._cls.__name__, (), body)
            self._made = dataclasses.dataclass(frozen=True, eq=False, repr=False)(dataclass)
            self._made.__signature__ = inspect.signature(self._made)
        return self._made


class _Lazy:
    """A class attribute that is read from the other class."""

    def __init__(self, dataclass: _AsDataclass, name: str) -> None:
        self._dataclass, self._name = dataclass, name

    def __get__(self, _instance: object, _owner: AnyClass) -> Any:
        return getattr(self._dataclass.made(), self._name)
