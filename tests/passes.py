"""Two gears and three passes: which tests a run of pytest takes.

`make test` runs the first gear, `make test-all` also the files and tests marked `full`: every other
backend, every program, every page, and most tests that take more than a second in each pass. As
root each gear runs in three passes at once, one as root and two as ordinary users, who share theirs:
each takes the next file that the other has not claimed. A test marked `anyone` comes out alike for
all, and runs in the pass that claims its file first, so that the passes end together.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

GEAR = "RINGFENCE_TEST_GEAR"
"""`first` leaves out what is marked `full`, `rest` leaves out all else; unset or `all` takes both."""


_PYTESTMARK = re.compile(r"^pytestmark = (?:\[.*?\]|.*?)$", re.DOTALL | re.MULTILINE)
_MARK = re.compile(r"\bpytest\.mark\.(\w+)")


@functools.cache
def marks_of(path: Path) -> frozenset[str]:
    """Names of the marks that a file's `pytestmark` gives to all of its tests."""
    found = _PYTESTMARK.search(path.read_text(encoding="utf-8"))
    return frozenset(_MARK.findall(found[0])) if found else frozenset()


def is_left_out(path: Path) -> bool:
    """Tell whether no test of this file runs in this gear and this pass, by its text alone."""
    if not (path.name.startswith("test_") and path.suffix == ".py"):
        return False
    gear, marks = os.environ.get(GEAR, "all"), marks_of(path)
    if "first" == gear and "full" in marks:
        return True
    if "rest" == gear and "mark.full" not in path.read_text(encoding="utf-8"):
        return True
    other = "rootless" if 0 == os.geteuid() else "root"
    return bool(os.environ.get("RINGFENCE_TEST_BOTH")) and other in marks


def is_of_another_gear(item: pytest.Item) -> bool:
    """Tell whether the mark `full`, or its absence, leaves this test to the other gear."""
    gear, is_full = os.environ.get(GEAR, "all"), item.get_closest_marker("full") is not None
    return is_full if "first" == gear else not is_full and "rest" == gear


class Claims:
    """Files of tests that several passes could run, each taken by one.

    Args:
        directory: One for all passes, writable for their users.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def of(self, items: list[pytest.Item]) -> Iterator[pytest.Item]:
        """Yield the tests of this identity that it claims, then those of any identity.

        Root and the others go through the latter from opposite ends, and meet.
        """
        identity = "root" if 0 == os.geteuid() else "rootless"
        own: dict[str, list[pytest.Item]] = {}
        shared: dict[str, list[pytest.Item]] = {}
        for item in items:
            files = shared if item.get_closest_marker("anyone") else own
            files.setdefault(item.nodeid.partition("::")[0], []).append(item)
        for file, tests in own.items():
            if self._claim(f"{identity}:{file}"):
                yield from tests
        for file, tests in shared.items() if "root" == identity else reversed(shared.items()):
            if self._claim(file):
                yield from tests

    def _claim(self, name: str) -> bool:
        try:
            os.close(os.open(self._directory / name.replace("/", ","), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True
