"""Reading and writing the records. Decides nothing: what a record means is for `sessions` to know."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import fields

from ..errors import StateInUse, StorageFull
from .database import IN_MEMORY, Database
from .directory import StateDirectory
from .execs import ExecRecords
from .executions import Executions
from .records import ENDED, Anchor, KeyRecord, SandboxRecord, SessionRecord, SnapshotRecord
from .templates import TemplateRecords

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager
    from typing import Any, TypeVar

    from .database import Row

    R = TypeVar("R", SandboxRecord, SessionRecord, Anchor, KeyRecord, SnapshotRecord)

    Record = SandboxRecord | SessionRecord | KeyRecord | SnapshotRecord

FILE = "state.sqlite3"
_WHOSE = "directory"
_TRACES = ("audit.log", "spool", "snapshots")
logger = logging.getLogger("ringfence.store")


class Store:
    """The records in one state directory, which may be held already; with None they end with this object.

    Raises:
        StateInUse: Another process holds the directory.
        StateTooNew: A newer version wrote it.
    """

    def __init__(self, state_dir: str | StateDirectory | None) -> None:
        self._own = StateDirectory(state_dir) if isinstance(state_dir, str) else None
        self.directory = self._own if isinstance(state_dir, str) else state_dir
        try:
            path = self.directory.file(FILE) if self.directory else IN_MEMORY
            if self.directory:
                _warn_of_loss(self.directory)
            self._database = Database(path)
            try:
                self._check_whose(path)
            except BaseException:
                self._database.close()
                raise
            self.executions = Executions(self._database)
            self.execs = ExecRecords(self._database)
            self.templates = TemplateRecords(self._database)
        except BaseException:
            if self._own:
                self._own.close()
            raise

    def _check_whose(self, path: str) -> None:
        """Remember whose file it is.

        Raises:
            StateInUse: It is a hard link to the file of another directory, whose records it would change.
        """
        if not self.directory or self.setting(_WHOSE) == self.identity:
            return
        if self.setting(_WHOSE) is not None and os.stat(path).st_nlink > 1:
            raise StateInUse(
                f"{path} is a hard link to the state of another directory",
                field="state_dir",
                hint="copy the directory without hard links (cp -a), or use `ringfence backup`",
            )
        with suppress(StorageFull):  # then the next start does
            self.set_setting(_WHOSE, self.identity)

    @property
    def identity(self) -> str:
        """Of the state directory; empty without one."""
        return self.directory.identity if self.directory else ""

    def together(self) -> AbstractContextManager[None]:
        """Return a context manager that writes everything in the block, or nothing."""
        return self._database.transaction()

    # -- sandboxes ----------------------------------------------------------------------------

    def add_sandbox(self, record: SandboxRecord) -> None:
        """Write a sandbox down, before anything of it exists."""
        self._insert("sandboxes", record)

    def change_sandbox(self, sandbox_id: str, **columns: Any) -> None:
        self._update("sandboxes", sandbox_id, columns)

    def sandbox(self, sandbox_id: str) -> SandboxRecord | None:
        """The record of a sandbox, ended or not."""
        return self._one(SandboxRecord, "SELECT * FROM sandboxes WHERE id = ?", sandbox_id)

    def forget_sandbox(self, sandbox_id: str) -> None:
        """Remove a sandbox with its sessions and execs. Preconditions: it has ended."""
        self._database.write("DELETE FROM sandboxes WHERE id = ?", (sandbox_id,))

    def unended_sandboxes(self) -> list[SandboxRecord]:
        """Every sandbox of which something may be left, oldest first."""
        sql = "SELECT * FROM sandboxes WHERE phase != ? ORDER BY id"
        return _read(SandboxRecord, self._database.rows(sql, (ENDED,)))

    # -- sessions -----------------------------------------------------------------------------

    def add_session(self, record: SessionRecord) -> None:
        """Write a session down. Preconditions: its sandbox is."""
        self._insert("sessions", record)

    def change_session(self, session_id: str, **columns: Any) -> None:
        self._update("sessions", session_id, columns)

    def end_session(self, session_id: str, reason: str) -> None:
        """Write down that it is over, unless that is written there already."""
        sql = "UPDATE sessions SET state = 'terminated', reason = ? WHERE id = ? AND state != 'terminated'"
        self._database.write(sql, (reason, session_id))

    def forget_session(self, session_id: str, sandbox_id: str) -> None:
        """It never came to be, and the sandbox was nobody's."""
        with self.together():
            self._database.write("DELETE FROM sessions WHERE id = ?", (session_id,))
            self.change_sandbox(sandbox_id, owner="")

    def session(self, session_id: str) -> SessionRecord | None:
        """The record of a session, ended or not."""
        return self._one(SessionRecord, "SELECT * FROM sessions WHERE id = ?", session_id)

    def last_session_of(self, sandbox_id: str) -> SessionRecord | None:
        """The newest session on a sandbox, ended or not."""
        sql = "SELECT * FROM sessions WHERE sandbox = ? ORDER BY id DESC LIMIT 1"
        return self._one(SessionRecord, sql, sandbox_id)

    def sessions(
        self, *, owner: str | None = None, states: tuple[str, ...] = ()
    ) -> list[SessionRecord]:
        """Sessions of that owner and in those states, oldest first."""
        wanted, values = ["1"], []
        if owner is not None:
            wanted.append("owner = ?")
            values.append(owner)
        if states:
            wanted.append(f"state IN ({', '.join('?' * len(states))})")
            values.extend(states)
        sql = f"SELECT * FROM sessions WHERE {' AND '.join(wanted)} ORDER BY id"
        return _read(SessionRecord, self._database.rows(sql, values))

    def ended_sessions(self, owner: str | None, after: str, most: int) -> list[SessionRecord]:
        """At most so many that are over, oldest first, from behind the session `after`."""
        mine, values = ("owner = ? AND ", [owner]) if owner is not None else ("", [])
        sql = f"SELECT * FROM sessions WHERE {mine}state = 'terminated' AND id > ? ORDER BY id LIMIT ?"
        return _read(SessionRecord, self._database.rows(sql, [*values, after, most]))

    def session_under_key(self, owner: str, key: str) -> SessionRecord | None:
        """The newest session that this client asked for under `key`, ended or not."""
        sql = "SELECT * FROM sessions WHERE owner = ? AND key = ? ORDER BY id DESC LIMIT 1"
        found = _read(SessionRecord, self._database.rows(sql, (owner, key)))
        return found[0] if found else None

    # -- keys ---------------------------------------------------------------------------------

    def add_key(self, record: KeyRecord) -> None:
        self._insert("keys", record)

    def every_key(self) -> list[KeyRecord]:
        """Every key, oldest first."""
        rows = self._database.rows("SELECT * FROM keys ORDER BY created_at, id")
        return _read(KeyRecord, rows)

    def change_key(self, key_id: str, **columns: Any) -> None:
        self._update("keys", key_id, columns)

    def remove_key(self, key_id: str) -> None:
        """Let it, and the tokens that were made with it, open nothing more."""
        self._database.write("DELETE FROM keys WHERE id = ? OR maker = ?", (key_id, key_id))

    def note_keys(self, used: Mapping[str, float], now: float) -> None:
        """Remember when keys were used last, and forget tokens that have expired."""
        with self.together():
            for key_id, used_at in used.items():
                self.change_key(key_id, used_at=used_at)
            self._database.write(
                "DELETE FROM keys WHERE sandbox IS NOT NULL AND expires_at < ?", (now,)
            )

    # -- snapshots ----------------------------------------------------------------------------

    def add_snapshot(self, record: SnapshotRecord) -> None:
        self._insert("snapshots", record)

    def snapshot(self, snapshot_id: str) -> SnapshotRecord | None:
        return self._one(SnapshotRecord, "SELECT * FROM snapshots WHERE id = ?", snapshot_id)

    def snapshots(self) -> list[SnapshotRecord]:
        return _read(SnapshotRecord, self._database.rows("SELECT * FROM snapshots ORDER BY id"))

    def remove_snapshot(self, snapshot_id: str) -> None:
        """Forget whose it was."""
        self._database.write("DELETE FROM snapshots WHERE id = ?", (snapshot_id,))

    # -- the rest -----------------------------------------------------------------------------

    def set_default(self, owner: str, sandbox_id: str | None) -> None:
        """Remember a client's default sandbox, or forget it."""
        if sandbox_id is None:
            self._database.write("DELETE FROM defaults WHERE owner = ?", (owner,))
            return
        sql = "INSERT INTO defaults VALUES (?, ?) ON CONFLICT DO UPDATE SET sandbox = excluded.sandbox"
        self._database.write(sql, (owner, sandbox_id))

    def default(self, owner: str) -> str | None:
        found = self._database.rows("SELECT sandbox FROM defaults WHERE owner = ?", (owner,))
        return found[0][0] if found else None

    def set_setting(self, name: str, value: str) -> None:
        sql = "INSERT INTO settings VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value"
        self._database.write(sql, (name, value))

    def setting(self, name: str) -> str | None:
        found = self._database.rows("SELECT value FROM settings WHERE name = ?", (name,))
        return found[0]["value"] if found else None

    def add_anchor(self, anchor: Anchor) -> None:
        """Remember a process whose end ends sandboxes."""
        row = vars(anchor)
        marks = ", ".join("?" * len(row))
        self._database.write(
            f"INSERT OR IGNORE INTO anchors ({', '.join(row)}) VALUES ({marks})", [*row.values()]
        )

    def anchors(self) -> list[Anchor]:
        return _read(Anchor, self._database.rows("SELECT * FROM anchors"))

    def forget_anchor(self, anchor: Anchor) -> None:
        """That process is gone."""
        sql = "DELETE FROM anchors WHERE backend = ? AND pid = ? AND started = ? AND boot = ?"
        self._database.write(sql, (anchor.backend, anchor.pid, anchor.started, anchor.boot))

    def first_ahead_s(self, boot: str, ahead_s: float) -> float:
        """How far the clock on the wall was ahead when this boot was first heard of; now, if it is."""
        rows = self._database.rows("SELECT ahead_s FROM clocks WHERE boot = ?", (boot,))
        if rows:
            return float(rows[0]["ahead_s"])
        with self.together():
            self._database.write("DELETE FROM clocks")
            self._database.write("INSERT INTO clocks VALUES (?, ?)", (boot, ahead_s))
        return ahead_s

    def prune(self, before: float) -> int:
        """Forget what ended before that moment (seconds since 1970), sessions included."""
        sql = "DELETE FROM sandboxes WHERE phase = ? AND ended_at < ?"
        return self._database.write(sql, (ENDED, before))

    def check(self) -> None:
        """Write something that changes nothing.

        Raises:
            ResourceExhausted: The disk is full.
            IoError: The directory is no longer where it was.
        """
        if self.directory:
            self.directory.check_place()
            self.directory.check_room()
        found = self._database.rows("PRAGMA user_version")[0][0]
        self._database.write(f"PRAGMA user_version = {found}")  # always a page of the log

    def checkpoint(self) -> None:
        """Have the database's file hold all that was written, as far as nobody is in the way."""
        self._database.checkpoint()

    def close(self) -> None:
        """Give the directory back, if it was taken here; idempotent."""
        self._database.close()
        if self._own:
            self._own.close()

    # -- how ----------------------------------------------------------------------------------

    def _insert(self, table: str, record: Record) -> None:
        row = vars(record)
        marks = ", ".join("?" * len(row))
        self._database.write(
            f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", [*row.values()]
        )

    def _update(self, table: str, key: str, columns: dict[str, Any]) -> None:
        changes = ", ".join(f"{name} = ?" for name in columns)
        self._database.write(f"UPDATE {table} SET {changes} WHERE id = ?", [*columns.values(), key])

    def _one(self, cls: type[R], sql: str, value: str) -> R | None:
        found = _read(cls, self._database.rows(sql, (value,)))
        return found[0] if found else None


def _warn_of_loss(directory: StateDirectory) -> None:
    """Say so where a directory was in use, and its database is not there."""
    if os.path.exists(directory.file(FILE)):
        return
    left = [name for name in _TRACES if os.path.exists(directory.file(name))]
    if left:
        logger.warning(
            "%s has %s and no %s: keys, records and owners of snapshots are lost;"
            " stop, and `ringfence restore` a backup into a new directory",
            directory.path,
            " and ".join(left),
            FILE,
        )


def _read(cls: type[R], rows: list[Row]) -> list[R]:
    names = [each.name for each in fields(cls)]
    return [cls(**{name: row[name] for name in names}) for row in rows]
