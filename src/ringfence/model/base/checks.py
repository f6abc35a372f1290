"""Checks of single values; each failure is an `InvalidRequest` naming the field."""

from __future__ import annotations

from ...errors import InvalidRequest
from .helpful import knows_keywords

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Mapping
    from typing import Any, NoReturn, TypeVar

    T = TypeVar("T")


class FrozenMap(dict[str, str]):
    """A hashable, picklable, read-only dict; compares and serialises like a plain one."""

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TypeError("this mapping is part of a frozen request; create a new request instead")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type[FrozenMap], tuple[dict[str, str]]]:
        # The default way fills an empty instance item by item, which we refuse.
        return FrozenMap, (dict(self),)

    def __copy__(self) -> FrozenMap:
        return self

    def __deepcopy__(self, memo: object) -> FrozenMap:
        return self


_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_DIGITS = frozenset("0123456789")
_ENV_START = _LETTERS | {"_"}
_ENV_REST = _ENV_START | _DIGITS
_NAME = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_-.")
_PATH_MAX = 4095  # include/uapi/linux/limits.h PATH_MAX, less the closing NUL
_NAME_MAX = 255  # include/uapi/linux/limits.h
_COMMAND_BYTES = 6 << 20  # fs/exec.c bprm_stack_limits(): three quarters of _STK_LIM
_POINTER_BYTES = 9  # and the NUL

MOST_LABELS, LABELS_BYTES = 64, 16 << 10
NOTES_BYTES = 256 << 10
"""Of labels, metadata, environment and secrets of one request together."""
MOST_PATHS = 1000
"""In one list of a request."""


def refuse(field: str, message: str, hint: str = "") -> NoReturn:
    """Raise `InvalidRequest` for `field`."""
    raise InvalidRequest(message, field=field, hint=hint)


def _refuse_kind(field: str, what: str, value: object, hint: str = "") -> NoReturn:
    """Refuse a value of the wrong type, with the right form of what was given."""
    from .. import mistakes

    if not hint:
        show = {"a list": mistakes.as_list, "a string": mistakes.as_text}[what]
        hint = show(value)
    refuse(field, f"must be {what}, not {type(value).__name__}", hint)


def _numeral(value: object, field: str) -> str:
    from ..mistakes import as_number

    return as_number(value, field)


def text(value: object, field: str, *, empty: bool = True) -> str:
    """A str that the kernel can be given: no NUL, and encodable as a file name is."""
    if not isinstance(value, str):
        _refuse_kind(field, "a string", value)
    if not value and not empty:
        refuse(field, "must not be empty", "give a value, or omit the field to get its default")
    if "\0" in value:
        refuse(field, "must not contain a NUL byte")
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        refuse(field, "contains a lone surrogate, which cannot be encoded")
    return value


def binary(value: Any, field: str) -> bytes:
    """Convert any buffer to bytes, copying mutable ones. Plain `bytes(5)` would accept a number."""
    if type(value) is bytes:
        return value
    try:
        return bytes(memoryview(value))
    except TypeError:
        hint = "pass its content: .read()" if hasattr(value, "read") else 'as b"..." or "..."'
        _refuse_kind(field, "bytes", value, hint)


def name(value: object, field: str) -> str:
    """A short lower-case name, such as a template's or a profile's; never a path."""
    value = text(value, field, empty=False)
    if len(value) > 63 or not _NAME.issuperset(value) or value[0] in "-.":
        hint = "default: os_hardened" if field == "profile" else ""
        refuse(field, f"{value!r} is not a name: use up to 63 of a-z 0-9 _ - .", hint)
    return value


def choice(value: object, field: str, allowed: Container[str], said: str) -> str:
    """Check that `value` is one of the `allowed` words; `said` lists them in the message."""
    if not isinstance(value, str) or value not in allowed:
        from ..mistakes import closest

        known = [each for each in said.replace(",", "").split() if each in allowed]
        refuse(field, f"must be {said}, not {value!r}", closest(str(value), known))
    return value


def flag(value: object, field: str) -> bool:
    """A bool and nothing that merely looks true."""
    if not isinstance(value, bool):
        refuse(field, f"must be true or false, not {value!r}")
    return value


def integer(value: object, field: str, low: int, high: int, hint: str = "") -> int:
    """An int in [low, high]; a bool is not one."""
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(field, f"must be a whole number, not {value!r}", _numeral(value, field) or "as 100")
    if not low <= value <= high:
        refuse(field, f"must be between {low} and {high}, not {value}", hint)
    return value


def part_of_file(offset: object, max_bytes: object) -> None:
    """From where on a file is read, and at most how much; None is all that follows."""
    integer(offset, "offset", 0, 2**63 - 1)
    if max_bytes is not None:
        integer(max_bytes, "max_bytes", 0, 2**63 - 1)


