"""What a promise says it is shown by is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.anyone

ROOT = Path(__file__).parent.parent.parent
ROWS = [
    line
    for line in (ROOT / "PROMISES.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ")
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:40])
def test_the_tests_it_names_are_there(row: str) -> None:
    """By their whole path, or by name beside one that has it."""
    whole = re.findall(r"`((?:tests|tools|docs|examples)/[\w./*-]+)", row)
    beside = {(ROOT / path).parent for path in whole}
    # Tests of others, which are run by ours, have names as well.
    names = [name for name in re.findall(r"`(test_[\w*]+\.py)`", row) if "test_run_cwd.py" != name]

    assert [] == [path for path in whole if not list(ROOT.glob(path.rstrip("/")))]
    assert [] == [n for n in names if not any(list(each.glob(n)) for each in beside)]
