"""`helpful`: a wrong name or keyword is answered with the right one."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, NoReturn, TypeVar

    T = TypeVar("T", bound=type[Any])
    F = TypeVar("F", bound=Callable[..., Any])

# `inspect` and `functools` take longer to import than a run.
_IS_COROUTINE = 0x80  # inspect.CO_COROUTINE
INSTANCES = {
    "Sandbox": "sandbox = Sandbox.create() makes one; Client(ADDRESS).get(ID) finds one of a server",
    "Client": "client = Client(ADDRESS)",
}
"""How an object is had of those classes whose methods are called on the class by mistake."""
_COPIED = ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__")


def helpful(cls: T) -> T:
    """Name the right one where an attribute or a keyword of a method of this class is wrong.

    Checkers and `inspect.signature` see the methods as they are written.
    """
    for name, value in [*vars(cls).items()]:
        if name[0] == "_" and name != "__init__":
            continue
        if isinstance(value, classmethod | staticmethod):
            setattr(cls, name, type(value)(knows_keywords(value.__func__)))
        elif hasattr(value, "__code__"):
            setattr(cls, name, knows_keywords(value))
    cls.__getattr__ = _no_attribute
    if "__aenter__" in vars(cls):
        cls.__enter__ = cls.__exit__ = _no_with
    elif "__enter__" in vars(cls):
        cls.__aenter__ = cls.__aexit__ = _no_async_with
        cls.__await__ = _no_await
    if not hasattr(cls, "__match_args__"):  # the others are values
        cls.__reduce_ex__ = _no_pickle  # type: ignore[assignment]
    return cls


def knows_keywords(function: F) -> F:
    """Wrap a function: it refuses an unknown keyword with the one that is meant.

    The interpreter finds it, so that a call with right ones is not looked at.
    """
    code: Any = getattr(function, "__code__", None)
    is_coroutine = bool(code and code.co_flags & _IS_COROUTINE)

    async def awaited(*args: Any, **options: Any) -> Any:
        try:
            return await function(*args, **options)
        except TypeError:
            _refuse_class(function, args)
            _refuse_unknown(function, options)
            raise

    def called(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except TypeError:
            _refuse_class(function, args)
            _refuse_unknown(function, options)
            raise

    made: Any = awaited if is_coroutine else called
    for name in _COPIED:
        setattr(made, name, getattr(function, name))
    made.__wrapped__ = function
    return made  # type: ignore[no-any-return]


def _no_attribute(self: object, name: str) -> object:
    from ..mistakes import no_attribute

    raise no_attribute(self, name)


def _no_with(self: object, *_error: object) -> NoReturn:
    raise TypeError(f"{type(self).__name__} is asynchronous: write `async with` in place of `with`")


def _no_async_with(self: object, *_error: object) -> NoReturn:
    name = type(self).__name__
    raise TypeError(f"{name} is not asynchronous: write `with`, or use Async{name}")


def _no_await(self: object) -> NoReturn:
    name = type(self).__name__
    raise TypeError(f"{name} is not asynchronous: remove `await`, or use Async{name}")


def _no_pickle(self: object, _protocol: object) -> object:
    if (
        type(self).__reduce__ is not object.__reduce__
    ):  # it has its own way: handles in Ray programs
        return self.__reduce__()
    what = f"{type(self).__name__} cannot be pickled or copied: it is a connection of this process"
    raise TypeError(f"{what} (pass an id, and get it from a Client, or create another there)")


def _refuse_class(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Refuse a method called on its class, whose first argument stands where the object belongs."""
    cls, dot, name = function.__qualname__.rpartition(".")
    if not (dot and args and isinstance(args[0], str | bytes | list | tuple | dict | int)):
        return
    code: Any = getattr(function, "__code__", None)
    if code and code.co_argcount and code.co_varnames[0] == "self":
        hint = INSTANCES.get(cls.removeprefix("Async"), f"call it on an object of {cls}")
        raise TypeError(f"{cls}.{name}() was called on the class ({hint})")


def _refuse_unknown(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise `InvalidRequest` for an option that the function does not have.

    Raises:
        InvalidRequest: There is one.
    """
    if options:
        from ..mistakes import refuse_unknown

        refuse_unknown(function, options)
