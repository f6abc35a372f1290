"""The README and the documentation do what they say."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.blocks import Block, blocks_of, matches, run_console, run_python
from tests.docs.conftest import Reader

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
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


@pytest.mark.parametrize("page", PAGES, ids=_name)
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
    for text in ("$ echo one\ntwo", "$ false", "$ exit 0\n$ echo never"):
        with pytest.raises(AssertionError):
            run_console(Block("console", text, 1), tmp_path, env)
    with pytest.raises(AssertionError):
        run_python([Block("python", "1 / 0", 1)], tmp_path, env, "page")

    run_console(Block("console", "$ false\n$ echo $?\n1", 1), tmp_path, env)
