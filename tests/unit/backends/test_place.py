"""A launcher's directories on the host, while somebody else sweeps."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from ringfence.backends.command import place


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(place, "base", lambda: str(tmp_path))
    return tmp_path


def test_a_sweep_while_one_is_made_takes_nothing_away(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes that begin at once: each sweeps, and the other's directory is not locked yet."""
    flock, swept = fcntl.flock, []

    def sweep_first(lock: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        place.sweep()
        swept.append(os.listdir(base))
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    made = _made()

    assert [[]] == swept  # the control: it does look like one that was left
    assert [os.path.basename(made.path)] == os.listdir(base)
    place.sweep()
    assert Path(made.path, "agent").is_dir()  # locked by now
    made.remove()
    assert not os.listdir(base)


def _made() -> place.Place:
    uid = os.geteuid()
    return place.Place(uid, uid, ())


@pytest.mark.full
def test_a_tree_of_any_depth_is_removed(base: Path) -> None:
    """A guest's: deeper than Python may recurse, with directories that nobody may enter, and links out."""
    made = _made()
    outside = base / "outside"
    outside.mkdir()
    here = os.open(made.path, os.O_RDONLY)
    os.symlink(outside, "out", dir_fd=here)
    os.mkdir(".0", dir_fd=here)
    for depth in range(1500):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=below))
        if depth % 100 == 1:
            os.fchmod(here, 0o500)
        os.close(here)
        here = below
    os.close(here)

    made.remove()

    assert ["outside"] == os.listdir(base)
