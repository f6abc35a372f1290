"""Opening paths while others rename."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from ringfence.linux import files

WALKS = 20_000
UP = "/".join(["d", ".."] * 20)

pytestmark = pytest.mark.anyone


def rename_for_ever(directory: str, parent: int, begun: Event) -> None:
    while os.getppid() == parent:
        os.rename(f"{directory}/a", f"{directory}/b")
        os.rename(f"{directory}/b", f"{directory}/a")
        begun.set()


@pytest.fixture(name="renamed")
def fixture_renamed(tmp_path: Path) -> Iterator[None]:
    """A file outside, whose name changes without end."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/a").touch()
    context = multiprocessing.get_context("fork")
    begun = context.Event()
    given = (str(tmp_path / "outside"), os.getpid(), begun)
    process = context.Process(target=rename_for_ever, args=given)
    process.start()
    try:
        assert begun.wait(30)
        yield
    finally:
        process.kill()
        process.join()


def test_others_renames_do_not_end_a_walk(tmp_path: Path, renamed: None) -> None:
    """openat2(2) answers EAGAIN where a rename, anywhere, met a ".."."""
    (tmp_path / "root/d").mkdir(parents=True)
    root = os.open(tmp_path / "root", os.O_PATH)
    try:
        for _ in range(WALKS):
            os.close(files.openat2(root, UP, os.O_PATH, resolve=files.RESOLVE_IN_ROOT))
    finally:
        os.close(root)


def test_what_is_not_there_is_not_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[object] = []
    real = files._openat2

    def counted(*given: object) -> int:
        tries.append(given)
        return real(*given)

    monkeypatch.setattr(files, "_openat2", counted)
    root = os.open(tmp_path, os.O_PATH)
    try:
        with pytest.raises(FileNotFoundError):
            files.openat2(root, "none", os.O_PATH, resolve=files.RESOLVE_BENEATH)
    finally:
        os.close(root)
    assert 1 == len(tries)
