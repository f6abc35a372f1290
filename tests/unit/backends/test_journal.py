"""What a dead process left on disk is removed, and nothing of what lives on."""

from __future__ import annotations

import marshal
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.backends.local import journal
from ringfence.backends.local.host import owner
from ringfence.backends.local.mounts.protect import Protected
from ringfence.errors import SandboxLost

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


def test_a_note_is_for_its_user_alone_and_follows_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "runtime_directory", lambda: str(tmp_path / "notes"))
    (tmp_path / "notes").mkdir()
    assert journal.note("plain", []) is None
    path = journal.note("plain", [("/d", "n", 1, 2)])
    assert path == journal.path_of("plain")
    assert path is not None
    assert 0o600 == os.stat(path).st_mode & 0o777
    elsewhere = journal.path_of("linked")
    assert elsewhere is not None
    os.symlink(tmp_path / "target", elsewhere)
    with pytest.raises(OSError, match="symbolic links"):
        journal.note("linked", [("/d", "n", 1, 2)])
    assert not (tmp_path / "target").exists()
    monkeypatch.setattr(journal, "runtime_directory", lambda: None)
    assert journal.path_of("plain") is None
    assert journal.note("plain", [("/d", "n", 1, 2)]) is None


@pytest.mark.parametrize("content", [b"", b"another program's\n", journal._HEADER + b"\x00garbage"])
def test_a_note_that_tells_nothing_goes_without_harm(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, kept = tmp_path / "notes", tmp_path / "kept"
    base.mkdir()
    kept.mkdir()
    monkeypatch.setenv(journal.DISKS, str(tmp_path))
    monkeypatch.setattr(journal, "runtime_directory", lambda: str(base))
    info = kept.stat()
    made = marshal.dumps([(str(tmp_path), "kept", info.st_dev, info.st_ino)])
    dead = f"{2**22 + 1}.1.{os.stat('/proc/self/ns/pid').st_ino}"
    note = base / f"placeholders.{dead}.sandbox-1"
    note.write_bytes(content + made if content.endswith(b"\n") else content)
    others = [base / f"placeholders.{owner.label()}.lives", base / "placeholders.of.nobody"]
    for each in others:
        each.touch()
    journal.sweep()
    assert not note.exists()
    assert kept.exists()
    assert others == [each for each in others if each.exists()]
    note.write_bytes(journal._HEADER + made)
    journal.sweep()
    assert not kept.exists(), "a whole note is acted on"


@pytest.mark.parametrize("has_ended", [False, True])
def test_what_is_given_up_is_told_to_who_remembers_it(has_ended: bool, tmp_path: Path) -> None:
    note, told = tmp_path / "notes" / "note", list[Any]()
    note.parent.mkdir()
    made = tmp_path / "absent"
    made.mkdir()
    info = made.stat()

    def tell(*what: Any) -> None:
        told.append((*what, made.exists(), note.exists()))
        if has_ended:
            raise SandboxLost("the jailer is gone")

    launched: Any = SimpleNamespace(tell=tell)
    first, second = Protected(), Protected()
    note.touch()
    journal.give_up([first], str(note), "sandbox-1", launched)
    assert ([], False) == (told, note.exists()), "nobody remembers anything"
    second.placeholders = [(str(tmp_path), "absent", info.st_dev, info.st_ino)]
    note.parent.mkdir()
    note.touch()
    journal.give_up([first, second], str(note), "sandbox-1", launched)
    assert [("released", "sandbox-1", [], False, False)] == told


def test_who_may_not_list_the_disks_can_pass_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(journal.DISKS, str(tmp_path))
    found = journal.disk_directory()
    assert str(tmp_path) == os.path.dirname(found)
    assert 0o711 == os.stat(found).st_mode & 0o777
    assert f"{found}/disk.{owner.label()}.one" == journal.disk_of("one")
    assert f"{found}/disk.1.2.3.one" == journal.disk_of("one", "1.2.3")
