"""One directory, one holder, one file that only ever grows newer; on real SQLite and real disks."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
from pathlib import Path

import pytest
from tests.features import require
from tests.native.callers import Caller
from tests.native.outside import until

from ringfence.errors import IoError, LifecycleError, StateInUse, StateTooNew
from ringfence.store import schema
from ringfence.store.database import Database
from ringfence.store.directory import StateDirectory
from ringfence.store.records import (
    ENDED,
    LIVE,
    PLANNED,
    Anchor,
    KeyRecord,
    SandboxRecord,
    SessionRecord,
)
from ringfence.store.store import FILE, Store

pytestmark = pytest.mark.anyone


def sandbox(name: str = "sbx-1", owner: str = "ann", **other: object) -> SandboxRecord:
    given = {
        "backend": "unconfined",
        "phase": PLANNED,
        "spec": "{}",
        "created_at": 1.0,
        "boot": "b",
    }
    return SandboxRecord(name, owner, **{**given, **other})  # type: ignore[arg-type]


def session(name: str, of: str, owner: str = "ann", **other: object) -> SessionRecord:
    given = {
        "backend": "unconfined",
        "state": "active",
        "metadata": "{}",
        "timeouts": "{}",
        "created_at": 1.0,
        "boot": "b",
        "active_ns": 1,
        "active_at": 1.0,
    }
    return SessionRecord(name, of, owner, **{**given, **other})  # type: ignore[arg-type]


# -- records -------------------------------------------------------------------------------------


def test_what_is_written_is_read_after_a_restart(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "state"))
    store.add_sandbox(sandbox())
    store.change_sandbox("sbx-1", phase=LIVE, expires_ns=7)
    store.add_session(session("sess-1", "sbx-1"))
    store.set_default("ann", "sbx-1")
    store.add_anchor(Anchor("native", 5, 6, "b"))
    store.close()

    again = Store(str(tmp_path / "state"))

    assert sandbox(phase=LIVE, expires_ns=7) == again.sandbox("sbx-1")
    assert [session("sess-1", "sbx-1")] == again.sessions(owner="ann", states=("active",))
    assert [] == again.sessions(owner="bob")
    assert session("sess-1", "sbx-1") == again.last_session_of("sbx-1")
    assert "sbx-1" == again.default("ann")
    assert [Anchor("native", 5, 6, "b")] == again.anchors()
    again.close()


def test_together_is_whole_or_not_at_all(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "state"))

    def half() -> None:
        with store.together():
            store.add_sandbox(sandbox())
            with store.together():
                store.add_sandbox(sandbox("sbx-2"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        half()

    assert [] == store.unended_sandboxes()
    with store.together():
        store.add_sandbox(sandbox())
    assert [sandbox()] == store.unended_sandboxes()
    store.close()


def test_what_ended_is_forgotten_with_its_sessions(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "state"))
    store.add_sandbox(sandbox("sbx-old", phase=ENDED, ended_at=10.0))
    store.add_sandbox(sandbox("sbx-new", phase=ENDED, ended_at=30.0))
    store.add_sandbox(sandbox("sbx-live", phase=LIVE))
    store.add_session(session("sess-old", "sbx-old", state="terminated"))
    store.set_default("ann", "sbx-old")

    assert 0 == store.prune(10.0)  # it ended then, and not before
    assert store.sandbox("sbx-old")
    assert 1 == store.prune(20.0)

    assert store.sandbox("sbx-old") is None
    assert store.session("sess-old") is None
    assert store.default("ann") is None
    assert store.sandbox("sbx-new")
    assert store.sandbox("sbx-live")
    store.close()


def test_many_threads_write_at_once(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "state"))

    def write(number: int) -> None:
        for turn in range(20):
            with store.together():
                store.add_sandbox(sandbox(f"sbx-{number}-{turn}"))
                store.add_session(session(f"sess-{number}-{turn}", f"sbx-{number}-{turn}"))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert 160 == len(store.unended_sandboxes()) == len(store.sessions())
    store.close()


# -- one holder ----------------------------------------------------------------------------------


def test_a_second_holder_in_this_process_is_refused(tmp_path: Path) -> None:
    first = StateDirectory(str(tmp_path / "state"))

    with pytest.raises(StateInUse) as refusal:
        StateDirectory(str(tmp_path / "state"))

    assert str(os.getpid()) in str(refusal.value)
    assert refusal.value.retryable
    first.close()
    StateDirectory(str(tmp_path / "state")).close()


_HOLD = """
from ringfence.store.store import Store
store = Store(sys.argv[1])
if "fork" in sys.argv:
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    say(child)
else:
    say(os.getpid())
