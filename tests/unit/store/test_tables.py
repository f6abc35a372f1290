"""Each method of each table on a real file: what it writes, and what it leaves alone."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from tests.features import require
from tests.native.callers import Caller

from ringfence.errors import IoError, SnapshotCorrupt, StateInUse, StorageFull
from ringfence.store import backup, database
from ringfence.store.execs import ExecRecord
from ringfence.store.executions import ExecutionRecord
from ringfence.store.records import (
    LIVE,
    Anchor,
    KeyRecord,
    SandboxRecord,
    SessionRecord,
    SnapshotRecord,
)
from ringfence.store.store import FILE, Store

pytestmark = pytest.mark.anyone

TIME = 1000.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(str(tmp_path / "state"))
    yield opened
    opened.close()


def _sandbox(name: str) -> SandboxRecord:
    return SandboxRecord(name, "ann", "native", LIVE, "{}", TIME, "boot")


def _session(name: str, owner: str = "ann", key: str = "") -> SessionRecord:
    return SessionRecord(
        name, f"sbx-{name}", owner, "native", "active", "{}", "{}", TIME, "boot", 1, TIME, key
    )


def _key(key_id: str, **columns: object) -> KeyRecord:
    record = KeyRecord(key_id, key_id.encode(), "ann", "user", TIME)
    return replace(record, **columns)  # type: ignore[arg-type]


def _exec(name: str, sandbox: str = "sbx-1", ended_at: float | None = None) -> ExecRecord:
    return ExecRecord(name, sandbox, "running", "{}", TIME, ended_at)


def _execution(name: str, **columns: object) -> ExecutionRecord:
    record = ExecutionRecord(name, "ann", "running", "digest", "{}", TIME)
    return replace(record, **columns)  # type: ignore[arg-type]


def test_keys(store: Store) -> None:
    for record in (_key("a"), _key("token-a", maker="a"), _key("b"), _key("token-b", maker="b")):
        store.add_key(record)
    store.change_key("b", name="laptop")

    store.remove_key("a")

    left = [_key("b", name="laptop"), _key("token-b", maker="b")]
    assert left == store.every_key()
    store.remove_key("none")
    assert left == store.every_key(), "the control"


def test_keys_that_were_used_and_tokens_that_expired(store: Store) -> None:
    store.add_sandbox(_sandbox("sbx-1"))
    store.add_key(_key("user", expires_at=TIME))  # it opens nothing, and its owner can see why
    store.add_key(_key("live", sandbox="sbx-1", expires_at=TIME + 2))
    store.add_key(_key("over", sandbox="sbx-1", expires_at=TIME))

    store.note_keys({"live": TIME + 1, "gone": TIME}, TIME + 1)

    assert {"user": None, "live": TIME + 1} == {each.id: each.used_at for each in store.every_key()}
    store.note_keys({"gone": TIME, "live": TIME + 2, "user": TIME + 3}, TIME)
    used = {each.id: each.used_at for each in store.every_key()}
    assert {"user": TIME + 3, "live": TIME + 2} == used


def test_sessions(store: Store) -> None:
    for name, owner in (("1", "ann"), ("2", "bob"), ("3", "ann"), ("4", "ann")):
        store.add_sandbox(_sandbox(f"sbx-{name}"))
        store.add_session(_session(name, owner, key="k" if name == "3" else ""))
    for name in ("1", "3", "4"):
        store.end_session(name, f"reason {name}")
    store.end_session("1", "another reason")

    ended = store.session("1")
    assert ended
    assert ("terminated", "reason 1") == (ended.state, ended.reason)
    assert ["3"] == [each.id for each in store.ended_sessions("ann", "1", 1)]
    assert ["1", "3", "4"] == [each.id for each in store.ended_sessions(None, "", 9)]
    assert [] == store.ended_sessions("bob", "", 9)
    assert ["1", "3", "4"] == [each.id for each in store.sessions(owner="ann")]
    assert ["2"] == [each.id for each in store.sessions(states=("active",))]
    under_key = store.session_under_key("ann", "k")
    assert under_key
    assert "3" == under_key.id
    assert store.session_under_key("bob", "k") is None


def test_a_session_that_never_came_to_be(store: Store) -> None:
    store.add_sandbox(_sandbox("sbx-1"))
    store.add_session(_session("1"))

    store.forget_session("1", "sbx-1")

    assert store.session("1") is None
    left = store.sandbox("sbx-1")
    assert left
    assert ("", LIVE) == (left.owner, left.phase)


def test_snapshots(store: Store) -> None:
    one, two = (SnapshotRecord(name, "ann", "sbx-1", "native", "{}", TIME) for name in ("1", "2"))
    store.add_snapshot(two)
    store.add_snapshot(one)
    assert [one, two] == store.snapshots()

    store.remove_snapshot("1")

    assert [two] == store.snapshots()
    assert (None, two) == (store.snapshot("1"), store.snapshot("2"))


def test_the_rest(store: Store) -> None:
    anchors = [Anchor("native", pid, 1, "boot") for pid in (1, 2)]
    for anchor in (*anchors, anchors[0]):
        store.add_anchor(anchor)
    store.forget_anchor(anchors[0])
    assert [anchors[1]] == store.anchors()

    store.add_sandbox(_sandbox("sbx-1"))
    store.set_default("ann", "sbx-1")
    store.set_default("ann", None)
    assert store.default("ann") is None

    for value in ("a", "b"):
        store.set_setting("name", value)
    assert ("b", None) == (store.setting("name"), store.setting("other"))
    assert [5.0, 5.0, 9.0] == [
        store.first_ahead_s("x", 5),
        store.first_ahead_s("x", 7),
        store.first_ahead_s("y", 9),
    ]


def test_execs(store: Store) -> None:
    execs = store.execs
    store.add_sandbox(_sandbox("sbx-1"))
    store.add_sandbox(_sandbox("sbx-2"))
    assert execs.add_under_key(_exec("1"), "key", "digest")
    assert not execs.add_under_key(_exec("2"), "key", "other"), "the key is taken"
    execs.put(_exec("3", ended_at=TIME + 3))
    execs.put(_exec("4", ended_at=TIME + 1))
    execs.put(_exec("5", "sbx-2"))

    assert ("1", "digest") == execs.under_key("sbx-1", "key")
    assert execs.under_key("sbx-2", "key") is None
    assert [None, "5"] == [each and each.id for each in (execs.get("2"), execs.get("5"))]
    assert ["1", "3"] == [each.id for each in execs.of_sandbox("sbx-1", "", 2)]
    assert ["3", "4"] == [each.id for each in execs.of_sandbox("sbx-1", "1", 9)]
    assert ["1", "5"] == [each.id for each in execs.unended()]
    assert [("4", "sbx-1", TIME + 1), ("3", "sbx-1", TIME + 3)] == execs.ended()
    assert ["4"] == [name for name, _, _ in execs.ended(most=1)]
    assert ["3"] == [name for name, _, _ in execs.ended((TIME + 1, "4"))]
    assert (2, 3) == (execs.count_ended(), execs.count_of_sandbox("sbx-1"))

    execs.put(replace(_exec("1"), state="ended", ended_at=TIME))
    assert ("1", "digest") == execs.under_key("sbx-1", "key"), "a change keeps its key"
    execs.forget_key("1")
    assert execs.add_under_key(_exec("6"), "key", "digest"), "another one may begin"
    execs.remove("6")
    assert (None, None) == (execs.get("6"), execs.under_key("sbx-1", "key"))
    assert execs.get("1"), "the control"


def test_executions(store: Store) -> None:
    table = store.executions
    assert [True, False] == [table.add(_execution("1")), table.add(_execution("1", owner="bob"))]
    table.add(_execution("2"))

    table.change("1", status="failed", ended_at=TIME + 1)

    assert [_execution("1", status="failed", ended_at=TIME + 1), _execution("2")] == [
        table.get("1"),
        table.get("2"),
    ]
    assert [_execution("2")] == table.unended()
    assert [0, 1] == [table.prune(TIME + 1), table.prune(TIME + 2)]
    assert [None, _execution("2")] == [table.get("1"), table.get("2")]


@pytest.mark.parametrize(
    "differing",
    [
        {"owner": "bob"},
        {"request": "other"},
        {"status": "completed"},
        {"result": '{"error": null}'},
    ],
)
def test_only_the_same_request_that_never_began_begins_again(
    store: Store, differing: dict[str, str]
) -> None:
    began = {"result": json.dumps({"error": {"code": "exec_not_started"}}), "status": "failed"}
    store.executions.add(_execution("1", **{**began, **differing}))

    assert not store.executions.begin_again(_execution("1"))
    store.executions.add(_execution("2", **began))
    assert store.executions.begin_again(_execution("2")), "the control"
    assert _execution("2") == store.executions.get("2")


def test_a_hard_link_to_the_state_of_another_directory_is_refused(tmp_path: Path) -> None:
    Store(str(tmp_path / "one")).close()
    (tmp_path / "two").mkdir(mode=0o700)
    os.link(tmp_path / "one" / FILE, tmp_path / "two" / FILE)

    with pytest.raises(StateInUse, match="hard link"):
        Store(str(tmp_path / "two"))
    (tmp_path / "one" / FILE).unlink()
    Store(str(tmp_path / "two")).close()


def test_a_file_that_names_no_directory_is_of_the_first_that_opens_it(tmp_path: Path) -> None:
    """As earlier versions wrote it, hard links included."""
    store = Store(str(tmp_path / "one"))
    store._database.write("DELETE FROM settings")
    store.close()
    (tmp_path / "two").mkdir(mode=0o700)
    os.link(tmp_path / "one" / FILE, tmp_path / "two" / FILE)

    Store(str(tmp_path / "two")).close()
    with pytest.raises(StateInUse, match="hard link"):
        Store(str(tmp_path / "one"))


def test_a_disk_that_is_full_at_the_start_is_no_reason_not_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose file it is can be written down later: until then it is read as nobody's."""

    def full(*_: object) -> None:
        raise StorageFull("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "set_setting", full)
        store = Store(str(tmp_path / "state"))
        assert store.setting("directory") is None
        store.close()
    store = Store(str(tmp_path / "state"))
    assert store.identity == store.setting("directory")
    store.close()


def test_nobody_writes_between_what_a_block_reads_and_what_it_writes(tmp_path: Path) -> None:
    """Else a block that has read could not write any more."""
    with (
        closing(Store(str(tmp_path))) as store,
        closing(sqlite3.connect(tmp_path / FILE, timeout=0.0, isolation_level=None)) as other,
    ):
        with store.together():
            assert store.setting("a") is None
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                other.execute("INSERT INTO settings VALUES ('a', 'other')")
            store.set_setting("a", "ours")
        other.execute("UPDATE settings SET value = 'later' WHERE name = 'a'")
        assert "later" == store.setting("a")


def test_a_write_waits_for_another_connection(tmp_path: Path) -> None:
    """A tool that looks at the file of a running server holds its writes up, and fails none."""
    store = Store(str(tmp_path / "state"))
    other = sqlite3.connect(
        tmp_path / "state" / FILE, isolation_level=None, check_same_thread=False
    )
    other.execute("BEGIN IMMEDIATE")
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(store.set_setting, "name", "value")
        wait([written], 0.02)
        other.execute("COMMIT")
        written.result(30.0)
    other.close()
    assert "value" == store.setting("name")
    store.close()


def test_keys_of_execs_go_with_their_sandbox(store: Store) -> None:
    for number in (1, 2):
        store.add_sandbox(_sandbox(f"sbx-{number}"))
        assert store.execs.add_under_key(_exec(f"exec-{number}", f"sbx-{number}"), "k", "digest")
    store.forget_sandbox("sbx-1")

    left = store._database.rows("SELECT sandbox, exec FROM exec_keys")
    assert [("sbx-2", "exec-2")] == [tuple(row) for row in left]


def test_an_exec_and_its_key_are_forgotten_together_or_not_at_all(store: Store) -> None:
    store.add_sandbox(_sandbox("sbx-1"))
    store.execs.add_under_key(_exec("exec-1"), "k", "digest")
    store._database.write(
        "CREATE TRIGGER held BEFORE DELETE ON exec_keys BEGIN SELECT RAISE(ABORT, 'held'); END"
    )
    with pytest.raises(IoError, match="held"):
        store.execs.remove("exec-1")
    assert store.execs.get("exec-1") is not None
    store._database.write("DROP TRIGGER held")
    store.execs.remove("exec-1")

    assert store.execs.get("exec-1") is None
    assert store.execs.under_key("sbx-1", "k") is None


@pytest.mark.parametrize("digit", ["0", "f"])
def test_a_backup_with_another_digest_is_not_restored(tmp_path: Path, digit: str) -> None:
    Store(str(tmp_path / "state")).close()
    saved = tmp_path / "saved"
    backup.save(str(tmp_path / "state"), str(saved), "1")
    (manifest,) = saved.glob("*.json")
    form = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**form, "sha256": digit * 64}))

    with pytest.raises(SnapshotCorrupt):
        backup.restore(str(saved), str(tmp_path / "again"))
    manifest.write_text(json.dumps(form))
    backup.restore(str(saved), str(tmp_path / "again"))


