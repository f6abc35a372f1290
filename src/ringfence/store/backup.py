"""Backups of a state directory: a consistent copy, also while a daemon runs, and the way back."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sqlite3
import time
from urllib.parse import quote

from ..errors import InvalidRequest, IoError, SnapshotCorrupt
from .database import Database
from .directory import LOCK, StateDirectory
from .schema import MIGRATIONS
from .store import FILE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MANIFEST = "backup.json"
_FORMAT = 1
_SNAPSHOTS = "snapshots"
# Of snapshots: made again from their streams.
_MADE = ("tree", ".tree-*", "unpacked", "names", "entries", "*.new")
# Not the output of execs, which is kept for a day, nor sockets and locks.
_FILES = ("execution.json", "audit.log.1", "audit.log", "refused.log.1", "refused.log")


def save(state_dir: str, target: str, version: str) -> dict[str, Any]:
    """Copy what outlives a daemon into the new directory `target`; the manifest.

    Raises:
        InvalidRequest: There is no state, or `target` is in use.
        IoError: It could not be read or written; nothing is left in `target`.
    """
    source = os.path.join(state_dir, FILE)
    if not os.path.isfile(source):
        hint = "the --state-dir of a server that has run"
        raise InvalidRequest(f"no {FILE} in {state_dir}", field="--state-dir", hint=hint)
    _make_empty(target, "DIR")
    try:
        copied = _copy_database(source, os.path.join(target, FILE))
        kept = [each for each in copied if _copy_snapshot(state_dir, target, each)]
        for each in {lower for one in kept for lower in _below(target, one)} - {*kept}:
            _copy_snapshot(state_dir, target, each)
        for name in _FILES:
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(os.path.join(state_dir, name), os.path.join(target, name))
        form = {
            "format": _FORMAT,
            "ringfence": version,
            "schema": len(MIGRATIONS),
            "created_at": time.time(),
            "sha256": _digest(os.path.join(target, FILE)),
            "snapshots": kept,
            "snapshots_elsewhere": len(copied) - len(kept),
        }
        # The last file: a directory without it is no backup.
        with open(os.path.join(target, _MANIFEST), "x", encoding="utf-8") as file:
            json.dump(form, file, indent=1)
    except (OSError, ValueError, sqlite3.Error) as exc:
        shutil.rmtree(target, ignore_errors=True)
        raise IoError(f"the backup was not made: {exc}") from exc
    return form


def restore(backup: str, state_dir: str) -> dict[str, Any]:
    """Put a backup into an empty or new state directory; its manifest.

    Raises:
        InvalidRequest: It is no backup, or the directory holds something.
        SnapshotCorrupt: The database is not what was saved.
        StateInUse: A daemon has the directory.
    """
    try:
        with open(os.path.join(backup, _MANIFEST), encoding="utf-8") as file:
            form: dict[str, Any] = json.load(file)
    except (OSError, ValueError) as exc:
        hint = "a directory that `ringfence backup DIR` made"
        raise InvalidRequest(
            f"{backup} is not a complete backup: {exc}", field="DIR", hint=hint
        ) from exc
    if form.get("format") != _FORMAT:
        raise InvalidRequest("the backup was made by a newer Ringfence", field="DIR")
    source = os.path.join(backup, FILE)
    if _digest(source) != form["sha256"]:
        raise SnapshotCorrupt(f"{source} is damaged", hint="use another backup")
    _make_empty(state_dir, "--state-dir")
    directory = StateDirectory(state_dir)
    try:
        for name in (*_FILES, _SNAPSHOTS):
            _copy(os.path.join(backup, name), directory.file(name))
        partial = directory.file(f"{FILE}.partial")
        shutil.copyfile(source, partial)
        os.chmod(partial, 0o600)
        os.rename(partial, directory.file(FILE))
        Database(directory.file(FILE)).close()  # brings it up to this version
    except OSError as exc:
        raise IoError(f"the backup was not restored: {exc}") from exc
    finally:
        directory.close()
    return form


def _make_empty(directory: str, field: str) -> None:
    os.makedirs(directory, mode=0o700, exist_ok=True)
    if set(os.listdir(directory)) - {LOCK}:
        raise InvalidRequest(
            f"{directory} is not empty",
            field=field,
            hint="choose a new directory, or move this one",
        )
    os.chmod(directory, 0o700)


def _copy_database(source: str, target: str) -> list[str]:
    """Copy a consistent state while writers continue; return the ids of the snapshots in it."""
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with (
        contextlib.closing(sqlite3.connect(f"file:{quote(source)}?mode=ro", uri=True)) as ours,
        contextlib.closing(sqlite3.connect(target)) as copy,
    ):
        ours.backup(copy)
        copy.execute("PRAGMA journal_mode = DELETE")  # one file, without a log beside it
        if [("ok",)] != copy.execute("PRAGMA quick_check").fetchall():
            raise sqlite3.DatabaseError("the database is damaged")
        found = copy.execute("SELECT id FROM snapshots ORDER BY id").fetchall()
    return [row[0] for row in found]


def _copy_snapshot(state_dir: str, target: str, snapshot_id: str) -> bool:
    """Copy a snapshot; False where none is stored here: another place, or just deleted."""
    place = os.path.join(target, _SNAPSHOTS, snapshot_id)
    try:
        _copy(os.path.join(state_dir, _SNAPSHOTS, snapshot_id), place)
    except (FileNotFoundError, shutil.Error):
        shutil.rmtree(place, ignore_errors=True)
    return os.path.isdir(place)


def _below(target: str, snapshot_id: str) -> list[str]:
    """The ids of the snapshots that a copied one lies over, deleted or not: see `snapshots.catalogue`."""
    try:
        with open(os.path.join(target, _SNAPSHOTS, snapshot_id, "snapshot.json"), "rb") as file:
            lower: list[str] = json.load(file).get("lower", [])
    except (FileNotFoundError, ValueError):
        return []  # a damaged one is copied as it is
    return lower


def _copy(source: str, target: str) -> None:
    """A file or a tree, readable by its owner alone; nothing where there is none."""
    if os.path.isdir(source):
        shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns(*_MADE))
        os.chmod(target, 0o700)
    elif os.path.isfile(source):
        shutil.copyfile(source, target)
        os.chmod(target, 0o600)


def _digest(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as exc:
        raise IoError(f"{path}: {exc.strerror}") from exc
