"""An SQLite connection in write-ahead mode, shared by threads."""

from __future__ import annotations

import os
import sqlite3
import threading

from ..errors import IoError, LifecycleError, RingfenceError, StorageFull
from . import schema

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from typing import Any

    Row = sqlite3.Row

IN_MEMORY = ":memory:"
_NO_ROOM = (28, 122)  # ENOSPC, EDQUOT


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
        self._transaction = _Transaction(self)
        try:
            if path != IN_MEMORY:
                _make_private(path)
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
        except sqlite3.Error as exc:
            raise _error(exc, path) from exc

    def _prepare(self) -> None:
        execute = self._connection.execute
        execute("PRAGMA journal_mode = WAL")
        # A killed process loses nothing that was committed. After a power cut the last moments may
        # be missing, but then so are the sandboxes that they were about.
        execute("PRAGMA synchronous = NORMAL")
        execute("PRAGMA foreign_keys = ON")
        schema.migrate(self._connection)

    def transaction(self) -> AbstractContextManager[None]:
        """All that is written in the block, or nothing of it. Blocks of one thread may nest.

        Raises:
            StorageFull: The disk is full.
        """
        return self._transaction

    def begin(self) -> None:
        self._lock.acquire()
        try:
            self._check_owner()
            if self._depth == 0:
                self._connection.execute("BEGIN IMMEDIATE")
        except BaseException:
            self._lock.release()
            raise
        self._depth += 1

    def end(self, *, whole: bool) -> None:
        self._depth -= 1
        try:
            if self._depth == 0 and whole:
                self._connection.execute("COMMIT")
        except BaseException:
            whole = False
            raise
        finally:
            try:
                if self._depth == 0 and not whole:
                    self._roll_back()
            finally:
                self._lock.release()

    def _roll_back(self) -> None:
        # A full disk has rolled back by itself: sqlite.org/lang_transaction.html 3.
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def write(self, sql: str, values: Sequence[Any] = ()) -> int:
        """Run a statement, in its own transaction unless one is open; return the number of rows changed."""
        with self._lock:
            self._check_owner()
            try:
                # SQLite runs each statement outside a transaction in one of its own.
                return self._connection.execute(sql, values).rowcount
            except sqlite3.Error as exc:
                raise _error(exc, self.path) from exc

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        with self._lock:
            self._check_owner()
            try:
                return self._connection.execute(sql, values).fetchall()
            except sqlite3.Error as exc:
                raise _error(exc, self.path) from exc

    def checkpoint(self) -> None:
        """Move what was written from the log into the file, without waiting for anybody.

        SQLite does so at every thousandth page; a copy of the file alone lacked what a quiet server had
        written in days. A connection of its own: nobody waits for the disk.
        """
        if self.path == IN_MEMORY:
            return
        try:
            other = sqlite3.connect(self.path, isolation_level=None)
            try:
                other.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            finally:
                other.close()
        except sqlite3.Error as exc:
            raise _error(exc, self.path) from exc

    def close(self) -> None:
        with self._lock:
            if self._owner == os.getpid():
                self._connection.close()

    def _check_owner(self) -> None:
        # A connection that crossed a fork corrupts the file: sqlite.org/howtocorrupt.html 2.6.
        if self._owner != os.getpid():
            raise LifecycleError("the state cannot be used after fork()")


class _Transaction:
    """A block that is entered anew each time: the database itself knows how deep it is in."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def __enter__(self) -> None:
        try:
            self._database.begin()
        except sqlite3.Error as exc:
            raise _error(exc, self._database.path) from exc

    def __exit__(self, kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            self._database.end(whole=kind is None)
        except sqlite3.Error as exc:
            error = exc
        if isinstance(error, sqlite3.Error):
            raise _error(error, self._database.path) from error


def _make_private(path: str) -> None:
    """Make the file before SQLite does, with its umask; `-wal` and `-shm` get the mode of this one."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        if exc.errno in _NO_ROOM:
            raise _no_room(path) from exc
        raise IoError(f"state in {path}: {exc.strerror}") from exc
    try:
        os.fchmod(fd, 0o600)
    finally:
        os.close(fd)


def _no_room(path: str) -> StorageFull:
    return StorageFull(f"no space left for state in {path}", hint="free space or inodes there")


def _error(exc: sqlite3.Error, path: str) -> RingfenceError:
    if _is_full(exc, path):
        return _no_room(path)
    if isinstance(exc, sqlite3.ProgrammingError) and "closed" in str(exc):
        return LifecycleError("the state is closed")
    hint = ""
    if getattr(exc, "sqlite_errorcode", 0) & 0xFF in (
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
    ):
        hint = (
            "restore a backup into a new directory (`ringfence restore`), or move the files"
            f" {os.path.basename(path)}* aside: a new server then has no keys and no records, and"
            " snapshots have no owner"
        )
    return IoError(f"state in {path}: {exc}", hint=hint)


def _is_full(exc: sqlite3.Error, path: str) -> bool:
    """Return whether the disk is full. Without inodes or room for its shared memory SQLite reports
    other errors.
    """
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
