"""What a dead process left on disk is removed, and nothing of what lives on."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.backends.local import journal
from ringfence.backends.local.host import owner

pytestmark = pytest.mark.anyone


@pytest.fixture
def label() -> Iterator[str]:
    """The label of a process that lives."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield owner.label(process.pid)
        process.kill()


def test_a_sweep_spares_sandboxes_that_another_process_goes_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, label: str
) -> None:
    """A daemon that is replaced: its zygote lives on, with the sandboxes that the next one knows."""
    base, source = tmp_path / "notes", tmp_path / "source"
    base.mkdir(mode=0o700)
    monkeypatch.setenv(journal.DISKS, str(tmp_path))
    monkeypatch.setattr(journal, "runtime_directory", lambda: str(base))
    left = {}
    for name in ("sandbox.lives", "over"):
        (source / name).mkdir(parents=True)
        info = (source / name).stat()
        note = journal.note(name, [(str(source), name, info.st_dev, info.st_ino)], label)
        assert note is not None
        left[name] = [Path(journal.disk_of(name, label)), Path(note), source / name]
        left[name][0].mkdir()

    journal.sweep()
    assert all(path.exists() for paths in left.values() for path in paths), "the process lives"
    journal.sweep(label, {"sandbox.lives"})

    assert [True] * 3 == [path.exists() for path in left["sandbox.lives"]]
    assert [False] * 3 == [path.exists() for path in left["over"]]
    journal.sweep(label)
    assert ["source"] == [name for name in os.listdir(tmp_path) if not name.startswith(".")]
    assert [] == os.listdir(source)
