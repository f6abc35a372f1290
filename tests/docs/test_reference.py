"""The reference says what the code says: every code, field and state is there."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from ringfence import errors
from ringfence.cli.commands import COMMANDS
from ringfence.cli.options import Command
from ringfence.model import Credential, NetworkEvent, NetworkLimits, NetworkPolicy, NetworkRule
from ringfence.model.acquire import AcquireOptions, RequiredCapabilities
from ringfence.model.client_session import SESSION_NEXT, ClientSession, SessionTimeouts
from ringfence.model.granted import SandboxCapabilities
from ringfence.model.limits import Limits
from ringfence.model.manager_stats import ManagerStats
from ringfence.model.spec import SandboxSpec
from ringfence.model.state import NEXT
from ringfence.sessions import BashConfig, ManagerConfig, PoolConfig, SessionManager

pytestmark = pytest.mark.anyone

REFERENCE = Path(__file__).parent.parent.parent / "docs" / "reference"


def _rows(page: str) -> list[list[str]]:
    """The cells of every table row of a page, without back-ticks."""
    lines = (REFERENCE / page).read_text(encoding="utf-8").splitlines()
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines if line.startswith("|")]
    return [[cell.strip().replace("`", "") for cell in row] for row in cells]


def test_every_error_is_listed_with_its_code_and_retryability() -> None:
    classes = [
        each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, errors.RingfenceError)
    ]
    listed = {row[0]: row[1:3] for row in _rows("errors.md")}

    for each in classes:
        retry = {"ringfence_error": ""}.get(each.code, "yes" if each.retryable else "no")
        assert [each.code, retry] == listed.get(each.__name__), each.__name__


def test_every_limit_is_listed() -> None:
    listed = {row[0] for row in _rows("limits.md")}

    assert set() == {field.name for field in fields(Limits)} - listed


def test_every_field_of_the_spec_is_listed() -> None:
    listed = {name for row in _rows("library.md") for name in row[0].split(", ")}

    assert set() == {field.name for field in fields(SandboxSpec)} - listed


@pytest.mark.parametrize(
    "model", [NetworkPolicy, NetworkRule, Credential, NetworkLimits, NetworkEvent]
)
def test_every_field_of_a_network_policy_is_listed(model: type[Any]) -> None:
    page = (REFERENCE / "network-policy.md").read_text(encoding="utf-8")
    section = page.split(
        f"`{model.__name__}`**" if model is Credential else f"`{model.__name__}`\n"
    )[1]
    listed = set(
        re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\|(.*?)\|", section, re.MULTILINE)))
    )

    assert set() == {field.name for field in fields(model)} - listed


def test_the_states_are_the_table() -> None:
    listed = {row[0]: row[1] for row in _rows("glossary.md")}

    for state, following in NEXT.items():
        said = set(listed[state].split(", ")) - {"nothing"}
        assert {str(then) for then in following if then != state} == said


def _table(command: Command) -> str:
    """The options of a command as `--help` has them, as a table in Markdown."""
    rows = ["| option | meaning |", "|---|---|"]
    for option in command.options:
        choice = f"[={option.words.replace(' ', '|')}]" if option.words and not option.value else ""
        head = f"{option.flag}{choice} {option.value}".rstrip().replace("|", r"\|")
        short = f"`-{option.short}`, " if option.short else ""
        text = option.help.replace("|", r"\|").replace("*", r"\*")
        rows.append(f"| {short}`{head}` | {text}{'; repeatable' if option.repeat else ''} |")
    return "\n".join(rows) + "\n"


_TABLE = r"(?m)^\| option \| meaning .*\n(?:\|.*\n)+"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_options_are_described_as_by_help(command: Command) -> None:
    """`python -m tests.docs.test_reference` writes the tables."""
    page = (REFERENCE / "cli.md").read_text(encoding="utf-8")
    section = page.split(f"## `ringfence {command.name}`\n")[1].split("\n## ")[0] + "\n"

    assert [_table(command)] == re.findall(_TABLE, section)


def test_every_room_is_described() -> None:
    package = REFERENCE.parent.parent / "src" / "ringfence"
    page = (REFERENCE.parent / "explanation" / "architecture.md").read_text(encoding="utf-8")
    described = {
        name
        for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }

    assert described == {path.parent.name for path in package.glob("*/__init__.py")} | {"errors"}


def test_every_decision_is_in_the_index() -> None:
    records = REFERENCE.parent / "decisions"
    index = (records / "README.md").read_text(encoding="utf-8")
    texts = {path.name: path.read_text(encoding="utf-8") for path in records.glob("0*.md")}
    titles = {name: text.partition("\n")[0].removeprefix("# ") for name, text in texts.items()}

    listed = re.findall(r"^- \[(.*?)\]\((.*?)\)", index, re.MULTILINE)
    assert {name: title for title, name in listed} == titles


@pytest.mark.parametrize(
    "model",
    [
        AcquireOptions,
        ClientSession,
        ManagerConfig,
        ManagerStats,
        PoolConfig,
        RequiredCapabilities,
        SandboxCapabilities,
        SessionTimeouts,
    ],
)
def test_every_field_of_sessions_is_named(model: type) -> None:
    page = (REFERENCE / "sessions.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]*)`", page))))

    assert set() == {field.name for field in fields(model)} - named


def test_every_field_of_the_bash_tool_is_named() -> None:
    page = (REFERENCE.parent / "how-to" / "bash-tool.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", page)) | {"allow_degraded"}

    assert set() == {field.name for field in fields(BashConfig)} - named


def test_the_states_of_a_session_are_the_table() -> None:
    listed = {row[0]: row[1] for row in _rows("sessions.md")}

    for state, following in SESSION_NEXT.items():
        said = set(listed[state].split(", ")) - {"nothing"}
        assert {str(then) for then in following if then != state} == said


def test_every_public_method_of_the_manager_is_listed() -> None:
    page = (REFERENCE / "sessions.md").read_text(encoding="utf-8")
    internal = {"activate", "check_open", "end", "verbs", "uptime_s"}
    methods = {name for name in vars(SessionManager) if not name.startswith("_")} - internal

    assert set() == {name for name in methods if f"{name}(" not in page}


def _write_tables() -> None:
    path = REFERENCE / "cli.md"
    sections = re.split(r"(?m)^(?=## )", path.read_text(encoding="utf-8"))
    for command in COMMANDS:
        [at] = [
            i
            for i, text in enumerate(sections)
            if text.startswith(f"## `ringfence {command.name}`\n")
        ]
        sections[at] = re.sub(_TABLE, lambda _found, each=command: _table(each), sections[at])
    path.write_text("".join(sections), encoding="utf-8")


if __name__ == "__main__":
    _write_tables()
