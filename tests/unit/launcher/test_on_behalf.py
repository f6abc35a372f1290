"""System calls that carry a key, made by this process for itself: what is left when they are over."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from ringfence.linux import on_behalf

pytestmark = pytest.mark.anyone

REMOVED = 0o1000  # SHM_DEST of the mode in /proc/sysvipc/shm: gone with the last who is attached


def modes() -> dict[int, int]:
    """The segments of shared memory, by id: proc(5), /proc/sysvipc/shm."""
    lines = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    return {int(line.split()[1]): int(line.split()[2], 8) for line in lines}


def test_a_segment_goes_with_the_last_who_is_attached() -> None:
    id, address = on_behalf.segment(4096, 0)
    try:
        assert modes()[id] & REMOVED
        assert stat.S_IMODE(modes()[id]) & 0o777 == 0o600
    finally:
        on_behalf.detach(address)
    assert id not in modes()


@pytest.mark.parametrize("size", [0, 1 << 62])
def test_a_segment_that_cannot_be_leaves_nothing(size: int) -> None:
    before = modes()
    with pytest.raises(OSError, match=r"Invalid|Cannot allocate|No space"):
        on_behalf.segment(size, 0)
    assert before == modes()


def test_the_mode_of_what_is_only_looked_at_is_changed(tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o600)
    fd = os.open(tmp_path / "file", os.O_PATH)
    try:
        assert 0 == on_behalf.change_mode(fd, 0o640, 0)
        assert 0o640 == stat.S_IMODE(os.fstat(fd).st_mode)
    finally:
        os.close(fd)
    assert errno.ENOENT == on_behalf.change_mode(fd, 0o640, 0)
