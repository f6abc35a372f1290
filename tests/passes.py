"""Two gears and two passes: which tests a run of pytest takes.

`make test` runs the first gear, `make test-all` also the files and tests marked `full`: every other
backend, every program, every page. As root each gear runs in two passes at once, as root and as an
ordinary user. A test marked `anyone` comes out alike for both, and runs in the pass that claims its
file first, so that both passes end together.
"""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

GEAR = "RINGFENCE_TEST_GEAR"
"""`first` leaves out what is marked `full`, `rest` leaves out all else; unset or `all` takes both."""


@functools.cache
def marks_of(path: Path) -> frozenset[str]:
    """Names of the marks that a file's `pytestmark` gives to all of its tests."""
    source = path.read_text(encoding="utf-8")
    if "pytestmark" not in source:
        return frozenset()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and "pytestmark" == ast.unparse(node.targets[0]):
            marks = [each for each in ast.walk(node.value) if isinstance(each, ast.Attribute)]
            return frozenset(
                mark.attr for mark in marks if "pytest.mark" == ast.unparse(mark.value)
            )
    return frozenset()


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
    """Files of tests marked `anyone`, each taken by one of two passes.

    Args:
        directory: One for both passes, writable for both users.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def of(self, items: list[pytest.Item]) -> Iterator[pytest.Item]:
        """Yield the tests of this pass only, then those that it claims.

        The passes go through the shared files from opposite ends, and meet.
        """
        shared: dict[str, list[pytest.Item]] = {}
        for item in items:
            if item.get_closest_marker("anyone"):
                shared.setdefault(item.nodeid.partition("::")[0], []).append(item)
            else:
                yield item
        files = list(shared)
        for file in files if 0 == os.geteuid() else reversed(files):
            if self._claim(file):
                yield from shared[file]

    def _claim(self, file: str) -> bool:
        try:
            os.close(os.open(self._directory / file.replace("/", ","), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True
