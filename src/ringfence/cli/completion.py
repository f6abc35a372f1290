"""`ringfence completion`: scripts for bash, zsh and fish, made from the table of commands."""

from __future__ import annotations

import sys

from .commands import COMMANDS, COMPLETION
from .options import Command, Option, parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

FILES, DIRECTORIES = "<files>", "<directories>"


def main(argv: Sequence[str]) -> int:
    given, words = parse(COMPLETION, argv)
    if "help" in given:
        from .help import help_of

        sys.stdout.write(help_of(COMPLETION))
        return 0
    sys.stdout.write(script_for(words))
    return 0


def script_for(words: Sequence[str]) -> str:
    """The script for the one shell named in `words`.

    Raises:
        InvalidRequest: None, or one that is not known.
    """
    from ..errors import InvalidRequest

    makers = {"bash": bash, "zsh": zsh, "fish": fish}
    if len(words) != 1 or words[0] not in makers:
        what = f"{words[0]!r} is not supported" if words else "is missing"
        if len(words) > 1:
            what = f"give one shell, not {len(words)}"
        raise InvalidRequest(what, field="SHELL", hint="one of bash, zsh, fish")
    return makers[words[0]]()


def _names() -> str:
    return " ".join(command.name for command in COMMANDS)


def _flags(command: Command) -> list[str]:
    short = [f"-{option.short}" for option in command.options if option.short]
    return [option.flag for option in command.options] + short


# -- bash -------------------------------------------------------------------------------------

_BASH = """\
# bash completion for ringfence: source <(ringfence completion bash)
_ringfence() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
  local command=${{COMP_WORDS[1]}} i
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{names} --help --version" -- "$word"))
    return
  fi
  for ((i = 2; i < COMP_CWORD; i++)); do
    if [ "${{COMP_WORDS[i]}}" = -- ]; then  # behind it is the command to run, completed as a file
      compopt -o default 2>/dev/null
      return
    fi
  done
  case "$command $before" in
{values}
  esac
  case "$command" in
{commands}
  esac
}}
complete -F _ringfence ringfence
"""


def bash() -> str:
    """For bash 3.2 and newer."""
    values = [
        f'    "{command.name} {option.flag}") {_bash_words(option)} return ;;'
        for command in COMMANDS
        for option in command.options
        if option.value
    ]
    commands = [
        f"    {command.name}) {_bash_reply([*_flags(command), command.words])} ;;"
        for command in COMMANDS
    ]
    return _BASH.format(names=_names(), values="\n".join(values), commands="\n".join(commands))


def _bash_reply(words: Sequence[str]) -> str:
    return f'COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$word"))'


def _bash_words(option: Option) -> str:
    if option.words == FILES:
        return 'compopt -o nospace 2>/dev/null; COMPREPLY=($(compgen -f -- "$word"));'
    if option.words == DIRECTORIES:
        return 'COMPREPLY=($(compgen -d -- "$word"));'
    return f'COMPREPLY=($(compgen -W "{option.words}" -- "$word"));' if option.words else ""


# -- zsh --------------------------------------------------------------------------------------

_ZSH = """\
#compdef ringfence
# zsh completion for ringfence: source <(ringfence completion zsh)
_ringfence() {{
  local -a commands
  commands=(
{names}
  )
  if (( CURRENT == 2 )); then
    _describe command commands
    return
  fi
  case $words[2] in
{cases}
  esac
}}
compdef _ringfence ringfence
"""


def zsh() -> str:
    """For zsh 5 and newer, with compinit loaded."""
    names = "\n".join(f"    '{command.name}:{_quoted(command.summary)}'" for command in COMMANDS)
    cases = "\n".join(_zsh_case(command) for command in COMMANDS)
    return _ZSH.format(names=names, cases=cases)


def _zsh_case(command: Command) -> str:
    lines = [_zsh_option(option) for option in command.options]
    if command.words:
        lines.append(f"'*:argument:({command.words})'")
    elif command.name == "run":
        lines.append("'*::command:_normal'")
    body = " \\\n        ".join(lines)
    head = f"    {command.name})\n      shift words; (( CURRENT-- ))\n      _arguments -S"
    return f"{head} \\\n        {body}\n      ;;"


def _zsh_option(option: Option) -> str:
    star = "*" if option.repeat else ""
    text = _quoted(option.help).replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")
    if not option.value:
        return f"'{star}{option.flag}[{text}]'"
    actions = {FILES: "_files", DIRECTORIES: "_files -/", "": " "}
    action = actions.get(option.words, f"({option.words})")
    return f"'{star}{option.flag}=[{text}]:value:{action}'"


def _quoted(text: str) -> str:
    return text.replace("'", "'\\''")


# -- fish -------------------------------------------------------------------------------------


def fish() -> str:
    """For fish 3 and newer."""
    lines = ["# fish completion for ringfence", "complete -c ringfence -f"]
    for command in COMMANDS:
        text = command.summary.replace("'", "\\'")
        lines.append(
            f"complete -c ringfence -n __fish_use_subcommand -a {command.name} -d '{text}'"
        )
    for command in COMMANDS:
        lines += [_fish_option(command, option) for option in command.options]
        if command.words:
            lines.append(f"{_fish_when(command)} -a '{command.words}'")
    lines.append("complete -c ringfence -n '__fish_seen_subcommand_from run' -F")
    return "\n".join(lines) + "\n"


def _fish_when(command: Command) -> str:
    return f"complete -c ringfence -n '__fish_seen_subcommand_from {command.name}'"


def _fish_option(command: Command, option: Option) -> str:
    parts = [_fish_when(command), f"-l {option.name}"]
    if option.short:
        parts.append(f"-s {option.short}")
    if option.words in (FILES, DIRECTORIES):
        parts.append("-r -F")
    elif option.value:
        parts.append(f"-x -a '{option.words}'" if option.words else "-x")
    text = option.help.replace("'", "\\'")
    return " ".join([*parts, f"-d '{text}'"])
