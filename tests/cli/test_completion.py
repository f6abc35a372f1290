"""The completion scripts work in the shells they are for."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from ringfence.cli.commands import COMMANDS
from ringfence.cli.completion import script_for
from tests.cli.command import ringfence_command

pytestmark = pytest.mark.anyone

ASK_BASH = """
COMP_WORDS=({words}) COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_ringfence
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def _bash(*words: str) -> list[str]:
    quoted = " ".join(f"'{word}'" for word in words)
    script = script_for(["bash"]) + ASK_BASH.format(words=quoted)
    return subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=20, check=True
    ).stdout.split()


def test_commands_are_offered() -> None:
    assert {command.name for command in COMMANDS} <= set(_bash("ringfence", ""))
    assert ["doctor"] == _bash("ringfence", "doc")


def test_options_are_offered() -> None:
    assert ["--memory", "--memory-dir"] == _bash("ringfence", "run", "--mem")


@pytest.mark.parametrize(
    ("flag", "expected"),
    [("--tier", ["light", "strong"]), ("--net", ["none", "public", "unrestricted"])],
)
def test_values_are_offered(flag: str, expected: list[str]) -> None:
    assert expected == _bash("ringfence", "run", flag, "")


def test_nothing_of_ours_is_offered_behind_the_dashes() -> None:
    assert [] == _bash("ringfence", "run", "--", "--mem")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_accepts_its_script(shell: str, require: Callable[[str], None]) -> None:
    script = ringfence_command("completion", shell).stdout
    assert script
    require(shell)

    check = subprocess.run(
        [shell, "-n"], input=script, capture_output=True, timeout=20, check=False
    )

    assert (0, b"") == (check.returncode, check.stderr)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_option_is_in_every_script(shell: str) -> None:
    script = script_for([shell])
    names = {option.name for command in COMMANDS for option in command.options}

    assert [] == sorted(name for name in names if name not in script)
