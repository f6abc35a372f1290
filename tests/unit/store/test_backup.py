"""Backups: whole, of one moment, private; restored only where nothing is lost by it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from ringfence.errors import InvalidRequest, IoError, SnapshotCorrupt, StateTooNew
from ringfence.store import backup
from ringfence.store.records import KeyRecord, SnapshotRecord
from ringfence.store.schema import MIGRATIONS
from ringfence.store.store import FILE, Store

pytestmark = pytest.mark.anyone

KEPT = ("execution.json", "audit.log", "audit.log.1", "refused.log", "refused.log.1")


def key(number: int) -> KeyRecord:
    return KeyRecord(f"key-{number:06d}", b"digest", "ann", "user", 1.0)


def snapshot(name: str) -> SnapshotRecord:
    return SnapshotRecord(name, "ann", "sbx-1", "native", "{}", 1.0)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state directory with a key, a snapshot and an audit log, in use by nobody."""
    place = tmp_path / "state"
    store = Store(str(place))
    store.add_key(key(0))
    for name in ("snap-1", "snap-gone"):
        store.add_snapshot(snapshot(name))
    store.close()
    (place / "snapshots" / "snap-1").mkdir(parents=True)
    (place / "snapshots" / "snap-1" / "content.tar").write_text("content")
    (place / "snapshots" / "snap-1" / "snapshot.json").write_text('{"lower": ["snap-0"]}')
    (place / "snapshots" / "snap-1" / "unpacked").touch()
    for made_again in ("tree", ".tree-1", "names", "entries", "names.new"):
        (place / "snapshots" / "snap-1" / made_again).mkdir()
    (place / "snapshots" / "snap-0").mkdir()
    (place / "snapshots" / "snap-0" / "deleted.json").write_text("{}")
    (place / "snapshots" / ".partial-2").mkdir()
    for name in KEPT:
        (place / name).write_text(f"{name}\n")
    (place / "spool").mkdir()
    return place


def test_a_backup_while_somebody_writes(state: Path, tmp_path: Path) -> None:
    """Every transaction is in it whole or not at all, and what ended before it began is in it."""
    store, over = Store(str(state)), threading.Event()
    store.add_key(key(1))

    def write() -> None:
        number = 10
        while not over.is_set():
            with store.together():
                store.add_key(key(number))
                store.add_key(key(number + 1))
            number += 2

    writer = threading.Thread(target=write)
    writer.start()
    try:
        form = backup.save(str(state), str(tmp_path / "saved"), "1")
    finally:
        over.set()
        writer.join()
        store.close()
    modes = {
        each.stat().st_mode & 0o077 for each in [tmp_path / "saved", tmp_path / "saved" / FILE]
    }
    backup.restore(str(tmp_path / "saved"), str(tmp_path / "again"))

    again = Store(str(tmp_path / "again"))
    keys = {each.id for each in again.every_key()}
    assert {key(0).id, key(1).id} <= keys
    assert 0 == len(keys) % 2
    assert (["snap-1"], 1) == (form["snapshots"], form["snapshots_elsewhere"])
    assert {0} == modes
    again.close()
    kept = {each.name for each in (tmp_path / "again").iterdir()}
    assert {FILE, "lock", "snapshots", *KEPT} == kept
    assert [f"{name}\n" for name in KEPT] == [
        (tmp_path / "again" / name).read_text() for name in KEPT
    ]
    content = tmp_path / "again" / "snapshots" / "snap-1" / "content.tar"
    assert "content" == content.read_text()
    places = tmp_path / "again" / "snapshots"
    assert {"snap-1", "snap-0"} == {each.name for each in places.iterdir()}
    assert {"content.tar", "snapshot.json"} == {each.name for each in (places / "snap-1").iterdir()}
    for path in (tmp_path / "again").rglob("*"):
        assert 0 == path.stat().st_mode & 0o022


def test_what_is_refused(state: Path, tmp_path: Path) -> None:
    saved, full = tmp_path / "saved", tmp_path / "full"
    backup.save(str(state), str(saved), "1")
    full.mkdir()
    (full / "file").touch()
    with pytest.raises(InvalidRequest, match="not empty"):
        backup.save(str(state), str(full), "1")
    with pytest.raises(InvalidRequest, match="not empty"):
        backup.restore(str(saved), str(state))
    with pytest.raises(InvalidRequest, match=r"no state\.sqlite3"):
        backup.save(str(full), str(tmp_path / "other"), "1")
    with pytest.raises(InvalidRequest, match="not a complete backup"):
        backup.restore(str(state), str(tmp_path / "other"))
    with open(saved / FILE, "r+b") as file:
        file.seek(200)
        file.write(b"x")
    with pytest.raises(SnapshotCorrupt):
        backup.restore(str(saved), str(tmp_path / "other"))
    assert not (tmp_path / "other").exists()


