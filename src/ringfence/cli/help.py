"""Help texts, made from the table of commands."""

from __future__ import annotations

from .commands import COMMANDS
from .options import Command, Option

_INDENT, _COLUMN, _WIDTH = 2, 34, 100

OVERVIEW = """\
Usage: ringfence COMMAND [OPTIONS]

Run untrusted code in real isolation: no root, Docker or KVM needed.

Commands:
{commands}

`ringfence COMMAND --help` shows options and examples. `ringfence --version` shows the version.

Examples:
  ringfence run -- python3 step.py
  ringfence run --mount .:/work:rw --workdir /work -- make
  ringfence serve --detach && ringfence shell
  ringfence doctor
"""


def overview() -> str:
    lines = [f"  {command.name:<12}{command.summary}" for command in COMMANDS]
    return OVERVIEW.format(commands="\n".join(lines))


def help_of(command: Command) -> str:
    parts = [f"Usage: ringfence {command.name} {command.arguments}\n\n{command.summary}\n"]
    parts += _grouped(command)
    if command.details:
        parts.append(command.details + "\n")
    shown = "".join(f"  # {what}\n  {line}\n" for what, line in command.examples)
    parts.append("Examples:\n" + shown)
    return "\n".join(parts)


def _grouped(command: Command) -> list[str]:
    """The options under their headings; those of none are last."""
    rest = {option.name: option for option in command.options}
    parts = []
    for heading, names in command.groups.items():
        found = [rest.pop(name) for name in names.split() if name in rest]
        parts.append(f"{heading}:\n" + "".join(map(_option, found)))
    return [*parts, "Options:\n" + "".join(map(_option, rest.values()))]


def _option(option: Option) -> str:
    short = f"-{option.short}, " if option.short else ""
    choice = f"[={option.words.replace(' ', '|')}]" if option.words and not option.value else ""
    head = f"{short}{option.flag}{choice} {option.value}".rstrip()
    text = option.help + ("; repeatable" if option.repeat else "")
    first = " " * _INDENT + head.ljust(_COLUMN - _INDENT)
    if len(head) > _COLUMN - _INDENT - 1:
        first = " " * _INDENT + head + "\n" + " " * _COLUMN
    lines = _wrapped(text, _WIDTH - _COLUMN)
    return first + ("\n" + " " * _COLUMN).join(lines) + "\n"


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return lines
