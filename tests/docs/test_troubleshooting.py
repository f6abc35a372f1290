"""Messages that the page on troubleshooting explains are those of the source."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.anyone

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "troubleshooting.md").read_text(encoding="utf-8")
OWN = PAGE[: PAGE.index("Messages of programs inside")] + PAGE[PAGE.index("## A request is") :]
FROM_THE_KERNEL = "ringfence: NAME: No such file or directory"
MESSAGES = [
    message
    for message in re.findall(r"^\| `(.+?)` \|", OWN, re.MULTILINE)
    if message != FROM_THE_KERNEL
]


@cache
def _literals() -> str:
    """Every string of the source, parts of f-strings too."""
    found = []
    for path in (ROOT / "src" / "ringfence").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else "\0" for part in node.values
                ]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_the_page_explains_many() -> None:
    assert len(MESSAGES) > 30


@pytest.mark.parametrize("message", MESSAGES)
def test_the_message_is_in_the_source(message: str) -> None:
    for part in message.split("…"):
        assert part.strip(" :") in _literals(), part
