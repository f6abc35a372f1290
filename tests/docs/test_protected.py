"""The guide names what is protected without being asked for, all of it and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from ringfence.policy.protected import BY_KIND, DEFAULTS

GUIDE = Path(__file__).parents[2] / "docs/how-to/mounts-and-protected-paths.md"


def test_the_table_is_the_guides() -> None:
    rows = re.findall(r"^\| [^|]+ \| (`[^|]+) \|$", GUIDE.read_text().partition("used by")[2], re.M)
    named = [re.findall(r"`([^`]+)`", row) for row in rows[: len(BY_KIND)]]

    assert [list(names) for names in BY_KIND.values()] == named
    assert len(DEFAULTS) == len(set(DEFAULTS))
