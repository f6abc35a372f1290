"""Every test that the contract names exists, and every row names one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.anyone

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "reference" / "contract.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if re.match(r"\| (?!what \|)", line)]
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)::(test_\w+)`", PAGE)))


def test_every_row_names_a_test() -> None:
    assert len(ROWS) > 60
    for row in ROWS:
        assert re.search(r"`[\w/]+\.py::test_\w+` ?[,|]", row), row


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_test_that_is_named_is_there(file: str, name: str) -> None:
    of_every_backend = file.startswith("conformance/") and "test_" not in file
    below = "src/ringfence/testing" if of_every_backend else "tests"
    text = (ROOT / below / file).read_text(encoding="utf-8")

    assert re.search(rf"^ *(async )?def {name}\(", text, re.MULTILINE)
