"""Trees that are removed: deeper than any path, and moved about meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringfence.launcher.helpers import trees
from ringfence.launcher.helpers.descent import Descent


def _go_down(top: Path, levels: int) -> None:
    """Make so many directories in each other, and a file in the last."""
    top.mkdir()
    fd = os.open(top, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(os.open("leaf", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.close(fd)


@pytest.mark.full
def test_a_tree_deeper_than_any_path_and_any_stack(tmp_path: Path) -> None:
    _go_down(tmp_path / "top", 3000)

    trees.remove(str(tmp_path / "top"), one_file_system=False)

    assert [] == os.listdir(tmp_path)


def test_few_directories_are_open_and_one_that_was_moved_is_not_gone_back_to(
    tmp_path: Path,
) -> None:
    _go_down(tmp_path / "top", 100)
    before = len(os.listdir("/proc/self/fd"))
    place = Descent(os.open(tmp_path / "top", os.O_RDONLY))
    for _ in range(100):
        place.enter("d")
    assert len(os.listdir("/proc/self/fd")) - before < 40
    (tmp_path / "top" / "/".join(["d"] * 50)).rename(tmp_path / "moved")

    for _ in range(50):
        place.leave()
    with pytest.raises(OSError, match="moved"):
        place.leave()
    place.close()

    assert before == len(os.listdir("/proc/self/fd"))


def test_no_link_is_gone_into(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "link").symlink_to("inside")
    place = Descent(os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY))
    place.enter("inside")
    place.leave()
    with pytest.raises(NotADirectoryError):
        place.enter("link")
    place.close()
