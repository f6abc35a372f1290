"""Every refusal of a state directory and its database: by the least that must be refused, and nothing kept."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from tests.features import require
from tests.native.callers import Caller

from ringfence.errors import (
    InvalidRequest,
    IoError,
    LifecycleError,
    RingfenceError,
    SnapshotCorrupt,
    StateInUse,
    StateTooNew,
    StorageFull,
)
from ringfence.store import backup, schema
from ringfence.store import directory as directory_module
from ringfence.store.database import Database
from ringfence.store.directory import LOCK, StateDirectory, holder_of, identity_of
from ringfence.store.execs import ExecRecord
from ringfence.store.records import LIVE, Anchor, SandboxRecord, SessionRecord, SnapshotRecord
from ringfence.store.store import FILE, Store

TIME = 1000.0
PATIENCE_S = 30.0


@pytest.fixture
def state(tmp_path: Path) -> Path:
    path = tmp_path / "state"
    Store(str(path)).close()
    return path


@pytest.fixture
def store(state: Path) -> Iterator[Store]:
    opened = Store(str(state))
    for name in ("sbx-1", "sbx-2"):
        opened.add_sandbox(SandboxRecord(name, "ann", "native", LIVE, "{}", TIME, "boot"))
    yield opened
    opened.close()


def descriptors_beneath(directory: Path) -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was closed meanwhile
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(path for path in found if path.startswith(str(directory)))


def in_another_thread(function: Callable[[], object]) -> object:
    """The locks are such that one thread never waits for itself."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(PATIENCE_S)


# -- what is refused ---------------------------------------------------------------------------


def _hard_link(state: Path) -> None:
    other = state.parent / "other"
    Store(str(other)).close()
    (state / FILE).unlink()
    os.link(other / FILE, state / FILE)


def _newer(state: Path) -> None:
    with sqlite3.connect(state / FILE) as connection:
        connection.execute(f"PRAGMA user_version = {len(schema.MIGRATIONS) + 1}")
    connection.close()


def _of_another_program(state: Path) -> None:
    with sqlite3.connect(state / FILE) as connection:
        connection.execute("PRAGMA application_id = 7")
    connection.close()


def _no_database(state: Path) -> None:
    (state / FILE).write_bytes(b"not a database, but long enough to look at" * 100)


def _link_as_database(state: Path) -> None:
    (state / FILE).rename(state.parent / "elsewhere")
    (state / FILE).symlink_to(state.parent / "elsewhere")


def _link_as_lock(state: Path) -> None:
    (state / LOCK).unlink()
    (state.parent / "elsewhere").write_text("kept")
    (state / LOCK).symlink_to(state.parent / "elsewhere")


def _writable_by_others(state: Path) -> None:
    state.chmod(0o720)


def _a_file(state: Path) -> None:
    for path in state.iterdir():
        path.unlink()
    state.rmdir()
    state.touch()


REFUSED = [
    (_hard_link, StateInUse),
    (_newer, StateTooNew),
    (_of_another_program, StateTooNew),
    (_no_database, IoError),
    (_link_as_database, IoError),
    (_link_as_lock, IoError),
    (_writable_by_others, IoError),
    (_a_file, IoError),
]


@pytest.mark.parametrize(("make", "error"), REFUSED, ids=lambda each: each.__name__)
def test_what_is_refused_is_given_back(
    state: Path, make: Callable[[Path], None], error: type[RingfenceError]
) -> None:
    """The lock too: it is refused as often as it is tried, and for the same reason."""
    make(state)
    for _ in range(2):
        with pytest.raises(error) as refused:
            Store(str(state))
        del refused  # it has the frames, and these what is open in them
        assert [] == descriptors_beneath(state.parent)
    elsewhere = state.parent / "elsewhere"
    assert make is not _link_as_lock or "kept" == elsewhere.read_text()


def test_the_second_holder_keeps_nothing(state: Path) -> None:
    first = StateDirectory(str(state))
    before = descriptors_beneath(state)
    with pytest.raises(StateInUse):
        Store(str(state))
    assert before == descriptors_beneath(state)
    first.close()
    assert [] == descriptors_beneath(state)


@pytest.mark.root
def test_a_directory_of_somebody_else_is_refused(state: Path) -> None:
    os.chown(state, 1, 1)
    with pytest.raises(IoError, match="belongs to another user"):
        Store(str(state))


