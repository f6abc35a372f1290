"""The tour in CONTRIBUTING.md names functions where they are.

`python -m tests.docs.test_contributing` updates its line numbers.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "CONTRIBUTING.md"
SCREEN = 40
STOP = re.compile(
    r"^\| `(?P<file>src/[\w/]+\.py):(?P<line>\d+)` \| `(?P<name>\w+)` \|", re.MULTILINE
)
STOPS = [match.group("file", "line", "name") for match in STOP.finditer(PAGE.read_text("utf-8"))]


def _lines_of(file: str, name: str) -> list[int]:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    begin = re.compile(rf"\s*(async )?def {name}\(")
    return [number for number, line in enumerate(lines, start=1) if begin.match(line)]


def test_the_tour_has_stops() -> None:
    assert len(STOPS) >= 10


@pytest.mark.parametrize(("file", "line", "name"), STOPS)
def test_the_named_function_is_at_the_named_line(file: str, line: str, name: str) -> None:
    """Within a screen of it: changes above a function must not break the tests of their authors.

    If this fails after a change of the source: python -m tests.docs.test_contributing.
    """
    assert any(abs(int(line) - begin) <= SCREEN for begin in _lines_of(file, name))


def test_every_other_file_that_is_named_is_there() -> None:
    """Paths in back-ticks, except those with a placeholder."""
    named = set(re.findall(r"`((?:src|tests|tools|docs)/[\w./-]+)`", PAGE.read_text("utf-8")))

    assert named
    assert [] == [
        path for path in sorted(named) if "NAME" not in path and not (ROOT / path).exists()
    ]


if __name__ == "__main__":

    def update(stop: re.Match[str]) -> str:
        line = _lines_of(stop["file"], stop["name"])[0]
        return stop[0].replace(f":{stop['line']}`", f":{line}`", 1)

    PAGE.write_text(STOP.sub(update, PAGE.read_text("utf-8")), encoding="utf-8")
