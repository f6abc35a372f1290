"""The store in which snapshots outlive their machine: what was changed in it opens nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.shared_store import DirectoryFiles, make_store

from ringfence.errors import (
    BackendUnavailable,
    InvalidRequest,
    IoError,
    SnapshotCorrupt,
    SnapshotNotFound,
    TooLarge,
)
from ringfence.model.spec import SandboxSpec
from ringfence.snapshots import shared as shared_module
from ringfence.snapshots.catalogue import Catalogue
from ringfence.snapshots.shared import SharedSnapshots

pytestmark = pytest.mark.anyone

RECORD = {"owner": "ann", "sandbox": "sbx-1"}


@pytest.fixture
def here(tmp_path: Path) -> Catalogue:
    return Catalogue(str(tmp_path / "here"), "native")


@pytest.fixture
def there(tmp_path: Path) -> Catalogue:
    """Of another machine."""
    return Catalogue(str(tmp_path / "there"), "native")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(place: Path, monkeypatch: pytest.MonkeyPatch) -> SharedSnapshots:
    return make_store(place, monkeypatch)


def save(catalogue: Catalogue, snapshot_id: str, *lower: str, memory: str = "") -> str:
    read, write = os.pipe()
    os.write(write, f"content of {snapshot_id}".encode())
    os.close(write)
    facts: dict[str, Any] = {"session_id": "sess-1", "created_at": 1.0}
    try:
        catalogue.save(read, snapshot_id, SandboxSpec(), 99, lower=lower, memory=memory, **facts)
    finally:
        os.close(read)
    return snapshot_id


def content(catalogue: Catalogue, snapshot_id: str) -> bytes:
    fd = catalogue.content(snapshot_id)
    try:
        return os.read(fd, 100)
    finally:
        os.close(fd)


def names(directory: str | Path) -> list[str]:
    return sorted(os.listdir(directory)) if os.path.isdir(directory) else []


def test_a_snapshot_comes_back_on_another_machine_with_those_below_it(
    here: Catalogue, there: Catalogue, store: SharedSnapshots, place: Path
) -> None:
    save(here, "snap-a")
    save(here, "snap-b", "snap-a")
    store.push(here.directory, "snap-b", RECORD)

    assert store.owner("snap-a") is None
    assert store.pull(there.directory, "snap-a") is None, "it is nobody's by itself"
    assert [] == names(there.directory)
    assert "ann" == store.owner("snap-b")
    assert RECORD == store.pull(there.directory, "snap-b")
    found = [content(there, each) for each in ("snap-a", "snap-b")]
    assert [b"content of snap-a", b"content of snap-b"] == found
    assert ["snap-b"] == [each.id for each in there.list()]
    assert ["snap-a", "snap-b"] == names(there.directory)
    assert ["snap-b"] == names(place / "under" / "snap-a")
    assert stat.S_IMODE(os.stat(f"{there.directory}/snap-b").st_mode) == 0o700
    assert store.owner("snap-c") is None
    assert store.pull(there.directory, "snap-c") is None


def test_memory_goes_along_and_may_be_read_by_the_runtime(
    here: Catalogue, there: Catalogue, store: SharedSnapshots, tmp_path: Path
) -> None:
    (tmp_path / "memory").write_bytes(b"of its processes")
    save(here, "snap-a", memory=str(tmp_path / "memory"))
    store.push(here.directory, "snap-a", RECORD)
    store.pull(there.directory, "snap-a")

    found = Path(there.memory_of("snap-a"))
    assert b"of its processes" == found.read_bytes()
    assert 0o444 == stat.S_IMODE(found.stat().st_mode)


def test_one_that_was_deleted_here_and_not_there_comes_back(
    here: Catalogue, store: SharedSnapshots
) -> None:
    """Its directory may still be there, because another one lies over it."""
    save(here, "snap-a")
    store.push(here.directory, "snap-a", RECORD)
    save(here, "snap-b", "snap-a")
    here.delete("snap-a")
    assert ["snap-b"] == [each.id for each in here.list()]
    assert ["snap-a", "snap-b"] == names(here.directory)
    store.push(here.directory, "snap-b", RECORD)
    assert RECORD == store.pull(here.directory, "snap-b")
    assert ["snap-b"] == [each.id for each in here.list()], "what is below stays deleted"

    assert RECORD == store.pull(here.directory, "snap-a")
    assert ["snap-a", "snap-b"] == [each.id for each in here.list()]
    assert RECORD == store.pull(here.directory, "snap-a"), "a second time is once"


def test_what_others_lie_over_is_removed_with_the_last_of_them(
    here: Catalogue, there: Catalogue, store: SharedSnapshots, place: Path
) -> None:
    for name, *lower in (("snap-a",), ("snap-b", "snap-a"), ("snap-c", "snap-b", "snap-a")):
        store.push(here.directory, save(here, name, *lower), RECORD)

    store.remove("snap-a")
    store.remove("snap-b")
    assert [None, None, "ann"] == [store.owner(f"snap-{each}") for each in "abc"]
    assert RECORD == store.pull(there.directory, "snap-c")
    store.remove("snap-c")
    store.remove("snap-c")

    assert [] == [*place.glob("snap-*")]
    assert [] == [*place.glob("under/*/*")]


def test_what_is_still_somebodys_is_not_removed_with_what_lay_over_it(
    here: Catalogue, store: SharedSnapshots
) -> None:
    for name, *lower in (("snap-a",), ("snap-b", "snap-a"), ("snap-c", "snap-a")):
        store.push(here.directory, save(here, name, *lower), RECORD)
    store.remove("snap-b")
    assert "ann" == store.owner("snap-a")
    store.remove("snap-c")
    assert "ann" == store.owner("snap-a")
    store.remove("snap-a")
    assert store.owner("snap-a") is None


def test_what_is_below_goes_along_although_it_was_deleted_here(
    here: Catalogue, there: Catalogue, store: SharedSnapshots
) -> None:
    save(here, "snap-a")
    save(here, "snap-b", "snap-a")
    here.delete("snap-a")
    store.push(here.directory, "snap-b", RECORD)
    assert RECORD == store.pull(there.directory, "snap-b")
    assert b"content of snap-a" == content(there, "snap-a")
    assert ["snap-b"] == [each.id for each in there.list()]


def test_one_whose_lower_is_gone_is_not_half_restored(
    here: Catalogue, there: Catalogue, store: SharedSnapshots, place: Path
) -> None:
    save(here, "snap-a")
    store.push(here.directory, save(here, "snap-b", "snap-a"), RECORD)
    shutil.rmtree(place / "snap-a")
    with pytest.raises(SnapshotCorrupt, match="snap-a below it is gone"):
        store.pull(there.directory, "snap-b")
    assert [] == names(there.directory)


Change = Callable[[bytes], bytes]
CHANGES: dict[str, Change] = {
    "other": lambda data: b"#" + data[1:],
    "longer": lambda data: data + b"#",
    "shorter": lambda data: data[:-1],
    "empty": lambda _data: b"",
}


@pytest.mark.parametrize("name", ["content.tar", "snapshot.json", "memory.img", "manifest.json"])
@pytest.mark.parametrize("how", CHANGES)
def test_what_was_changed_in_the_store_is_refused_and_nothing_is_kept(
    here: Catalogue,
    there: Catalogue,
    store: SharedSnapshots,
    place: Path,
    tmp_path: Path,
    name: str,
    how: str,
) -> None:
    (tmp_path / "memory").write_bytes(b"of its processes")
    save(here, "snap-a", memory=str(tmp_path / "memory"))
    store.push(here.directory, "snap-a", RECORD)
    path = place / "snap-a" / name
    data = path.read_bytes()
    path.write_bytes(CHANGES[how](data))

    with pytest.raises(SnapshotCorrupt):
        store.pull(there.directory, "snap-a")

    assert [] == names(there.directory)
    path.write_bytes(data)  # the control
    assert RECORD == store.pull(there.directory, "snap-a")


def test_a_manifest_is_good_for_its_own_snapshot_owner_and_cluster_alone(
    here: Catalogue,
    store: SharedSnapshots,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store.push(here.directory, save(here, "snap-a"), RECORD)
    path = place / "snap-a" / "manifest.json"
    text = path.read_text()
    form = json.loads(text)

    def refused(snapshot_id: str = "snap-a", of: SharedSnapshots = store) -> None:
        for ask in (of.owner, of.remove, lambda id: of.pull(here.directory + "-2", id)):
            with pytest.raises(SnapshotCorrupt, match="another cluster's"):
                ask(snapshot_id)

    changes: tuple[dict[str, object], ...] = (
        {"record": {**RECORD, "owner": "bob"}},
        {"id": "snap-b"},
        {"lower": ["snap-b"]},
        {"files": {}},
        {"mac": ""},
        {"mac": 7},
        {"more": 1},
    )
    for changed in changes:
        path.write_text(json.dumps({**form, **changed}))
        refused()
    for wrong in ("[]", "7", "{", json.dumps({k: v for k, v in form.items() if k != "mac"})):
        path.write_text(wrong)
        refused()
    path.write_text(text)
    refused(of=make_store(place, monkeypatch, b"another"))
    assert "ann" == store.owner("snap-a")  # the control

    (place / "snap-b").mkdir()
    (place / "snap-b" / "manifest.json").write_text(text)
    refused("snap-b")


def test_a_form_is_good_for_its_own_place_and_cluster_alone(
    here: Catalogue,
    store: SharedSnapshots,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store.write({"owner": "ann"}, "templates", "a", "x")
    assert {"owner": "ann"} == _own(store.read("templates", "a", "x"))
    path = place / "templates" / "a" / "x"
    text = path.read_text()
    for target in ("templates/a/y", "templates/b/x", "evicted/x"):
        (place / target).parent.mkdir(parents=True, exist_ok=True)
        (place / target).write_text(text)
        with pytest.raises(SnapshotCorrupt):
            store.read(*target.split("/"))
    path.write_text(text.replace("ann", "bob"))
    with pytest.raises(SnapshotCorrupt, match="templates/a/x"):
        store.read("templates", "a", "x")
    path.write_text(text)
    with pytest.raises(SnapshotCorrupt):
        make_store(place, monkeypatch, b"another").read("templates", "a", "x")
    assert {"owner": "ann"} == _own(store.read("templates", "a", "x"))


def _own(form: dict[str, Any] | None) -> dict[str, Any]:
    assert form is not None
    return {key: value for key, value in form.items() if key not in ("at", "mac")}


def test_a_form_is_no_manifest_and_a_manifest_is_no_form(
    here: Catalogue, store: SharedSnapshots, place: Path
) -> None:
    """Whoever may have one written must not get the other by it."""
    store.write({"id": "snap-a", "record": RECORD, "lower": [], "files": {}}, "evicted", "x")
    (place / "snap-a").mkdir()
    shutil.copy(place / "evicted" / "x", place / "snap-a" / "manifest.json")
    with pytest.raises(SnapshotCorrupt):
        store.owner("snap-a")
    form = {"at": ["evicted", "y"], "id": "snap-b"}
    text = json.dumps({**form, "mac": store._mac(form)})
    (place / "evicted" / "y").write_text(text)
    with pytest.raises(SnapshotCorrupt):
        store.read("evicted", "y")


def test_forms_are_listed_replaced_and_forgotten(store: SharedSnapshots, place: Path) -> None:
    assert [] == store.names("templates")
    assert store.read("templates", "a") is None
    for number, name in enumerate("bab"):
        store.write({"n": number}, "templates", name)
    assert ["a", "b"] == store.names("templates") == names(place / "templates")
    assert {"n": 2} == _own(store.read("templates", "b"))
    (place / "templates" / ".half").write_text("{")
    assert ["a", "b"] == store.names("templates")
    store.forget("templates", "a")
    store.forget("templates", "a")
    assert ["b"] == store.names("templates")


def test_a_form_may_be_so_large_and_no_larger(
    store: SharedSnapshots, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write({"x": ""}, "a", "b")
    room = 1000 - (place / "a" / "b").stat().st_size
    monkeypatch.setattr(shared_module, "_MOST_MANIFEST", 1000)
    store.write({"x": "x" * room}, "a", "b")
    assert 1000 == (place / "a" / "b").stat().st_size
    assert "x" * room == (store.read("a", "b") or {})["x"]
    with pytest.raises(TooLarge, match="a/b is larger"):
        store.write({"x": "x" * (room + 1)}, "a", "b")
    monkeypatch.setattr(shared_module, "_MOST_MANIFEST", 999)
    with pytest.raises(SnapshotCorrupt):
        store.read("a", "b")
    assert ["b"] == names(place / "a")


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "..", "a\0b"])
def test_an_id_that_is_a_path_reaches_nothing(
    store: SharedSnapshots, there: Catalogue, name: str
) -> None:
    for ask in (store.owner, store.remove, lambda id: store.pull(there.directory, id)):
        with pytest.raises(InvalidRequest):
            ask(name)


def test_a_manifest_names_no_files_but_a_snapshots(
    here: Catalogue, there: Catalogue, store: SharedSnapshots, place: Path
) -> None:
    """The secret is one of all nodes: a node that was taken over must not write outside."""
    store.push(here.directory, save(here, "snap-a"), RECORD)
    form = json.loads((place / "snap-a" / "manifest.json").read_text())
    (place / "snap-a" / "other").write_bytes(b"")
    for name in ("other", "../other"):
        files = {**form["files"], name: form["files"]["content.tar"]}
        store._write_manifest({k: v for k, v in {**form, "files": files}.items() if k != "mac"})
        with pytest.raises(SnapshotCorrupt, match="has a file"):
            store.pull(there.directory, "snap-a")
        assert [] == names(there.directory)


def test_what_was_half_fetched_before_is_fetched_anew(
    here: Catalogue, there: Catalogue, store: SharedSnapshots
) -> None:
    store.push(here.directory, save(here, "snap-a"), RECORD)
    partial = Path(there.directory) / ".partial-snap-a"
    partial.mkdir(parents=True)
    (partial / "content.tar").write_bytes(b"half")
    assert RECORD == store.pull(there.directory, "snap-a")
    assert ["snap-a"] == names(there.directory)
    assert b"content of snap-a" == content(there, "snap-a")


def test_a_store_that_does_not_answer_is_named_and_nothing_is_kept(
    here: Catalogue,
    there: Catalogue,
    store: SharedSnapshots,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store.push(here.directory, save(here, "snap-a"), RECORD)
    store.write({}, "evicted", "x")

    def fail(*_args: object, **_options: object) -> Any:
        raise OSError(errno.EIO, "the store is away")

    asks: dict[str, tuple[str, Callable[[], object]]] = {
        "push": ("makedirs", lambda: store.push(here.directory, "snap-a", RECORD)),
        "pull": ("open", lambda: store.pull(there.directory, "snap-a")),
        "owner": ("open", lambda: store.owner("snap-a")),
        "remove": ("rm_file", lambda: store.remove("snap-a")),
        "write": ("pipe_file", lambda: store.write({}, "evicted", "x")),
        "read": ("open", lambda: store.read("evicted", "x")),
        "names": ("ls", lambda: store.names("evicted")),
        "forget": ("rm_file", lambda: store.forget("evicted", "x")),
    }
    for method, ask in asks.values():
        with monkeypatch.context() as patch:
            patch.setattr(DirectoryFiles, method, fail)
            with pytest.raises(IoError, match=r"snapshot_store .*the store is away"):
                ask()
    assert [] == names(there.directory)
    with pytest.raises(IoError):
        store.push(here.directory, "snap-none", RECORD)
    assert [] == [*place.glob("snap-none/manifest.json")]


def test_a_store_that_cannot_be_had_says_what_it_needs(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BackendUnavailable, match="not known: no-such"):
        make_store(place, monkeypatch, url="no-such://bucket")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(BackendUnavailable, match="snapshot_store"):
        SharedSnapshots(str(place), b"")


def test_a_snapshot_that_is_not_here_is_not_found(there: Catalogue) -> None:
    with pytest.raises(SnapshotNotFound):
        there.describe("snap-a")


class CachingFiles(DirectoryFiles):
    """Listings are those of the first time until the cache is dropped, as of s3fs."""

    def __init__(self) -> None:
        self.listings: dict[str, list[str]] = {}

    def ls(self, path: str, *, detail: bool) -> list[str]:
        if path not in self.listings:
            self.listings[path] = super().ls(path, detail=detail)
        return self.listings[path]

    def invalidate_cache(self) -> None:
        self.listings.clear()


def test_a_listing_that_is_cached_is_not_believed(
    here: Catalogue, store: SharedSnapshots, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine of the cluster may have put a snapshot over one, or a form, since."""
    other = make_store(place, monkeypatch)
    other._fs = CachingFiles()
    for name, *lower in (("snap-a",), ("snap-b", "snap-a")):
        other.push(here.directory, save(here, name, *lower), RECORD)
    assert other._is_under("snap-a")
    store.write({}, "evicted", "x")
    assert ["x"] == other.names("evicted")
    store.write({}, "evicted", "y")
    store.remove("snap-b")

    assert ["x", "y"] == other.names("evicted")
    other.remove("snap-a")

    assert [] == [*place.glob("snap-*")]


