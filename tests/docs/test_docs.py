"""The README and the documentation do what they say."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from ringfence.cli import commands, options
from ringfence.errors import InvalidRequest
from tests.docs.blocks import (
    Block,
    blocks_of,
    matches,
    run_console,
    run_python,
)
from tests.docs.conftest import Reader

pytestmark = pytest.mark.anyone

ROOT = Path(__file__).parent.parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
RUN = {"console", "python", "output"}
NEEDS = {"docs/how-to/browsers.md": "chromium"}
NOT_RUN = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}:{block.line}")
    for page in PAGES
    for block in blocks_of(page.read_text(encoding="utf-8"))
    if block.not_run
]


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _marks(name: str) -> list[pytest.MarkDecorator]:
    """What a how-to guide says holds for every user; the README is for the first gear."""
    return ([pytest.mark.anyone] if "how-to" in name else []) + (
        [] if "README.md" == name else [pytest.mark.full]
    )


def _pages() -> list[object]:
    """Each page as a parameter."""
    return [
        pytest.param(page, id=name, marks=_marks(name)) for page in PAGES for name in [_name(page)]
    ]


@pytest.mark.parametrize("page", _pages())
def test_page_runs_as_printed(page: Path, reader: Reader, require: Callable[[str], None]) -> None:
    desk, env = reader
    blocks = [
        block
        for block in blocks_of(page.read_text(encoding="utf-8"))
        if block.language in RUN and not block.not_run
    ]
    if not blocks:
        return
    require("user namespaces")
    if feature := NEEDS.get(_name(page)):
        require(feature)

    for block in blocks:
        if "console" == block.language:
            run_console(block, desk, env)
    if any("python" == block.language for block in blocks):
        run_python(blocks, desk, env, _name(page))


@pytest.mark.parametrize("block", NOT_RUN)
def test_block_is_not_run(block: Block) -> None:
    pytest.skip(f"not run: {block.not_run}")


def _strings(value: Any) -> Iterator[str]:
    """Every text in a YAML document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def _check_options(line: str) -> None:
    """Raise InvalidRequest where a line gives `ringfence` an option that it does not have."""
    words = shlex.split(line)
    for at, word in enumerate(words[:-1]):
        if word.rpartition("/")[2] == "ringfence":
            for command in commands.COMMANDS:
                if words[at + 1] == command.name:
                    options.parse(command, words[at + 2 :])


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_commands_that_are_not_run_have_options_that_exist(page: Path) -> None:
    """In YAML, which parses, and in console blocks that need what is not here."""
    for block in blocks_of(page.read_text(encoding="utf-8")):
        lines: list[str] = []
        if "yaml" == block.language:
            for document in yaml.safe_load_all(block.text):
                lines += _strings(document)
        elif "console" == block.language and block.not_run:
            lines = [line[2:] for line in block.text.splitlines() if line.startswith("$ ")]
        for line in lines:
            if "ringfence " in line:
                _check_options(line)


def test_an_option_that_does_not_exist_is_noticed() -> None:
    with pytest.raises(InvalidRequest):
        _check_options("/bin/ringfence run --no-such-option -- true")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "PROMISES.md", ROOT / "CHANGELOG.md"], ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]

    assert [] == [target for target in local if not (page.parent / target).exists()]


@pytest.mark.parametrize(
    ("expected", "got", "same"),
    [
        ("a\nb", "a\nb\n", True),
        ("a\n...\nd", "a\nb\nc\nd\n", True),
        ("pid ...", "pid 12", True),
        ("a", "a\nb", False),
        ("a.c", "abc", False),
    ],
)
def test_output_is_compared(expected: str, got: str, same: bool) -> None:
    assert same == matches(expected, got)


def test_a_wrong_page_is_noticed(tmp_path: Path) -> None:
    """The control: output that differs and commands that fail are failures."""
    env = dict(os.environ)
    for text in ("$ echo one\ntwo", "$ echo not shown", "$ false", "$ exit 0\n$ echo never"):
        with pytest.raises(AssertionError):
            run_console(Block("console", text, 1), tmp_path, env)
    with pytest.raises(AssertionError):
        run_python([Block("python", "1 / 0", 1)], tmp_path, env, "page")

    run_console(Block("console", "$ false\n$ echo $?\n1", 1), tmp_path, env)