def test_no_database_at_all_says_what_to_do(state: Path) -> None:
    _no_database(state)
    with pytest.raises(IoError) as refused:
        Store(str(state))
    assert "ringfence restore" in refused.value.hint


def test_what_is_in_it_is_narrowed_and_what_it_points_to_is_not(state: Path) -> None:
    outside = state.parent / "outside"
    outside.touch(mode=0o644)
    (state / "link").symlink_to(outside)
    (state / "inner").mkdir(mode=0o755)
    for path in (state / FILE, state / LOCK):
        path.chmod(0o664)
    Store(str(state)).close()

    modes = {path.name: stat.S_IMODE(path.lstat().st_mode) for path in state.iterdir()}
    assert {"inner": 0o700, FILE: 0o600, LOCK: 0o600} == {
        name: mode for name, mode in modes.items() if name in ("inner", FILE, LOCK)
    }
    assert 0o644 == stat.S_IMODE(outside.stat().st_mode)


def test_a_new_database_is_private_whatever_the_mask_is(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Database(str(tmp_path / FILE)).close()
        (tmp_path / "wide").touch(mode=0o666)
        Database(str(tmp_path / "wide")).close()
    finally:
        os.umask(before)

    for name in (FILE, "wide"):
        assert 0o600 == stat.S_IMODE((tmp_path / name).stat().st_mode)


# -- the directory -----------------------------------------------------------------------------


def test_who_holds_it_is_written_in_place_of_who_did(state: Path) -> None:
    (state / LOCK).write_text("4194304 ffffffff-ffffffffffffffff and more that is longer\n")
    directory = StateDirectory(str(state))

    assert f"{os.getpid()} {identity_of(str(state / LOCK))}\n" == (state / LOCK).read_text()
    directory.close()


@pytest.mark.parametrize(
    ("text", "holder"),
    [
        ("", (0, False)),
        ("word", (0, False)),
        ("-5", (0, False)),
        ("7", (7, True)),  # as earlier versions wrote it
        ("7 {own}", (7, True)),
        ("7 1-2", (7, False)),  # a copy of the file of another directory
        ("7 {own} more", (7, False)),
    ],
)
def test_who_a_lock_file_names(tmp_path: Path, text: str, holder: tuple[int, bool]) -> None:
    path = tmp_path / "lock"
    path.touch()
    path.write_text(text.format(own=identity_of(str(path))))
    with open(path, "rb") as file:
        assert holder == holder_of(file.fileno())


def test_closed_twice_it_closes_nobody_elses(state: Path) -> None:
    directory = StateDirectory(str(state))
    directory.close()
    others = [os.open("/", os.O_PATH) for _ in range(4)]  # with the numbers that it had
    directory.close()

    for fd in others:
        os.close(fd)


def test_a_directory_that_was_moved_is_told_and_its_files_can_still_be_removed(
    store: Store, state: Path
) -> None:
    directory = store.directory
    assert directory
    store.check()
    state.rename(state.parent / "moved")
    for replaced in (False, True):
        if replaced:
            state.mkdir(mode=0o700)
            (state / "file").touch()
        with pytest.raises(IoError, match="moved or replaced"):
            directory.check_place()
        with pytest.raises(IoError, match="moved or replaced"):
            store.check()
    (state.parent / "moved" / "file").touch()
    directory.remove("file")
    directory.remove("file")

    assert (state / "file").exists()
    assert not (state.parent / "moved" / "file").exists()


def test_a_check_writes(store: Store, state: Path) -> None:
    """A disk that takes nothing more is found out by no reading."""
    log = state / f"{FILE}-wal"
    before = log.stat().st_size
    store.check()

    assert log.stat().st_size > before


def test_a_check_asks_for_room(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.check()
    monkeypatch.setattr(directory_module, "_LEAST_ROOM", 1 << 60)
    with pytest.raises(StorageFull):
        store.check()


_LITTLE_ROOM = """
import ctypes, os, tempfile
from ringfence.errors import StorageFull
from ringfence.store.directory import StateDirectory
libc = ctypes.CDLL(None, use_errno=True)
found = []
for size in (b"size=200k", b"size=300k"):
    place = tempfile.mkdtemp()
    assert 0 == libc.mount(b"none", place.encode(), b"tmpfs", 0, size + b",mode=700")
    directory = StateDirectory(place)
    try:
        directory.check_room()
        found.append("room")
    except StorageFull:
        found.append("none")
    directory.close()
    libc.umount2(place.encode(), 2)
    os.rmdir(place)
say(found)
"""


def test_where_one_record_fits_and_a_sandbox_may_not_there_is_no_room() -> None:
    require("user namespaces")
    with Caller(_LITTLE_ROOM, under=("unshare", "--user", "--map-root-user", "--mount")) as caller:
        assert ["none", "room"] == caller.hear()


_FULL = """
import ctypes, os, tempfile
from ringfence.store.directory import StateDirectory, holder_of
libc = ctypes.CDLL(None, use_errno=True)
place = tempfile.mkdtemp()
assert 0 == libc.mount(b"none", place.encode(), b"tmpfs", 0, b"size=16k,mode=700")
with open(f"{place}/file", "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass
directory = StateDirectory(place)
lock = os.open(f"{place}/lock", os.O_RDONLY)
say(list(holder_of(lock)))
os.close(lock)
directory.close()
libc.umount2(place.encode(), 2)
os.rmdir(place)
"""


def test_it_is_held_on_a_full_disk_too() -> None:
    """Only for those who are refused is it written down by whom."""
    require("user namespaces")
    with Caller(_FULL, under=("unshare", "--user", "--map-root-user", "--mount")) as caller:
        assert [0, False] == caller.hear()


# -- the database ------------------------------------------------------------------------------


def test_it_is_ours_in_write_ahead_mode_and_keeps_references(store: Store) -> None:
    asked = ("application_id", "journal_mode", "foreign_keys", "synchronous")
    found = [store._database.rows(f"PRAGMA {name}")[0][0] for name in asked]

    assert [schema.APPLICATION_ID, "wal", 1, 1] == found
    with pytest.raises(IoError, match="FOREIGN KEY"):
        store.add_session(_session("1", "sbx-none"))


def _session(name: str, sandbox: str = "sbx-1", owner: str = "ann", key: str = "") -> SessionRecord:
    return SessionRecord(
        name, sandbox, owner, "native", "active", "{}", "{}", TIME, "boot", 1, TIME, key
    )


def test_a_block_in_a_block_is_part_of_it(store: Store) -> None:
    with pytest.raises(ZeroDivisionError), store.together():  # noqa: PT012
        with store.together():
            store.set_setting("inner", "1")
        assert "1" == store.setting("inner")
        raise ZeroDivisionError
    assert store.setting("inner") is None
    with store.together(), store.together():
        store.set_setting("inner", "2")
    assert "2" == in_another_thread(lambda: store.setting("inner"))


def test_what_cannot_be_committed_is_rolled_back_and_holds_nobody_up(store: Store) -> None:
    with pytest.raises(IoError, match="FOREIGN KEY"), store.together():  # noqa: PT012
        store._database.rows("PRAGMA defer_foreign_keys = ON")  # found out at the end
        store.set_setting("beside", "1")
        store.add_session(_session("1", "sbx-none"))

    assert in_another_thread(lambda: store.setting("beside")) is None
    in_another_thread(lambda: store.set_setting("beside", "2"))
    assert "2" == store.setting("beside")


def test_what_a_full_disk_has_rolled_back_is_not_rolled_back_again(store: Store) -> None:
    """SQLite does so by itself; the error that is told is the one that came first."""
    with pytest.raises(ZeroDivisionError), store.together():  # noqa: PT012
        store.set_setting("name", "value")
        store._database.rows("ROLLBACK")
        raise ZeroDivisionError
    assert in_another_thread(lambda: store.setting("name")) is None


def test_a_block_that_cannot_begin_holds_nobody_up(store: Store) -> None:
    store._database._owner -= 1  # as if a fork had come between
    with pytest.raises(LifecycleError), store.together():
        pytest.fail("it began")
    with pytest.raises(LifecycleError):
        store.set_setting("name", "value")
    store.close()
    store._database._owner += 1

    in_another_thread(lambda: store.set_setting("name", "value"))
    assert "value" == store.setting("name"), "the child has closed what is its parent's"


def test_threads_wait_for_a_block_to_end(store: Store) -> None:
    begun = threading.Event()
    read: list[str | None] = []

    def other() -> None:
        begun.set()
        read.append(store.setting("name"))
        store.set_setting("name", "theirs")

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(ZeroDivisionError), store.together():  # noqa: PT012
            store.set_setting("name", "ours")
            written = pool.submit(other)
            assert begun.wait(PATIENCE_S)
            wait([written], 0.3)  # without the lock it is done by then, and rolled back below
            raise ZeroDivisionError
        written.result(PATIENCE_S)
    assert "theirs" == store.setting("name"), "it was rolled back with what is not its own"
    assert [None] == read, "it has seen what never was"


def test_a_checkpoint_leaves_nothing_open_and_closed_is_closed(store: Store, state: Path) -> None:
    store.checkpoint()
    before = descriptors_beneath(state)  # SQLite keeps what it has closed for the next one
    for _ in range(5):
        store.checkpoint()
    assert before == descriptors_beneath(state)
    store.close()
    store.close()
    assert [] == descriptors_beneath(state)
    with pytest.raises(LifecycleError, match="closed"):
        store.setting("name")


# -- tables ------------------------------------------------------------------------------------


def test_an_anchor_is_forgotten_alone(store: Store) -> None:
    anchor = Anchor("native", 1, 2, "boot")
    differing: tuple[dict[str, object], ...] = (
        {"backend": "gvisor"}, {"pid": 2}, {"started": 3}, {"boot": "another"},
    )  # fmt: skip
    others = [replace(anchor, **each) for each in differing]  # type: ignore[arg-type]
    for each in (anchor, *others):
        store.add_anchor(each)
    store.forget_anchor(anchor)

    assert sorted(map(str, others)) == sorted(map(str, store.anchors()))


def test_nobody_is_an_owner_like_any_other(store: Store) -> None:
    store.add_session(_session("1"))
    store.end_session("1", "over")

    assert [] == store.sessions(owner="") == store.ended_sessions("", "", 9)
    assert ["1"] == [each.id for each in store.sessions()]


def test_of_several_the_newest_is_found(store: Store) -> None:
    for name in ("1", "2", "3"):
        store.add_session(_session(name, key="k"))
        store.end_session(name, "over")
    last, under_key = store.last_session_of("sbx-1"), store.session_under_key("ann", "k")

    assert last
    assert under_key
    assert ("3", "3") == (last.id, under_key.id)
    assert store.last_session_of("sbx-2") is None


def test_a_default_is_changed_and_goes_with_its_sandbox(store: Store) -> None:
    for name in ("sbx-1", "sbx-2"):
        store.set_default("ann", name)
        assert name == store.default("ann")
    store.change_sandbox("sbx-2", phase="ended", ended_at=TIME)
    assert [0, 1] == [store.prune(TIME), store.prune(TIME + 1)]
    assert store.default("ann") is None
    assert store.sandbox("sbx-1"), "it has not ended"


def test_only_what_is_forgotten_whole_is_forgotten(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StorageFull("no room")

    store.add_session(_session("1"))
    with monkeypatch.context() as patch:
        patch.setattr(store, "change_sandbox", fail)
        with pytest.raises(StorageFull):
            store.forget_session("1", "sbx-1")
    found = store.sandbox("sbx-1")

    assert store.session("1")
    assert found
    assert "ann" == found.owner


def _exec(name: str, sandbox: str = "sbx-1", ended_at: float | None = None) -> ExecRecord:
    return ExecRecord(name, sandbox, "running", "{}", TIME, ended_at)


def test_an_exec_that_cannot_be_written_leaves_no_key(store: Store) -> None:
    """A sandbox of another file's: the key's reference holds, the exec's does not."""
    with pytest.raises(IoError):
        store.execs.add_under_key(_exec("1", "sbx-none"), "key", "digest")
    broken = replace(_exec("1"), view=None)  # type: ignore[arg-type]
    with pytest.raises(IoError):
        store.execs.add_under_key(broken, "key", "digest")

    assert store.execs.under_key("sbx-1", "key") is None
    assert store.execs.add_under_key(_exec("1"), "key", "digest")


def test_all_of_an_exec_changes_but_whose_it_is(store: Store) -> None:
    store.execs.put(_exec("1"))
    changed = ExecRecord("1", "sbx-1", "ended", '{"x": 1}', TIME + 1, TIME + 2)
    store.execs.put(changed)
    assert changed == store.execs.get("1")


def test_execs_that_ended_at_once_are_told_apart_by_their_ids(store: Store) -> None:
    for name in ("3", "1", "2"):
        store.execs.put(_exec(name, ended_at=TIME))
    after, found = (0.0, ""), []
    while batch := store.execs.ended(after, 1):
        found.append(batch[0][0])
        after = batch[0][2], batch[0][0]

    assert ["1", "2", "3"] == found


# -- backups -----------------------------------------------------------------------------------


def test_a_backup_and_what_is_made_of_it_are_private(tmp_path: Path) -> None:
    """Also of a directory whose name means something in a URI."""
    state, saved, again = (tmp_path / name for name in ("st?te#%41", "saved", "again"))
    store = Store(str(state))
    store.set_setting("name", "value")
    store.close()
    (state / "audit.log").write_text("log")
    for path in (saved, again):
        path.mkdir()
        path.chmod(0o755)
    before = os.umask(0)
    try:
        backup.save(str(state), str(saved), "1")
        (saved / "snapshots" / "snap-1").mkdir(parents=True)
        (saved / "snapshots" / "snap-1" / "link").symlink_to("/etc/hostname")
        backup.restore(str(saved), str(again))
    finally:
        os.umask(before)

    assert (0o700, 0o700) == tuple(stat.S_IMODE(each.stat().st_mode) for each in (saved, again))
    files = {FILE: 0o600, "audit.log": 0o600, "snapshots": 0o700}
    assert files == {name: stat.S_IMODE((again / name).stat().st_mode) for name in files}
    assert (again / "snapshots" / "snap-1" / "link").is_symlink()
    assert [] == descriptors_beneath(tmp_path)
    opened = Store(str(again))
    assert "value" == opened.setting("name")
    opened.close()


def test_a_backup_goes_nowhere_where_something_is(state: Path, tmp_path: Path) -> None:
    used = tmp_path / "used"
    used.mkdir()
    (used / "file").touch()
    with pytest.raises(InvalidRequest, match="not empty"):
        backup.save(str(state), str(used), "1")
    backup.save(str(state), str(tmp_path / "saved"), "1")
    with pytest.raises(InvalidRequest, match="not empty"):
        backup.restore(str(tmp_path / "saved"), str(used))
    assert ["file"] == os.listdir(used)


def test_one_of_a_newer_format_is_refused(state: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    backup.save(str(state), str(saved), "1")
    manifest = saved / "backup.json"
    for wrong in ('"format": 2', '"format": null', '"other": 1'):
        kept = manifest.read_text()
        manifest.write_text(kept.replace('"format": 1', wrong))
        with pytest.raises(InvalidRequest, match="newer"):
            backup.restore(str(saved), str(tmp_path / "again"))
        manifest.write_text(kept)
    assert not (tmp_path / "again").exists()
    with open(saved / FILE, "ab") as file:
        file.write(b"\0")
    with pytest.raises(SnapshotCorrupt):
        backup.restore(str(saved), str(tmp_path / "again"))


def test_what_cannot_be_saved_leaves_nothing(state: Path, tmp_path: Path) -> None:
    (state / "audit.log").mkdir()  # is to be a file
    with pytest.raises(IoError, match="not made"):
        backup.save(str(state), str(tmp_path / "saved"), "1")
    assert not (tmp_path / "saved").exists()


def test_half_a_snapshot_is_none(store: Store, state: Path, tmp_path: Path) -> None:
    for name in ("snap-1", "snap-2"):
        store.add_snapshot(SnapshotRecord(name, "ann", "sbx-1", "native", "{}", TIME))
        (state / "snapshots" / name).mkdir(parents=True)
        (state / "snapshots" / name / "file").touch()
    os.mkfifo(state / "snapshots" / "snap-1" / "fifo")  # cannot be copied
    form = backup.save(str(state), str(tmp_path / "saved"), "1")

    assert (["snap-2"], 1) == (form["snapshots"], form["snapshots_elsewhere"])
    assert ["snap-2"] == os.listdir(tmp_path / "saved" / "snapshots")
