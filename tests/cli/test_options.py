"""The table-driven parser, and what else is made from the tables."""

from __future__ import annotations

import pytest

from ringfence.cli.commands import COMMANDS, LIMITS, RUN
from ringfence.cli.help import help_of, overview
from ringfence.cli.options import Command, Option, parse
from ringfence.cli.serve import _config
from ringfence.cli.server import inside
from ringfence.cli.server.hosting import SERVE
from ringfence.errors import InvalidRequest
from ringfence.policy.protected import DEFAULTS, NESTED

pytestmark = pytest.mark.anyone

TABLE = Command(
    "test",
    "Nothing.",
    options=(
        Option("name", "WORD", "one"),
        Option("many", "WORD", "several", repeat=True, field="items"),
        Option("switch", "", "on", short="s"),
    ),
)


@pytest.mark.parametrize(
    ("argv", "given", "rest"),
    [
        ([], {}, []),
        (["--name", "a"], {"name": "a"}, []),
        (["--name=a"], {"name": "a"}, []),
        (["--name="], {"name": ""}, []),
        (["--name", "-a"], {"name": "-a"}, []),
        (["--name", "a", "--name", "a"], {"name": "a"}, []),
        (["--many", "a", "--many=b"], {"many": ["a", "b"]}, []),
        (["-s", "x", "--switch"], {"switch": True}, ["x", "--switch"]),
        (["--", "--switch"], {}, ["--switch"]),
        (["--name", "a", "--", "--", "b"], {"name": "a"}, ["--", "b"]),
        (["-"], {}, ["-"]),
        (["--many=a=b"], {"many": ["a=b"]}, []),
    ],
)
def test_what_is_read(argv: list[str], given: dict[str, object], rest: list[str]) -> None:
    assert (given, rest) == parse(TABLE, argv)


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (["--nmae", "a"], "--nmae"),
        (["--name"], "--name"),
        (["--name", "--", "a"], "--name"),
        (["--switch=1"], "--switch"),
        (["-x"], "-x"),
        (["-sx"], "-sx"),
    ],
)
def test_what_is_refused(argv: list[str], field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parse(TABLE, argv)

    assert field == refusal.value.field


@pytest.mark.parametrize(
    ("field", "flag"),
    [
        ("name", "--name"),
        ("items", "--many"),
        ("items[3].part", "--many"),
        ("--name", "--name"),
        ("argv", "CMD"),
        ("argv[0]", "CMD"),
        ("unknown", "unknown"),
    ],
)
def test_errors_name_the_option(field: str, flag: str) -> None:
    assert flag == TABLE.flag_of(field)


@pytest.mark.parametrize("limit", ["memory_bytes", "cpus", "pids", "disk_bytes", "open_files"])
def test_every_limit_leads_to_its_option(limit: str) -> None:
    assert RUN.flag_of(f"limits.{limit}").startswith("--")


def test_limits_are_options() -> None:
    assert set(LIMITS) <= {option.name for option in RUN.options}


def test_the_default_set_is_offered_for_unprotect() -> None:
    option = next(option for option in RUN.options if "unprotect" == option.name)

    assert {"all", NESTED, *DEFAULTS} == set(option.words.split())


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_help_names_everything_and_fits(command: Command) -> None:
    text = help_of(command)

    assert all(option.flag in text for option in command.options)
    assert all(line in text for _what, line in command.examples)
    assert command.examples
    assert 100 >= max(len(line) for line in text.splitlines())


def test_a_server_has_the_backends_it_is_told_of() -> None:
    given, _rest = parse(SERVE, ["--backend", "native", "--backend=gvisor"])

    assert ("native", "gvisor") == _config(given).backends
    assert ("native",) == _config({}).backends


def test_the_overview_names_every_command() -> None:
    assert all(command.name in overview() for command in COMMANDS)


@pytest.mark.parametrize(
    ("word", "place"),
    [
        ("box:/tmp/x", ("box", "/tmp/x")),
        ("box:x:y", ("box", "x:y")),
        ("box:", ("box", ".")),
        ("x", ("", "x")),
        (":x", ("", ":x")),
        ("./a:b", ("", "./a:b")),
        ("/a:b", ("", "/a:b")),
        ("", ("", "")),
    ],
)
def test_a_colon_behind_a_slash_is_part_of_a_local_path(word: str, place: tuple[str, str]) -> None:
    assert place == inside._place(word)