def test_marks_that_are_gone_keep_nothing_from_being_removed(
    here: Catalogue, store: SharedSnapshots, place: Path
) -> None:
    """Half of an earlier removal."""
    save(here, "snap-a")
    store.push(here.directory, save(here, "snap-b", "snap-a"), RECORD)
    (place / "under/snap-a/snap-b").unlink()

    store.remove("snap-b")

    assert [] == [*place.glob("snap-*")]


def test_a_form_is_seen_whole_while_another_is_written(
    store: SharedSnapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write({"n": 1}, "templates", "a")

    def cut_off(self: DirectoryFiles, path: str, value: bytes) -> None:
        with open(path, "wb") as file:
            file.write(value[: len(value) // 2])
        raise OSError(errno.EIO, "cut off")

    with monkeypatch.context() as patch:
        patch.setattr(DirectoryFiles, "pipe_file", cut_off)
        with pytest.raises(IoError):
            store.write({"n": 2}, "templates", "a")
    assert {"n": 1} == _own(store.read("templates", "a"))
    assert ["a"] == store.names("templates")


def test_each_file_of_a_fetched_snapshot_is_on_disk_before_it_has_its_name(
    here: Catalogue,
    there: Catalogue,
    store: SharedSnapshots,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store.push(here.directory, save(here, "snap-a"), RECORD)
    real, synced = os.fsync, list[str]()

    def fsync(fd: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), there.directory))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    store.pull(there.directory, "snap-a")
    names = ("content.tar", "snapshot.json")
    assert [f".partial-snap-a/{name}" for name in names] == sorted(synced)


def test_what_is_below_two_is_sent_once(
    here: Catalogue, store: SharedSnapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    real = store._send

    def send(path: str, target: str) -> list[Any]:
        sent.append(target)
        return real(path, target)

    monkeypatch.setattr(store, "_send", send)
    for name, *lower in (("snap-a",), ("snap-b", "snap-a"), ("snap-c", "snap-a")):
        save(here, name, *lower)
    store.push(here.directory, "snap-a", RECORD)
    store.push(here.directory, "snap-b", RECORD)
    store.push(here.directory, "snap-c", RECORD)

    assert 1 == sum("/snap-a/content.tar" in each for each in sent)
    assert "ann" == store.owner("snap-a"), "and it stays its owner's"


def test_no_more_of_a_file_is_read_than_was_stored_and_a_byte(
    here: Catalogue,
    there: Catalogue,
    store: SharedSnapshots,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever may write to the store could otherwise fill a node's memory and disk."""
    store.push(here.directory, save(here, "snap-a"), RECORD)
    path = place / "snap-a" / "content.tar"
    size = path.stat().st_size
    with path.open("ab") as file:
        file.truncate(64 << 20)
    real, read = DirectoryFiles.open, list[int]()

    class Counting:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __enter__(self) -> Counting:
            return self

        def __exit__(self, *_exc: object) -> None:
            self._file.close()

        def read(self, most: int) -> bytes:
            data: bytes = self._file.read(most)
            read.append(len(data))
            return data

    def counting(self: DirectoryFiles, name: str, mode: str) -> Any:
        file = real(self, name, mode)
        return Counting(file) if name.endswith("content.tar") else file

    monkeypatch.setattr(DirectoryFiles, "open", counting)
    with pytest.raises(SnapshotCorrupt, match=r"content\.tar is not what was stored"):
        store.pull(there.directory, "snap-a")
    assert size + 1 == sum(read)
    assert [] == names(there.directory)


@pytest.mark.parametrize("size", [1 << 20, (2 << 20) + 5])
def test_a_file_of_several_pieces_comes_back_whole(
    here: Catalogue, there: Catalogue, store: SharedSnapshots, tmp_path: Path, size: int
) -> None:
    memory = os.urandom(size)
    (tmp_path / "memory").write_bytes(memory)
    save(here, "snap-a", memory=str(tmp_path / "memory"))
    store.push(here.directory, "snap-a", RECORD)
    assert RECORD == store.pull(there.directory, "snap-a")
    assert memory == Path(there.memory_of("snap-a")).read_bytes()