def test_a_directory_of_any_name_is_saved(state: Path, tmp_path: Path) -> None:
    """Its path is part of a URI."""
    odd = state.rename(tmp_path / "50%41?mode=rwc&x#y")
    assert 2 == len(_saved(odd, tmp_path / "copy"))


def _saved(state: Path, target: Path) -> list[tuple[str]]:
    """The snapshots that the database of a new backup knows."""
    backup.save(str(state), str(target), "1.0")
    with closing(sqlite3.connect(target / FILE)) as database:
        return database.execute("SELECT id FROM snapshots").fetchall()


def test_a_damaged_database_is_not_saved(state: Path, tmp_path: Path) -> None:
    size = (state / FILE).stat().st_size
    with open(state / FILE, "r+b") as file:
        file.seek(4096)
        file.write(os.urandom(size - 4096))
    with pytest.raises(IoError, match="not made"):
        backup.save(str(state), str(tmp_path / "saved"), "1")
    assert not (tmp_path / "saved").exists()


def test_a_snapshot_over_one_that_is_kept_for_itself_is_saved_beside_it(
    state: Path, tmp_path: Path
) -> None:
    """Each is copied once: a second copy would find the first in its place."""
    with closing(Store(str(state))) as store:
        store.add_snapshot(snapshot("snap-0"))
    form = backup.save(str(state), str(tmp_path / "saved"), "1")

    assert ["snap-0", "snap-1"] == form["snapshots"]
    assert {"snap-0", "snap-1"} == {*os.listdir(tmp_path / "saved" / "snapshots")}


def test_a_damaged_snapshot_is_saved_as_it_is(state: Path, tmp_path: Path) -> None:
    (state / "snapshots" / "snap-1" / "snapshot.json").write_text("{")
    form = backup.save(str(state), str(tmp_path / "saved"), "1")
    assert ["snap-1"] == form["snapshots"]
    assert ["snap-1"] == os.listdir(tmp_path / "saved" / "snapshots")


def test_a_backup_of_an_earlier_version_is_brought_up_to_this_one(
    state: Path, tmp_path: Path
) -> None:
    """By the restore: what refuses the file later cannot be put right any more."""
    saved = tmp_path / "saved"
    backup.save(str(state), str(saved), "1")
    with sqlite3.connect(saved / FILE) as connection:
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    connection.close()
    form = json.loads((saved / "backup.json").read_text())
    form["sha256"] = hashlib.sha256((saved / FILE).read_bytes()).hexdigest()
    (saved / "backup.json").write_text(json.dumps(form))
    with pytest.raises(StateTooNew):
        backup.restore(str(saved), str(tmp_path / "again"))


def test_a_damaged_database_says_what_to_do(state: Path) -> None:
    (state / FILE).write_bytes(b"x" * 8192)
    with pytest.raises(IoError) as caught:
        Store(str(state))
    assert "ringfence restore" in str(caught.value.hint)


def test_the_file_alone_has_what_was_written_before(state: Path, tmp_path: Path) -> None:
    """Once the log has been moved into it, which the server does on a timer."""
    store = Store(str(state))
    store.add_key(key(7))

    def has_it() -> bool:
        copy = tmp_path / "alone.sqlite3"
        shutil.copyfile(state / FILE, copy)
        reader = sqlite3.connect(copy)
        try:
            return bool(reader.execute("SELECT 1 FROM keys WHERE id = ?", (key(7).id,)).fetchall())
        finally:
            reader.close()

    assert not has_it(), "the control: it is in the log"
    store.checkpoint()
    assert has_it()
    store.close()


def test_a_lost_database_is_told(state: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Store(str(state)).close()
        assert [] == caplog.records, "the control: nothing is lost"
        (state / FILE).unlink()
        Store(str(state)).close()
    assert "keys, records and owners of snapshots are lost" in caplog.text
    assert "audit.log and spool and snapshots" in caplog.text


@pytest.mark.parametrize("trace", ["audit.log", "spool", "snapshots"])
def test_each_trace_of_a_lost_database_is_one(
    trace: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / trace).mkdir()
    (tmp_path / "lock").touch()
    with caplog.at_level(logging.WARNING):
        Store(str(tmp_path)).close()
    assert f"has {trace} and no {FILE}" in caplog.text


def test_a_backup_that_could_not_be_restored_is_told(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup.save(str(state), str(tmp_path / "b"), "1")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full)
        with pytest.raises(IoError, match=r"the backup was not restored: .*No space left"):
            backup.restore(str(tmp_path / "b"), str(tmp_path / "new"))

    Store(str(tmp_path / "new")).close()  # nobody has its lock