def permissions(mode: object) -> None:
    """Check the permission bits of a new file. Set-id bits are refused."""
    if isinstance(mode, bool) or not isinstance(mode, int) or not 0 <= mode <= 0o777:
        said = f"0o{mode:o}" if type(mode) is int else repr(mode)
        digits = f"{mode}".removeprefix("0o")
        is_octal = len(digits) <= 4 and digits != "" and set(digits) <= set("01234567")
        hint = f"did you mean 0o{int(digits, 8):o}?" if is_octal else "as 0o644"
        refuse("mode", f"must be between 0 and 0o777, not {said}", hint)


def signal_number(value: object) -> int:
    """The number of a signal; the names that a shell takes are none."""
    if isinstance(value, bool) or not isinstance(value, int):
        name = str(value).upper().removeprefix("SIG")
        hint = f"as signal.SIG{name if name.isalnum() else 'TERM'}"
        refuse("signum", f"must be the number of a signal, not {value!r}", hint)
    return int(value)


def waiting_time(value: object) -> None:
    """Seconds to wait at most; None waits for as long as it takes."""
    if value is not None:
        number(value, "timeout_s", 0.0, 366 * 86_400)


def number(value: object, field: str, low: float, high: float) -> float:
    """A finite number in [low, high]; NaN, infinity and bool are refused."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        refuse(field, f"must be a number, not {value!r}", _numeral(value, field) or "as 1 or 0.5")
    if not low <= value <= high:  # also false for NaN
        refuse(field, f"must be between {low:.12g} and {high:.12g}, not {value}")
    return float(value)


def items(value: object, field: str) -> tuple[Any, ...]:
    """A list or tuple; a lone string is the classic mistake, and refused."""
    if not isinstance(value, (list, tuple)):
        _refuse_kind(field, "a list", value)
    return tuple(value)


def texts(value: object, field: str) -> tuple[str, ...]:
    """A list of strings without NUL."""
    given = items(value, field)
    try:
        text("".join(given), field)  # all at once; who is to be told which, looks at each
    except (TypeError, InvalidRequest):
        for i, item in enumerate(given):
            text(item, f"{field}[{i}]")
    return given


def arguments(value: object, field: str) -> tuple[str, ...]:
    """Strings without NUL, of which any may be given as a path object."""
    given = items(value, field)
    if all(type(item) is str for item in given):
        return texts(given, field)
    return texts(tuple(plain(item) for item in given), field)


def plain(value: object) -> object:
    """A path object, such as `pathlib.Path`, as the string that it stands for; all else as it is."""
    given: Any = value
    return given.__fspath__() if hasattr(type(given), "__fspath__") else given


def at_most(value: object, field: str, most: int) -> tuple[Any, ...]:
    """A list of no more than `most` items."""
    given = items(value, field)
    if len(given) > most:
        refuse(field, f"{len(given)} exceed the limit of {most}")
    return given


def labels(value: object, field: str) -> FrozenMap:
    """Labels: few, short and printable, as lists show and filters compare them."""
    if value and hasattr(value, "__len__") and len(value) > MOST_LABELS:
        refuse(field, f"{len(value)} are more than {MOST_LABELS}", "store the rest in `metadata`")
    pairs = string_map(value, field)
    if not pairs:
        return pairs
    weigh(field, LABELS_BYTES, pairs)
    for key, item in pairs.items():
        if not (key.isprintable() and item.isprintable()):
            refuse(field, f"{key!r} or its value has an unprintable character")
    return pairs


def weigh(field: str, most: int, *maps: Mapping[str, str]) -> None:
    """Refuse mappings that together have more than `most` bytes of keys and values."""
    size = sum(
        len(text.encode("utf-8", "surrogateescape"))
        for pairs in maps
        for pair in pairs.items()
        for text in pair
    )
    if size > most:
        refuse(field, f"{size} bytes exceed the limit of {most}", "put large values into a file")


def weigh_command(texts: tuple[str, ...], env: Mapping[str, str], field: str) -> None:
    """Refuse arguments and variables that no kernel passes to a program."""
    size = sum(map(len, texts)) + sum(len(key) + len(item) for key, item in env.items())
    size += _POINTER_BYTES * (len(texts) + len(env))
    if size > _COMMAND_BYTES:
        hint = "send the data on stdin or in a file"
        refuse(field, f"with the environment, {size} bytes are more than {_COMMAND_BYTES}", hint)


def string_map(value: object, field: str) -> FrozenMap:
    """A string-to-string mapping, copied so that later changes of `value` do not show."""
    if type(value) is FrozenMap:
        return value
    if not hasattr(value, "items"):
        _refuse_kind(field, "a mapping", value, 'as {"NAME": "value"}')
    pairs = dict(value.items())
    for key, item in pairs.items():
        if not text(key, field):
            refuse(field, "has an empty name", "as NAME=value")
        text(item, f"{field}.{key}")
    return FrozenMap(pairs)


def env_map(value: object, field: str) -> FrozenMap:
    """Environment variables; keys match `[A-Za-z_][A-Za-z0-9_]*`."""
    pairs = string_map(value, field)
    for key in pairs:
        if key[0] not in _ENV_START or not _ENV_REST.issuperset(key):
            refuse(
                f"{field}.{key}",
                f"{key!r} is not a variable name: [A-Za-z_][A-Za-z0-9_]*",
                _variable_like(key),
            )
    return pairs


def _variable_like(key: str) -> str:
    """Show the variable that was meant: of `A=b`, which has its value, and of `my-name`."""
    name, equals, value = key.partition("=")
    like = "".join(c if c in _ENV_REST else "_" for c in name)
    like = f"_{like}" if like[:1] not in _ENV_START else like
    return f'as {{"{like}": "{value}"}}' if equals else f"as {like}"


def path(value: object, field: str) -> str:
    """A path the kernel would accept: not empty, no NUL, no over-long part."""
    value = text(plain(value), field, empty=False)
    raw = value.encode("utf-8", "surrogateescape")
    if len(raw) > _PATH_MAX:
        refuse(field, f"is longer than {_PATH_MAX} bytes")
    if any(len(part) > _NAME_MAX for part in raw.split(b"/")):
        refuse(field, f"has a part longer than {_NAME_MAX} bytes")
    return value


def normal_path(value: object, field: str) -> str:
    """`value` without `//`, `/./` and trailing slashes; a `..` segment is refused.

    Refused, not resolved: `a/../b` means something else when `a` is a symlink.
    """
    given = path(value, field)
    parts = given.split("/")
    if ".." in parts:
        refuse(field, f"{given!r} has a '..' segment", "write the path without it")
    root = "/" if given.startswith("/") else ""
    return root + "/".join(part for part in parts if part not in ("", "."))


def absolute_path(value: object, field: str) -> str:
    """A normalised path that starts at the root."""
    given = normal_path(value, field)
    if not given.startswith("/"):
        example = given.lstrip("./") or "work"
        hint = "the home directory is /home/sandbox" if given[:1] == "~" else f"as /{example}"
        refuse(field, f"{value!r} is not an absolute path", hint)
    return given


def instance(value: object, field: str, cls: type[T]) -> T:
    """A model object, already validated by its own class."""
    if not isinstance(value, cls):
        _refuse_kind(field, f"a {cls.__name__}", value, f"as {cls.__name__}(...)")
    return value


def user(value: object, field: str) -> str:
    """A user name, or a uid in decimal; whether it exists is the backend's to say."""
    given = str(value) if type(value) is int else text(value, field, empty=False)
    if given.isascii() and given.isdigit():
        if not int(given) < 2**32 - 1:  # (uid_t)-1 means "no change" to the kernel
            refuse(field, f"uid {given} is out of range")
        return str(int(given))
    if len(given) > 32 or not _NAME.issuperset(given) or given[0] not in _ENV_START:
        refuse(field, f"{given!r} is neither a user name nor a uid", "as sandbox, root or 1000")
    return given