listen()
"""


def test_another_process_holds_it_until_it_is_killed(tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    with Caller(_HOLD, path) as caller:
        pid = caller.hear()
        with pytest.raises(StateInUse) as refusal:
            Store(path)
        assert str(pid) in str(refusal.value)

        caller.kill(signal.SIGKILL)

        Store(path).close()


def test_a_forked_child_does_not_go_on_holding_it(tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    with Caller(_HOLD, path, "fork") as caller:
        child = caller.hear()
        try:
            caller.kill(signal.SIGKILL)
            os.kill(child, 0)  # it lives

            assert until(lambda: is_free(path))  # it may not have begun yet
        finally:
            os.kill(child, signal.SIGKILL)


def is_free(path: str) -> bool:
    try:
        Store(path).close()
    except StateInUse:
        return False
    return True


def test_a_forked_child_cannot_use_it(tmp_path: Path) -> None:
    database = Database(str(tmp_path / FILE))
    database._owner -= 1  # as if we were the child

    with pytest.raises(LifecycleError):
        database.rows("SELECT 1")
    with pytest.raises(LifecycleError), database.transaction():
        pytest.fail("it began")

    database._owner += 1
    with database.transaction():  # and its lock was let go of
        assert database.rows("SELECT 1")
    database.close()


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o770, 0o720, 0o702, 0o1777])
def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    """Be it one bit of the group, or one of all the others."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(mode)

    with pytest.raises(IoError) as refusal:
        StateDirectory(str(tmp_path / "state"))

    assert "others" in str(refusal.value)
    assert [] == os.listdir(tmp_path / "state")


@pytest.mark.parametrize("mode", [0o755, 0o701, 0o700])
def test_a_directory_of_something_else_keeps_its_modes(tmp_path: Path, mode: int) -> None:
    """`--state-dir /etc` as root would else lock all others out of it."""
    place = tmp_path / "etc"
    (place / "inner").mkdir(parents=True)
    place.chmod(mode)
    (place / "inner").chmod(0o755)
    (place / "passwd").write_text("")
    if 0o755 == mode:
        (place / "lock").symlink_to("inner")  # as /var has
    (place / "passwd").chmod(0o644)

    if 0o700 == mode:
        StateDirectory(str(place)).close()
    else:
        with pytest.raises(IoError, match="not a server's"):
            StateDirectory(str(place))

    found = [each.stat().st_mode & 0o777 for each in (place, place / "inner", place / "passwd")]
    assert [mode, 0o755, 0o644] == found
    assert (place / "lock").is_file() == (0o700 == mode)


def test_a_new_file_system_of_its_own_is_narrowed(tmp_path: Path) -> None:
    (tmp_path / "state" / "lost+found").mkdir(parents=True)
    (tmp_path / "state").chmod(0o755)

    StateDirectory(str(tmp_path / "state")).close()

    assert 0o700 == (tmp_path / "state").stat().st_mode & 0o777


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o700])
def test_a_directory_that_others_may_only_read_is_narrowed(tmp_path: Path, mode: int) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(mode)

    Store(str(tmp_path / "state")).close()

    assert 0o700 == (tmp_path / "state").stat().st_mode & 0o777


def test_a_new_directory_is_private(tmp_path: Path) -> None:
    Store(str(tmp_path / "deep" / "state")).close()

    assert 0o700 == (tmp_path / "deep" / "state").stat().st_mode & 0o777


# -- versions ------------------------------------------------------------------------------------