_NO_INODES = """
import ctypes, os, tempfile
from ringfence.errors import RingfenceError
from ringfence.store.store import Store
libc = ctypes.CDLL(None, use_errno=True)
place = tempfile.mkdtemp()
assert 0 == libc.mount(b"none", place.encode(), b"tmpfs", 0, b"nr_inodes=10,mode=700"), ctypes.get_errno()
Store(place + "/state").close()
os.mkdir(place + "/new", 0o700)
open(place + "/new/lock", "x").close()
files = []
try:
    while True:
        files.append(open(f"{place}/file-{len(files)}", "x").name)
except OSError:
    pass
def start(name):
    try:
        Store(f"{place}/{name}").close()
    except RingfenceError as exc:
        return [exc.code, exc.hint]
    return ["", ""]
full = [start("state"), start("new")]
for name in files:
    os.unlink(name)
say([len(files), full, [start("state"), start("new")]])
libc.umount2(place.encode(), 2)
os.rmdir(place)
"""


def test_a_disk_without_inodes_is_full() -> None:
    require("user namespaces")
    with Caller(_NO_INODES, under=("unshare", "--user", "--map-root-user", "--mount")) as caller:
        files, full, after = caller.hear()

    assert files > 0
    assert [["storage_full", "free space or inodes there"]] * 2 == full
    assert [["", ""]] * 2 == after