_SIZE_UNITS = {"": 1, "b": 1} | {
    letter + ending: 1 << 10 * power
    for power, letter in enumerate("kmgt", 1)
    for ending in ("", "b", "ib")
}
_TIME_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


@knows_keywords
def parse_size(text: str, field: str = "size") -> int:
    """Bytes in `256m`, `1g`, `1.5GiB` or `4096`; units are powers of 1024."""
    digits, unit = _split_unit(text, field, "as 64k, 256m or 1g")
    if unit not in _SIZE_UNITS:
        refuse(field, f"{text!r} is not a size", "as 4096, 64k, 256m or 1g")
    # Whole numbers stay exact; a float would round sizes above 2**53.
    if "." not in digits:
        return int(digits) * _SIZE_UNITS[unit]
    return int(float(digits) * _SIZE_UNITS[unit])


@knows_keywords
def parse_duration(text: str, field: str = "duration") -> float:
    """Seconds in `5s`, `500ms`, `1m`, `2h` or `1.5`."""
    digits, unit = _split_unit(text, field, "as 500ms, 5s or 1m")
    if unit not in _TIME_UNITS:
        refuse(field, f"{text!r} is not a duration", "as 1.5, 500ms, 5s, 1m or 2h")
    if unit == "ms":
        return float(digits) / 1000  # dividing is exact where multiplying by 0.001 is not
    return float(digits) * _TIME_UNITS[unit]


def _split_unit(quantity: str, field: str, hint: str) -> tuple[str, str]:
    """The leading plain decimal number of `quantity`, and the lower-cased rest."""
    given = text(quantity, field).strip().lower()
    digits = given.rstrip("abcdefghijklmnopqrstuvwxyz ")
    whole, dot, fraction = digits.partition(".")
    parts = (whole, fraction) if dot else (whole,)
    if len(digits) > 30 or not all(part.isascii() and part.isdigit() for part in parts):
        refuse(field, f"{quantity!r} does not start with a plain number", hint)
    return digits, given[len(digits) :].strip()
