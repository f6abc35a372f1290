"""Templates of clients: names, builds, and the layers that steps made. Decides nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    from .database import Database

    R = TypeVar("R", "TemplateRecord", "BuildRecord", "LayerRecord")

RESERVED, WAITING, BUILDING, READY, FAILED = "reserved", "waiting", "building", "ready", "failed"
_JSON = ("tags", "layers")


@dataclass(frozen=True)
class TemplateRecord:
    """A template: see the table `templates`."""

    id: str
    owner: str
    name: str
    public: int
    tags: dict[str, str]
    created_at: float
    updated_at: float


@dataclass(frozen=True)
class BuildRecord:
    """A build: see the table `template_builds`."""

    id: str
    template: str
    status: str
    request: str
    tags: list[str]
    created_at: float
    tries: int = 0
    step: int = 0
    error: str = ""
    layers: list[str] = field(default_factory=list)
    spec: str = ""
    size_bytes: int = 0
    ended_at: float | None = None


@dataclass(frozen=True)
class LayerRecord:
    """The result of a step: see the table `template_layers`."""

    owner: str
    key: str
    snapshot: str
    size_bytes: int
    used_at: float


class TemplateRecords:
    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, record: TemplateRecord | BuildRecord | LayerRecord) -> None:
        """Write a record down; a layer replaces the one of the same key."""
        table = {TemplateRecord: "templates", BuildRecord: "template_builds"}
        row = _row(vars(record))
        sql = f"INSERT OR REPLACE INTO {table.get(type(record), 'template_layers')}"
        if not isinstance(record, LayerRecord):
            sql = sql.replace("INSERT OR REPLACE", "INSERT")
        marks = ", ".join("?" * len(row))
        self._database.write(f"{sql} ({', '.join(row)}) VALUES ({marks})", [*row.values()])

    def change(self, template_id: str, **columns: Any) -> None:
        self._update("templates", template_id, columns)

    def change_build(self, build_id: str, **columns: Any) -> None:
        self._update("template_builds", build_id, columns)

    def every(self, owner: str | None = None) -> list[TemplateRecord]:
        """List templates, of one owner or all, oldest first."""
        where, values = ("WHERE owner = ?", [owner]) if owner is not None else ("", [])
        return self._read(TemplateRecord, f"SELECT * FROM templates {where} ORDER BY id", *values)

    def get(self, template_id: str) -> TemplateRecord | None:
        found = self._read(TemplateRecord, "SELECT * FROM templates WHERE id = ?", template_id)
        return found[0] if found else None

    def named(self, name: str) -> list[TemplateRecord]:
        """List the templates of this name, of any owner, oldest first."""
        sql = "SELECT * FROM templates WHERE name = ? ORDER BY id"
        return self._read(TemplateRecord, sql, name)

    def remove(self, template_id: str) -> None:
        self._database.write("DELETE FROM templates WHERE id = ?", (template_id,))

    def build(self, build_id: str) -> BuildRecord | None:
        sql = "SELECT * FROM template_builds WHERE id = ?"
        found = self._read(BuildRecord, sql, build_id)
        return found[0] if found else None

    def builds(self, template_id: str) -> list[BuildRecord]:
        """List the builds of a template, oldest first."""
        sql = "SELECT * FROM template_builds WHERE template = ? ORDER BY created_at, id"
        return self._read(BuildRecord, sql, template_id)

    def unended(self) -> list[BuildRecord]:
        """List the builds that have been asked for and have not ended, oldest first."""
        sql = "SELECT * FROM template_builds WHERE status IN (?, ?) ORDER BY created_at, id"
        return self._read(BuildRecord, sql, WAITING, BUILDING)

    def remove_build(self, build_id: str) -> None:
        self._database.write("DELETE FROM template_builds WHERE id = ?", (build_id,))

    def counts(self) -> dict[str, int]:
        sql = "SELECT status, count(*) AS n FROM template_builds GROUP BY status"
        return {row["status"]: row["n"] for row in self._database.rows(sql)}

    def layer(self, owner: str, key: str) -> LayerRecord | None:
        sql = "SELECT * FROM template_layers WHERE owner = ? AND key = ?"
        found = self._read(LayerRecord, sql, owner, key)
        return found[0] if found else None

    def layers(self, owner: str | None = None) -> list[LayerRecord]:
        """List layers, of one owner or all, the longest unused first."""
        where, values = ("WHERE owner = ?", [owner]) if owner is not None else ("", [])
        sql = f"SELECT * FROM template_layers {where} ORDER BY used_at"
        return self._read(LayerRecord, sql, *values)

    def touch_layer(self, owner: str, key: str, now: float) -> None:
        sql = "UPDATE template_layers SET used_at = ? WHERE owner = ? AND key = ?"
        self._database.write(sql, (now, owner, key))

    def remove_layer(self, snapshot: str) -> None:
        self._database.write("DELETE FROM template_layers WHERE snapshot = ?", (snapshot,))

    def _update(self, table: str, key: str, columns: dict[str, Any]) -> None:
        row = _row(columns)
        changes = ", ".join(f"{name} = ?" for name in row)
        self._database.write(f"UPDATE {table} SET {changes} WHERE id = ?", [*row.values(), key])

    def _read(self, cls: type[R], sql: str, *values: str) -> list[R]:
        names = [each.name for each in fields(cls)]
        rows = self._database.rows(sql, values)
        return [cls(**{name: _value(name, row[name]) for name in names}) for row in rows]


def _row(columns: dict[str, Any]) -> dict[str, Any]:
    return {k: json.dumps(v) if k in _JSON else v for k, v in columns.items()}


def _value(name: str, value: Any) -> Any:
    return json.loads(value) if name in _JSON else value
