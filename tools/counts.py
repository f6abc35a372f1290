"""Add up test reports: `python counts.py REPORT.xml...` prints passed, failed and skipped.

A report that is missing or broken counts as one failure: a run that died is not a run that passed.
"""

from __future__ import annotations

import sys
from xml.etree import ElementTree


def count(path: str) -> tuple[int, int, int]:
    """Passed, failed and skipped of one JUnit report."""
    try:
        suites = list(ElementTree.parse(path).getroot().iter("testsuite"))
    except (OSError, ElementTree.ParseError) as exc:
        print(f"{path}: {exc}", file=sys.stderr)
        return 0, 1, 0
    total, failed, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites for name in names)
        for names in (("tests",), ("failures", "errors"), ("skipped",))
    )
    return max(0, total - failed - skipped), failed, skipped


def main(paths: list[str]) -> None:
    passed, failed, skipped = (sum(column) for column in zip(*map(count, paths), strict=True))
    print(f"{passed} passed, {failed} failed, {skipped} skipped")


if __name__ == "__main__":
    main(sys.argv[1:])
