"""Reading a command line by table. The same table makes the help and the shell completion."""

from __future__ import annotations

from ..errors import InvalidRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


class Option:
    """One `--name`; without a `value` it is a switch.

    Args:
        value: What the help calls its value; empty for a switch, which takes one of `words` after `=`.
        field: Where errors say it is, when that is not its own name.
        words: What completion offers; `<files>` and `<directories>` stand for those.
    """

    __slots__ = ("field", "help", "name", "repeat", "short", "value", "words")

    def __init__(
        self,
        name: str,
        value: str,
        help: str,
        *,
        field: str = "",
        words: str = "",
        repeat: bool = False,
        short: str = "",
    ) -> None:
        self.name, self.value, self.help = name, value, help
        self.field, self.words, self.repeat, self.short = field, words, repeat, short

    @property
    def flag(self) -> str:
        """As it is written: `--name`."""
        return f"--{self.name}"


class Command:
    """One sub-command: what it is called, takes and does.

    Args:
        groups: Names of options by the heading that the help shows them under.
    """

    __slots__ = (
        "arguments",
        "details",
        "examples",
        "groups",
        "name",
        "options",
        "summary",
        "words",
    )

    def __init__(
        self,
        name: str,
        summary: str,
        *,
        arguments: str = "",
        options: Sequence[Option] = (),
        details: str = "",
        examples: Sequence[tuple[str, str]] = (),
        words: str = "",
        groups: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.summary, self.arguments = name, summary, arguments
        self.groups = groups or {}
        self.options, self.details, self.examples, self.words = options, details, examples, words

    def flag_of(self, field: str) -> str:
        """The option that fills `field` of a request, as it is written; else `field` itself."""
        head = field.removeprefix("limits.").partition("[")[0]
        for option in self.options:
            if option.flag == field or head.partition(".")[0] in (option.name, option.field):
                return option.flag
        return "CMD" if head == "argv" else field


def parse(command: Command, argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The given options by name, and the arguments behind them.

    Options end at `--` or at the first argument that is none, so that a command's own options
    are never ours.

    Raises:
        InvalidRequest: An unknown option, a missing value, or a value where none belongs.
    """
    known = {option.flag: option for option in command.options}
    known.update({f"-{option.short}": option for option in command.options if option.short})
    given: dict[str, Any] = {}
    at = 0
    while at < len(argv):
        word = argv[at]
        at += 1
        if word == "--":
            break
        if not word.startswith("-") or word == "-":
            at -= 1
            break
        flag, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        option = known.get(flag)
        if option is None:
            raise _unknown(flag, known, command)
        if not option.value:
            if equals and value not in option.words.split():
                known_words = f": only {option.words.replace(' ', ' or ')}" if option.words else ""
                raise InvalidRequest(f"takes no value {value!r}{known_words}", field=option.flag)
            given[option.name] = value if equals else True
            continue
        if not equals:
            if at == len(argv) or argv[at] == "--":
                raise InvalidRequest(
                    f"needs a value: {option.flag} {option.value}", field=option.flag
                )
            value = argv[at]
            at += 1
        if option.repeat:
            given.setdefault(option.name, []).append(value)
        else:
            given[option.name] = value
    return given, list(argv[at:])


def _unknown(flag: str, known: dict[str, Option], command: Command) -> InvalidRequest:
    import difflib

    from .hints import OPTIONS

    close = difflib.get_close_matches(flag, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"see `ringfence {command.name} --help`"
    if command.name in ("run", "mcp"):
        hint = OPTIONS.get(flag, hint)
    return InvalidRequest(f"unknown option {flag}", field=flag, hint=hint)


def no_arguments(command: Command, rest: Sequence[str]) -> None:
    """Refuse arguments of a command that takes none."""
    if rest:
        hint = f"see `ringfence {command.name} --help`"
        raise InvalidRequest(f"unexpected argument {rest[0]!r}", field="argv", hint=hint)
