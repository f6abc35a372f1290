"""Reading a command line by table. The same table makes the help and the shell completion."""

from __future__ import annotations

from ..errors import InvalidRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


class Option:
    """A `--name` option; without a `value` it is a switch.

    Args:
        value: Placeholder of its value in the help; empty for a switch, which takes one of `words` after `=`.
        field: Name in error messages, where it differs from the option's.
        words: Completions; `<files>` and `<directories>` complete paths.
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
    """A sub-command: name, arguments, options, help.

    Args:
        groups: Names of options by their heading in the help.
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
        names = (head, first := head.partition(".")[0], first.replace("_", "-"))
        for option in self.options:
            if option.flag == field or option.name == head or (option.field == head and head):
                return option.flag
        for option in self.options:
            if option.name in names or (option.field == first and first):
                return option.flag
        return "CMD" if head == "argv" else field


def parse(
    command: Command, argv: Sequence[str], given: dict[str, Any] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """The given options by name, and the arguments behind them.

    Options end at `--` or at the first argument that is none, so that a command's own options
    are never ours.

    Args:
        given: What was read before arguments that options may follow; it is added to.

    Raises:
        InvalidRequest: An unknown option, a second value, a missing value, or a value where none belongs.
    """
    known = {option.flag: option for option in command.options}
    known.update({f"-{option.short}": option for option in command.options if option.short})
    given = {} if given is None else given
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
                forms = [f"{option.flag}={each}" for each in option.words.split()]
                hint = " or ".join([option.flag, *forms])
                raise InvalidRequest(f"takes no value {value!r}", field=option.flag, hint=hint)
            setting = value if equals else True
            if given.setdefault(option.name, setting) != setting:
                forms = [f"{option.flag}={each}" for each in option.words.split()]
                what = f"is given twice, in two forms of {', '.join([option.flag, *forms])}"
                raise InvalidRequest(what, field=option.flag, hint="give the option once")
            continue
        if not equals:
            if at == len(argv) or argv[at] == "--":
                hint = f"{option.flag} {option.value}"
                raise InvalidRequest("needs a value", field=option.flag, hint=hint)
            value = argv[at]
            at += 1
        if option.repeat:
            given.setdefault(option.name, []).append(value)
        elif given.setdefault(option.name, value) != value:
            raise _twice(option, given[option.name], value)
    return given, list(argv[at:])


def _twice(option: Option, first: str, second: str) -> InvalidRequest:
    """An option with two values: whichever wins, somebody expected the other."""
    one = f"separate hosts by commas: {option.flag} {first},{second}"
    hint = one if option.name == "net" else "give the option once"
    what = f"is given twice, with {first!r} and {second!r}"
    return InvalidRequest(what, field=option.flag, hint=hint)


def _unknown(flag: str, known: dict[str, Option], command: Command) -> InvalidRequest:
    from ..model.mistakes import closest
    from .hints import option_of_others

    hint = option_of_others(command.name, flag) or closest(flag, known)
    hint = hint or f"see `ringfence {command.name} --help`"
    return InvalidRequest(f"unknown option {flag}", field=flag, hint=hint)


def verb_of(command: Command, words: Sequence[str]) -> str:
    """The first word, as one of the command's own.

    Raises:
        InvalidRequest: There is none, or it is another.
    """
    known = command.words.split()
    if not words:
        hint = f"ringfence {command.name} {command.arguments}"
        raise InvalidRequest(f"name one of {', '.join(known)}", field="VERB", hint=hint)
    if words[0] not in known:
        from ..model.mistakes import meant
        from .hints import ELSEWHERE, VERBS

        same = next((each for each in VERBS.get(words[0], ()) if each in known), "")
        hint = f"did you mean {same}?" if same else ""
        hint = hint or ELSEWHERE.get((command.name, words[0]), "") or meant(words[0], known)
        raise InvalidRequest(f"unknown verb {words[0]!r}", field="VERB", hint=hint)
    return words[0]


def no_arguments(command: Command, rest: Sequence[str]) -> None:
    if rest:
        hint = f"it takes options only: see `ringfence {command.name} --help`"
        raise InvalidRequest(f"unexpected argument {rest[0]!r}", field="ARGUMENT", hint=hint)
