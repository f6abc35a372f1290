"""What a hull does beside waiting: a still that could not be written is no start."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ringfence.launcher import hull


class _Still:
    def __init__(self, problem: OSError | None = None) -> None:
        self.problem = problem

    def write(self, fd: int) -> None:
        if self.problem:
            raise self.problem
        os.write(fd, b"written")


def _writing(place: Path, still: Any) -> hull._Writing:
    fd = os.open(place, os.O_WRONLY | os.O_CREAT)
    return hull._Writing(still, fd)


def test_what_is_written_beside_is_there_in_the_end(tmp_path: Path) -> None:
    _writing(tmp_path / "still", _Still()).finish()

    assert b"written" == (tmp_path / "still").read_bytes()


def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "no space left")
    with pytest.raises(OSError, match="no space left"):
        _writing(tmp_path / "still", _Still(full)).finish()
