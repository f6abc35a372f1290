"""A launcher's directories on the host, while somebody else sweeps."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from ringfence.backends.command import place


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(place, "_base", lambda: str(tmp_path))
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
