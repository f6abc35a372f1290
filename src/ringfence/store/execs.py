"""Execs, written down before they begin and kept for a while after their end."""

from __future__ import annotations

from dataclasses import dataclass, fields

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .database import Database, Row


@dataclass(frozen=True)
class ExecRecord:
    """An exec: see the table `execs`."""

    id: str
    sandbox: str
    state: str
    view: str
    created_at: float
    ended_at: float | None = None


_NAMES = tuple(each.name for each in fields(ExecRecord))
# Update in place: REPLACE would delete the row and its index entries first.
_PUT = f"""INSERT INTO execs ({", ".join(_NAMES)}) VALUES ({", ".join("?" * len(_NAMES))})
    ON CONFLICT DO UPDATE SET {", ".join(f"{name} = excluded.{name}" for name in _NAMES[2:])}"""


class ExecRecords:
    """The table. Decides nothing."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, record: ExecRecord) -> None:
        """Write it down, in place of what was written before under its id."""
        self._database.write(_PUT, [getattr(record, name) for name in _NAMES])

    def add_under_key(self, record: ExecRecord, key: str, request: str) -> bool:
        """Write a new one down with its key; False, and nothing written, where the key is taken."""
        sql = "INSERT OR IGNORE INTO exec_keys VALUES (?, ?, ?, ?)"
        with self._database.transaction():
            if not self._database.write(sql, (record.sandbox, key, record.id, request)):
                return False
            self.put(record)
        return True

    def under_key(self, sandbox_id: str, key: str) -> tuple[str, str] | None:
        """The id of the exec of that key, and the digest of what was asked for."""
        sql = "SELECT exec, request FROM exec_keys WHERE sandbox = ? AND key = ?"
        found = self._database.rows(sql, (sandbox_id, key))
        return (found[0]["exec"], found[0]["request"]) if found else None

    def get(self, exec_id: str) -> ExecRecord | None:
        found = self._database.rows("SELECT * FROM execs WHERE id = ?", (exec_id,))
        return _read(found[0]) if found else None

    def of_sandbox(self, sandbox_id: str, after: str, limit: int) -> list[ExecRecord]:
        """List the execs of a sandbox with ids beyond `after`, oldest first."""
        sql = "SELECT * FROM execs WHERE sandbox = ? AND id > ? ORDER BY id LIMIT ?"
        return [_read(row) for row in self._database.rows(sql, (sandbox_id, after, limit))]

    def unended(self) -> list[ExecRecord]:
        """List the execs without a recorded end, oldest first."""
        sql = "SELECT * FROM execs WHERE ended_at IS NULL ORDER BY id"
        return [_read(row) for row in self._database.rows(sql)]

    def ended(
        self, after: tuple[float, str] = (0.0, ""), most: int = 100
    ) -> list[tuple[str, str, float]]:
        """Id, sandbox and end of others, the one that ended first at the start.

        Args:
            after: End and id of the last one that is known.
        """
        sql = """SELECT id, sandbox, ended_at FROM execs
            WHERE ended_at IS NOT NULL AND (ended_at, id) > (?, ?) ORDER BY ended_at, id LIMIT ?"""
        rows = self._database.rows(sql, (*after, most))
        return [(row["id"], row["sandbox"], row["ended_at"]) for row in rows]

    def count_ended(self) -> int:
        sql = "SELECT count(*) FROM execs WHERE ended_at IS NOT NULL"
        return int(self._database.rows(sql)[0][0])

    def count_of_sandbox(self, sandbox_id: str) -> int:
        """How many of one sandbox are written down."""
        sql = "SELECT count(*) FROM execs WHERE sandbox = ?"
        return int(self._database.rows(sql, (sandbox_id,))[0][0])

    def forget_key(self, exec_id: str) -> None:
        """Let whoever asks again under its key start another one."""
        self._database.write("DELETE FROM exec_keys WHERE exec = ?", (exec_id,))

    def remove(self, exec_id: str) -> None:
        """Forget it, and the key that it was asked for under."""
        with self._database.transaction():
            self._database.write("DELETE FROM execs WHERE id = ?", (exec_id,))
            self._database.write("DELETE FROM exec_keys WHERE exec = ?", (exec_id,))


def _read(row: Row) -> ExecRecord:
    return ExecRecord(**{name: row[name] for name in _NAMES})
