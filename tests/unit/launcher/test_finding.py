"""Looking through a tree: what is asked of the kernel, and when it is given up."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from ringfence.launcher.helpers import finding


@pytest.fixture(autouse=True)
def _nobody_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.alarm", lambda _seconds: 0)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("a/b/c", "a/d"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x.py").write_text("needle")
    return tmp_path


def found(tree: Path, pattern: str, most: int = 99) -> list[str]:
    read, write = os.pipe()
    try:
        finding.find(write, str(tree), json.dumps({"pattern": pattern, "most": most}))
    finally:
        os.close(write)
        with open(read, "rb") as file:
            lines = [json.loads(line) for line in file]
    return [os.path.relpath(line["path"], tree) for line in lines if "path" in line]


def test_no_directory_below_the_pattern_is_read(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    scandir = os.scandir

    def noted(path: str) -> Any:
        read.append(os.path.relpath(path, tree))
        return scandir(path)

    monkeypatch.setattr("os.scandir", noted)
    assert ["a/b", "a/d"] == found(tree, "./*/*")
    assert [".", "a"] == read
    read.clear()
    assert ["a/b/c/x.py", "a/d/x.py"] == found(tree, "**/x.py")
    assert [".", "a", "a/b", "a/b/c", "a/d"] == read, "the control"


def test_a_tree_that_takes_too_long_is_said_to(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(tree, "**"), "the control"
    monkeypatch.setattr(finding, "_LOOKS_S", -1)
    with pytest.raises(OSError, match="name a directory in it") as late:
        found(tree, "**")
    assert errno.ETIMEDOUT == late.value.errno
    with pytest.raises(OSError, match="name a directory in it"):
        finding.search(
            -1,
            str(tree),
            json.dumps(
                {"pattern": "x", "regex": False, "ignore_case": False, "glob": "", "most": 9}
            ),
        )
