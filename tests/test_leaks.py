"""The leak check notices what it is there to notice: every check needs a control."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.features import require
from tests.leaks import Census, take_census, too_deep, wait_for_calm
from tests.native.outside import until


def test_a_process_left_running_is_noticed() -> None:
    before = take_census()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        grown = wait_for_calm(before, patience_s=0.1)
        process.kill()

    assert ("process", str(process.pid)) in [(kind, text.split()[0]) for kind, text in grown]
    left = wait_for_calm(before, patience_s=5)
    assert str(process.pid) not in [text.split()[0] for kind, text in left if "process" == kind]


def test_a_zombie_is_noticed() -> None:
    before = take_census()
    with subprocess.Popen(["true"]) as process:
        assert until(lambda: process.pid in _zombies(before))


def _zombies(before: Census) -> list[int]:
    grown = wait_for_calm(before, patience_s=0)
    return [int(text.split()[0]) for _, text in grown if text.endswith(" Z")]


def test_a_umask_left_is_noticed() -> None:
    before = take_census()
    mask = os.umask(0o007)
    try:
        grown = wait_for_calm(before, patience_s=0)
    finally:
        os.umask(mask)
    assert ("umask", "7") in grown


def test_a_directory_left_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = take_census()
    (tmp_path / "ringfence-scratch").mkdir()

    assert [str(tmp_path / "ringfence-scratch")] == _paths_below(tmp_path, before)


def test_a_tree_too_deep_for_pytest_is_noticed(tmp_path: Path) -> None:
    inner = tmp_path / "/".join(["d"] * 20)
    inner.mkdir(parents=True)

    assert [str(inner)[: len(str(tmp_path)) + 80]] == too_deep(str(tmp_path), most=20)
    assert [] == too_deep(str(tmp_path), most=21)


@pytest.mark.root
def test_what_the_neighbour_leaves_is_the_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("RINGFENCE_TEST_NEIGHBOURS", "23455 23456")
    before = take_census()
    for name, uid in (("ringfence-theirs", 23456), ("ringfence-ours", 23457)):
        (tmp_path / name).mkdir()
        os.chown(tmp_path / name, uid, uid)

    assert [str(tmp_path / "ringfence-ours")] == _paths_below(tmp_path, before)


def test_what_is_named_after_a_namespace_outside_is_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = take_census()
    inner, outer = (tmp_path / f"ringfence.1.1.402653{n}.native-1" for n in (1837, 1836))
    inner.mkdir()
    outer.mkdir()

    assert sorted(map(str, (inner, outer))) == _paths_below(tmp_path, before)
    monkeypatch.setenv("RINGFENCE_TEST_OUTSIDE", "4026531836")
    assert [str(inner)] == _paths_below(tmp_path, before)


def _paths_below(directory: Path, before: Census) -> list[str]:
    """What grew there; elsewhere on the machine others may be at work."""
    grown = wait_for_calm(before, patience_s=0.1)
    return [text for kind, text in grown if "path" == kind and text.startswith(str(directory))]


@pytest.mark.parametrize(
    ("ci", "outcome"), [("", pytest.skip.Exception), ("1", pytest.fail.Exception)]
)
def test_a_missing_feature_skips_here_and_fails_in_ci(
    ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)

    with pytest.raises(outcome, match="no-such-program"):
        require("no-such-program")
