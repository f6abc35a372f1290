"""Executions, written down before they start and kept when they have ended."""

from __future__ import annotations

from dataclasses import dataclass, fields

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .database import Database, Row


@dataclass(frozen=True)
class ExecutionRecord:
    """An execution: see the table `executions`."""

    id: str
    owner: str
    status: str
    request: str
    result: str
    created_at: float
    ended_at: float | None = None


_NAMES = tuple(each.name for each in fields(ExecutionRecord))


class Executions:
    """The table. Decides nothing."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, record: ExecutionRecord) -> bool:
        """Write it down; False where the id is taken."""
        marks = ", ".join("?" * len(_NAMES))
        sql = f"INSERT OR IGNORE INTO executions ({', '.join(_NAMES)}) VALUES ({marks})"
        return self._database.write(sql, [*vars(record).values()]) == 1

    def begin_again(self, record: ExecutionRecord) -> bool:
        """Put it in place of the same request that never began; False where there is none."""
        sql = f"""UPDATE executions SET {", ".join(f"{name} = ?" for name in _NAMES)}
            WHERE id = ? AND owner = ? AND request = ? AND status = 'failed'
            AND json_extract(result, '$.error.code') = 'exec_not_started'"""
        mine = (record.id, record.owner, record.request)
        return self._database.write(sql, [*vars(record).values(), *mine]) == 1

    def change(self, execution_id: str, **columns: Any) -> None:
        changes = ", ".join(f"{name} = ?" for name in columns)
        sql = f"UPDATE executions SET {changes} WHERE id = ?"
        self._database.write(sql, [*columns.values(), execution_id])

    def get(self, execution_id: str) -> ExecutionRecord | None:
        rows = self._database.rows("SELECT * FROM executions WHERE id = ?", (execution_id,))
        return _read(rows[0]) if rows else None

    def unended(self) -> list[ExecutionRecord]:
        """List the executions without a recorded end, oldest first."""
        sql = "SELECT * FROM executions WHERE ended_at IS NULL ORDER BY id"
        return [_read(row) for row in self._database.rows(sql)]

    def prune(self, before: float) -> int:
        """Forget what ended before that moment (seconds since 1970)."""
        return self._database.write("DELETE FROM executions WHERE ended_at < ?", (before,))


def _read(row: Row) -> ExecutionRecord:
    return ExecutionRecord(**{name: row[name] for name in _NAMES})