_UNCOUNTED = """
import ctypes, os, tempfile
from ringfence.store.store import Store
libc = ctypes.CDLL(None, use_errno=True)
place = tempfile.mkdtemp()
assert 0 == libc.mount(b"none", place.encode(), b"ramfs", 0, b"mode=700"), ctypes.get_errno()
store = Store(place)
store.check()
store.close()
info = os.statvfs(place)
say([info.f_blocks, info.f_files])
libc.umount2(place.encode(), 2)
os.rmdir(place)
"""


def test_a_file_system_that_counts_nothing_has_room() -> None:
    """There is nothing to compare with: what does not fit is found out by writing."""
    require("user namespaces")
    with Caller(_UNCOUNTED, under=("unshare", "--user", "--map-root-user", "--mount")) as caller:
        assert [0, 0] == caller.hear()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_quota_that_is_used_up_is_a_full_disk(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No ordinary user can set one up: the error of the kernel is the test's."""

    def full(path: str, *_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number), path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        with pytest.raises(StorageFull):
            database.Database(str(tmp_path / FILE))
    database.Database(str(tmp_path / FILE)).close()


def test_a_file_that_cannot_be_opened_is_no_full_disk(tmp_path: Path) -> None:
    with pytest.raises(sqlite3.OperationalError) as refused:
        sqlite3.connect(f"{tmp_path}/none/file")

    assert sqlite3.SQLITE_CANTOPEN == refused.value.sqlite_errorcode & 0xFF
    assert not database._is_full(refused.value, f"{tmp_path}/file")


def test_only_the_present_boot_is_remembered(store: Store) -> None:
    """A clock of each boot would be there for ever."""
    for boot, ahead in (("x", 5.0), ("y", 9.0), ("x", 7.0)):
        assert ahead == store.first_ahead_s(boot, ahead)
    assert 1 == store._database.rows("SELECT count(*) FROM clocks")[0][0]
