"""One SQLite connection, shared by threads, in write-ahead mode."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading

from ..errors import IoError, LifecycleError, RingfenceError, StorageFull
from . import schema

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    Row = sqlite3.Row

IN_MEMORY = ":memory:"


class Database:
    """A migrated database file; `IN_MEMORY` for one that ends with this object.

    Raises:
        StateTooNew: A newer version wrote it.
        IoError: It is damaged or cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock, self._owner = threading.RLock(), os.getpid()
        self._depth = 0
        with _translated(path):
            # Autocommit: transactions are ours to begin, in `transaction`.
            self._connection = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, timeout=10.0
            )
            self._connection.row_factory = sqlite3.Row
            try:
                self._prepare()
            except BaseException:
                self._connection.close()
                raise

    def _prepare(self) -> None:
        execute = self._connection.execute
        execute("PRAGMA journal_mode = WAL")
        # A killed process loses nothing that was committed. After a power cut the last moments may
        # be missing, but then so are the sandboxes that they were about.
        execute("PRAGMA synchronous = NORMAL")
        execute("PRAGMA foreign_keys = ON")
        schema.migrate(self._connection)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is written in the block, or nothing of it. Blocks of one thread may nest.

        Raises:
            StorageFull: The disk is full.
        """
        with self._lock, _translated(self.path):
            self._check_owner()
            if self._depth == 0:
                self._connection.execute("BEGIN IMMEDIATE")
            self._depth += 1
            try:
                yield
            except BaseException:
                self._depth -= 1
                if self._depth == 0:
                    self._roll_back()
                raise
            self._depth -= 1
            if self._depth == 0:
                try:
                    self._connection.execute("COMMIT")
                except BaseException:
                    self._roll_back()
                    raise

    def _roll_back(self) -> None:
        # A full disk has rolled back by itself: sqlite.org/lang_transaction.html 3.
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def write(self, sql: str, values: Sequence[Any] = ()) -> int:
        """One statement, in a transaction of its own unless one is open; the number of rows changed."""
        with self.transaction():
            return self._connection.execute(sql, values).rowcount

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        """Everything a query finds."""
        with self._lock, _translated(self.path):
            self._check_owner()
            return self._connection.execute(sql, values).fetchall()

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._owner == os.getpid():
                self._connection.close()

    def _check_owner(self) -> None:
        # A connection that crossed a fork corrupts the file: sqlite.org/howtocorrupt.html 2.6.
        if self._owner != os.getpid():
            raise LifecycleError("the state belongs to the process that opened it")


@contextlib.contextmanager
def _translated(path: str) -> Iterator[None]:
    try:
        yield
    except RingfenceError:
        raise
    except sqlite3.Error as exc:
        if _is_full(exc, path):
            raise StorageFull(
                f"no room to write down state in {path}", hint="free space or inodes there"
            ) from exc
        if isinstance(exc, sqlite3.ProgrammingError) and "closed" in str(exc):
            raise LifecycleError("the state is closed") from exc
        raise IoError(f"state in {path}: {exc}") from exc


def _is_full(exc: sqlite3.Error, path: str) -> bool:
    """Whether there is no room. Without inodes or room for its shared memory SQLite says other things."""
    code = getattr(exc, "sqlite_errorcode", 0) & 0xFF
    if code not in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
        return False
    if code == sqlite3.SQLITE_FULL:
        return True
    try:
        room = os.statvfs(os.path.dirname(path) or ".")
    except OSError:
        return False
    return room.f_bavail == 0 or (room.f_files > 0 and room.f_favail == 0)