def _version(path: Path) -> int:
    connection = sqlite3.connect(path)
    try:
        found: int = connection.execute("PRAGMA user_version").fetchone()[0]
        return found
    finally:
        connection.close()


def test_a_newer_file_is_refused_and_not_touched(tmp_path: Path) -> None:
    Store(str(tmp_path)).close()
    newer = len(schema.MIGRATIONS) + 1
    connection = sqlite3.connect(tmp_path / FILE)
    connection.execute(f"PRAGMA user_version = {newer}")
    connection.execute("CREATE TABLE of_the_future (x)")
    connection.commit()
    connection.close()

    with pytest.raises(StateTooNew) as refusal:
        Store(str(tmp_path))

    assert str(newer) in str(refusal.value)
    assert newer == _version(tmp_path / FILE)
    StateDirectory(str(tmp_path)).close()  # nobody holds it


def test_a_file_of_another_program_is_refused(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / FILE)
    connection.execute("CREATE TABLE theirs (x)")
    connection.commit()
    connection.close()

    with pytest.raises(StateTooNew):
        Store(str(tmp_path))


def test_an_older_file_becomes_a_newer_one_with_all_that_is_in_it(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.add_sandbox(sandbox())
    store.close()
    connection = sqlite3.connect(tmp_path / FILE)
    steps = (*schema.MIGRATIONS, "ALTER TABLE sandboxes ADD COLUMN note TEXT NOT NULL DEFAULT '';")

    assert len(steps) - 1 == schema.migrate(connection, steps)

    assert [("sbx-1", "")] == connection.execute("SELECT id, note FROM sandboxes").fetchall()
    connection.close()
    assert len(steps) == _version(tmp_path / FILE)
    with pytest.raises(StateTooNew):
        Store(str(tmp_path))  # no way back


def test_keys_of_an_earlier_version_are_kept_whole(tmp_path: Path) -> None:
    """Their table is made anew, because the check of a column cannot be changed."""
    before = next(i for i, step in enumerate(schema.MIGRATIONS) if "CREATE TABLE new_keys" in step)
    kept = ("key-1", b"digest", "ann", "sandbox", "sbx-1", "of ann", 5.0)
    connection = sqlite3.connect(tmp_path / FILE)
    schema.migrate(connection, schema.MIGRATIONS[:before])
    with connection:
        connection.execute(
            "INSERT INTO sandboxes (id, owner, backend, phase, spec, created_at, boot)"
            " VALUES ('sbx-1', 'ann', 'native', 'live', '{}', 1.0, 'boot')"
        )
        connection.execute(
            "INSERT INTO keys (id, digest, owner, scope, sandbox, name, created_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            kept,
        )
    connection.close()
    store = Store(str(tmp_path))

    assert [KeyRecord(*kept[:4], 5.0, "sbx-1", "of ann")] == store.every_key()
    store.forget_sandbox("sbx-1")
    assert [] == store.every_key()
    store.close()


def test_a_migration_that_fails_changes_nothing(tmp_path: Path) -> None:
    Store(str(tmp_path)).close()
    before = _version(tmp_path / FILE)
    connection = sqlite3.connect(tmp_path / FILE)
    broken = (*schema.MIGRATIONS, "CREATE TABLE half (x); CREATE TABLE half (x);")

    with pytest.raises(sqlite3.Error):
        schema.migrate(connection, broken)
    connection.close()

    assert before == _version(tmp_path / FILE)
    Store(str(tmp_path)).close()
    connection = sqlite3.connect(tmp_path / FILE)
    assert [] == connection.execute("SELECT * FROM sqlite_master WHERE name = 'half'").fetchall()
    connection.close()


def test_a_damaged_file_says_so(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"not a database, but long enough to look at" * 100)

    with pytest.raises(IoError):
        Store(str(tmp_path))


@pytest.mark.parametrize("when", ["begun", "committed"])
def test_killed_while_writing(tmp_path: Path, when: str) -> None:
    """Nothing that was committed is lost, nothing that was not is there."""
    code = """
from ringfence.store.store import Store
from ringfence.store.records import SandboxRecord
store = Store(sys.argv[1])
store.add_sandbox(SandboxRecord("sbx-first", "ann", "unconfined", "planned", "{}", 1.0, "b"))
if sys.argv[2] == "begun":
    store._database._connection.execute("BEGIN IMMEDIATE")
store._database._connection.execute("UPDATE sandboxes SET owner = 'bob'")
say()
listen()
"""
    with Caller(code, tmp_path, when) as caller:
        caller.hear()
        caller.kill(signal.SIGKILL)

    store = Store(str(tmp_path))
    found = store.sandbox("sbx-first")
    assert found is not None
    assert {"begun": "ann", "committed": "bob"}[when] == found.owner
    store.close()


# -- a full disk ---------------------------------------------------------------------------------

_FULL = """
import ctypes, tempfile
from ringfence.errors import ResourceExhausted
from ringfence.store.records import SandboxRecord
from ringfence.store.store import Store
libc = ctypes.CDLL(None, use_errno=True)
place = tempfile.mkdtemp()
assert 0 == libc.mount(b"none", place.encode(), b"tmpfs", 0, sys.argv[1].encode()), ctypes.get_errno()
store = Store(place + "/state")
record = SandboxRecord("sbx-first", "ann", "unconfined", "planned", "x" * 1000, 1.0, "b")
store.add_sandbox(record)
fill, stuffed = open(place + "/filler", "wb", buffering=0), 0
try:
    while True:
        stuffed += fill.write(b"x" * 4096)
except OSError as exc:
    full = exc.errno
failed = None
try:
    for number in range(2000):
        store.add_sandbox(SandboxRecord(f"sbx-{number}", "ann", "unconfined", "planned", "x" * 1000, 1.0, "b"))
except ResourceExhausted as exc:
    failed = exc.to_json()
fill.close()
os.unlink(place + "/filler")
store.add_sandbox(SandboxRecord("sbx-last", "ann", "unconfined", "planned", "{}", 1.0, "b"))
say([full, failed, store.sandbox("sbx-first").spec == "x" * 1000, store.sandbox("sbx-last").owner])
store.close()
os.umask(0)
libc.umount2(place.encode(), 2)
os.rmdir(place)
"""


def test_a_full_disk_is_told_and_gets_over(tmp_path: Path) -> None:
    require("user namespaces")
    under = ("unshare", "--user", "--map-root-user", "--mount")
    with Caller(_FULL, "size=512k", under=under) as caller:
        full, failed, is_intact, last = caller.hear()

    assert 28 == full
    assert "storage_full" == failed["code"]
    assert failed["retryable"]
    assert is_intact
    assert "ann" == last


def test_errors_are_told_as_they_are(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.add_sandbox(sandbox())

    with pytest.raises(IoError):
        store.add_sandbox(sandbox())
    with pytest.raises(IoError):
        store.add_session(session("sess-1", "no-such-sandbox"))
    store.close()
    with pytest.raises(LifecycleError):
        store.unended_sandboxes()


def test_a_key_is_one_live_sessions(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.add_sandbox(sandbox())
    store.add_session(session("sess-1", "sbx-1", key="k"))
    with pytest.raises(IoError):
        store.add_session(session("sess-2", "sbx-1", key="k"))

    store.change_session("sess-1", state="terminated")
    store.add_session(session("sess-2", "sbx-1", key="k"))
    store.add_session(session("sess-3", "sbx-1", owner="bob", key="k"))
    store.close()


def test_the_file_is_an_ordinary_sqlite_file(tmp_path: Path) -> None:
    """Others can look into it while we write."""
    store = Store(str(tmp_path))
    store.add_sandbox(sandbox())
    reader = sqlite3.connect(f"file:{tmp_path / FILE}?mode=ro", uri=True)

    assert [("sbx-1",)] == reader.execute("SELECT id FROM sandboxes").fetchall()
    assert ("wal",) == reader.execute("PRAGMA journal_mode").fetchone()
    reader.close()
    store.close()
