"""The page of programs says what the table says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.programs.table import FILE, PLACES, programs

pytestmark = pytest.mark.anyone

ROOT = FILE.parent.parent.parent


def test_the_page_is_made_of_the_table() -> None:
    made = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "programs.py")], capture_output=True, check=True
    ).stdout.decode()

    page = ROOT / "docs" / "reference" / "programs.md"
    assert made == page.read_text(encoding="utf-8"), "run tools/programs.py --write"


def test_rows_are_whole() -> None:
    for program in programs():
        assert set(program.cannot) <= set(PLACES), program.name
        assert all(":" in need for need in program.needs), program.name
    names = [program.name for program in programs()]
    assert len(set(names)) == len(names)
