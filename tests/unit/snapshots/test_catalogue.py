"""What a runtime leaves as a guest's memory is taken in as a file, and as nothing else."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ringfence.errors import (
    IoError,
    ResourceExhausted,
    SnapshotCorrupt,
    SnapshotNotFound,
    StorageFull,
)
from ringfence.model.session import Snapshot
from ringfence.model.spec import SandboxSpec
from ringfence.snapshots import catalogue as module
from ringfence.snapshots import layers
from ringfence.snapshots.catalogue import Catalogue


def _save(directory: Path, memory: Path) -> Snapshot:
    read, write = os.pipe()
    os.close(write)
    try:
        catalogue = Catalogue(str(directory), "gvisor")
        return catalogue.save(
            read,
            "snap-1",
            SandboxSpec(),
            1 << 20,
            memory=str(memory),
            session_id="se-1",
            created_at=1.0,
        )
    finally:
        os.close(read)


@pytest.mark.parametrize("kind", ["symlink", "hard link", "fifo"])
def test_a_link_in_its_place_leads_nowhere(tmp_path: Path, kind: str) -> None:
    """Followed, it would have made a file of the host's readable by everybody, and given it away."""
    others = tmp_path / "others"
    others.write_text("secret")
    others.chmod(0o600)
    memory = tmp_path / "memory"
    if kind == "symlink":
        memory.symlink_to(others)
    elif kind == "hard link":
        memory.hardlink_to(others)
    else:
        os.mkfifo(memory)

    with pytest.raises(IoError):
        _save(tmp_path / "snapshots", memory)

    assert 0o600 == stat.S_IMODE(others.stat().st_mode)
    assert [] == Catalogue(str(tmp_path / "snapshots"), "gvisor").list()


def test_a_file_is_taken_in(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.write_bytes(b"pages")
    memory.chmod(0o600)

    saved = _save(tmp_path / "snapshots", memory)

    assert saved.has_memory
    assert 5 == saved.size_bytes
    kept = Catalogue(str(tmp_path / "snapshots"), "gvisor").memory_of("snap-1")
    assert b"pages" == Path(kept).read_bytes()
    assert 0o444 == stat.S_IMODE(os.stat(kept).st_mode)


# -- what is saved and what is read again --------------------------------------------------------


def save(directory: Path, content: bytes, most_bytes: int, memory: str = "") -> Snapshot:
    read, write = os.pipe()
    os.write(write, content)
    os.close(write)
    try:
        return Catalogue(str(directory), "native").save(
            read,
            "snap-1",
            SandboxSpec(),
            most_bytes,
            memory=memory,
            session_id="se-1",
            created_at=1.0,
        )
    finally:
        os.close(read)


def test_a_snapshot_is_as_large_as_it_may_be_and_no_larger(tmp_path: Path) -> None:
    assert 1000 == save(tmp_path / "fits", bytes(1000), 1000).size_bytes
    with pytest.raises(ResourceExhausted, match="larger than 1000"):
        save(tmp_path / "over", bytes(1001), 1000)
    assert [] == os.listdir(tmp_path / "over")


@pytest.mark.parametrize("name", ["content.tar", "memory.img", "snapshot.json"])
@pytest.mark.parametrize("how", ["changed", "cut", "longer", "gone"])
def test_what_is_not_what_was_saved_is_never_restored(tmp_path: Path, name: str, how: str) -> None:
    (tmp_path / "memory").write_bytes(b"pages of memory")
    save(tmp_path / "here", b"content", 100, str(tmp_path / "memory"))
    catalogue = Catalogue(str(tmp_path / "here"), "native")

    def restore() -> None:
        fd = catalogue.open("snap-1")[2]
        os.close(fd)
        assert catalogue.memory_of("snap-1")

    restore()
    path = tmp_path / "here" / "snap-1" / name
    data = path.read_bytes()
    path.unlink()
    if how != "gone":
        at = data.index(b"1.0") if name == "snapshot.json" else 1
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        path.write_bytes({"changed": changed, "cut": data[:-1], "longer": data + b"x"}[how])
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((SnapshotCorrupt, SnapshotNotFound)):
        restore()
    assert before == len(os.listdir("/proc/self/fd"))
    assert len(catalogue.list()) == (name != "snapshot.json")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("step", ["fsync", "rename", "fchown"])
def test_whatever_fails_nothing_of_it_is_left(
    tmp_path: Path, step: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, memory = tmp_path / "here", tmp_path / "memory"
    memory.write_bytes(b"pages")

    def fail(*_given: Any, **_named: Any) -> None:
        raise OSError(number, os.strerror(number))

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        wanted = IoError if number == errno.EIO else StorageFull
        with pytest.raises(wanted):
            save(here, b"content", 100, str(memory))
    assert [] == os.listdir(here)
    assert before == len(os.listdir("/proc/self/fd"))

    memory.write_bytes(b"pages")
    save(here, b"content", 100, str(memory))
    assert ["snap-1"] == os.listdir(here)


def test_what_was_half_saved_or_half_removed_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue = Catalogue(str(tmp_path), "native")
    save(tmp_path, b"content", 100)
    (tmp_path / ".partial-snap-2").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # killed there
        catalogue.delete("snap-1")
    assert 2 == len(os.listdir(tmp_path))
    save(tmp_path, b"content", 100)

    catalogue.tidy()

    assert ["snap-1"] == os.listdir(tmp_path)


def test_zeros_take_no_room(tmp_path: Path) -> None:
    """A sparse file of a guest comes as zeros: of the disk it takes what it has taken inside."""
    stream = tmp_path / "stream"
    with stream.open("wb") as file:
        file.write(b"begin")
        file.truncate(64 << 20)
    digest = hashlib.sha256(stream.read_bytes()).hexdigest()
    catalogue = Catalogue(str(tmp_path / "snapshots"), "native")
    fd = os.open(stream, os.O_RDONLY)
    facts = {"session_id": "se-1", "created_at": 1.0}
    catalogue.save(fd, "snap-1", SandboxSpec(), 1 << 30, **facts)  # type: ignore[arg-type]
    os.close(fd)

    fd = catalogue.content("snap-1")
    try:
        assert os.fstat(fd).st_blocks * 512 < 4 << 20
        with open(fd, "rb", closefd=False) as file:
            assert digest == hashlib.file_digest(file, "sha256").hexdigest()
    finally:
        os.close(fd)


def test_one_of_another_user_hides_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root of a user namespace finds in the directory of the host's root."""
    memory = tmp_path / "memory"
    memory.write_bytes(b"m")
    _save(tmp_path / "snapshots", memory)
    shutil.copytree(tmp_path / "snapshots/snap-1", tmp_path / "snapshots/snap-0")
    catalogue = Catalogue(str(tmp_path / "snapshots"), "gvisor")
    describe = catalogue.describe

    def refused(snapshot_id: str) -> Any:
        if snapshot_id == "snap-0":
            raise PermissionError(errno.EACCES, "Permission denied")
        return describe(snapshot_id)

    monkeypatch.setattr(catalogue, "describe", refused)
    assert ["snap-1"] == [each.id for each in catalogue.list()]


# -- snapshots over one another -------------------------------------------------------------------


class Shelf:
    """A catalogue of snapshots that a test saves and holds.

    Attributes:
        path: Its directory.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.catalogue = path, Catalogue(str(path), "native")
        self.held: dict[str, int] = {}

    def save(
        self, name: str, *lower: str, spec: SandboxSpec | None = None, is_durable: bool = True
    ) -> None:
        read, write = os.pipe()
        os.write(write, f"content of {name}".encode())
        os.close(write)
        facts: dict[str, Any] = {"session_id": "se-1", "created_at": 1.0}
        try:
            self.catalogue.save(
                read, name, spec or SandboxSpec(), 99, lower=lower, is_durable=is_durable, **facts
            )
        finally:
            os.close(read)

    def hold(self, name: str) -> None:
        """Hold it as a sandbox does that lies over it."""
        place = self.path / name
        (place / "tree").mkdir()
        info = (place / "tree").stat()
        ready = json.dumps([layers._boot(), info.st_dev, info.st_ino])
        (place / "unpacked").write_text(ready)
        self.held[name] = layers.hold(str(place))
        assert self.held[name] >= 0

    def let_go(self, *names: str) -> None:
        for name in names:
            os.close(self.held.pop(name))
        self.catalogue.let_go(names)

    @property
    def names(self) -> list[str]:
        return sorted(os.listdir(self.path))

    @property
    def listed(self) -> list[str]:
        return [each.id for each in self.catalogue.list()]


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    made = Shelf(tmp_path / "shelf")
    yield made
    for fd in made.held.values():
        os.close(fd)


@pytest.mark.anyone
def test_all_that_one_lies_over_is_there_in_order_and_stays_with_it(shelf: Shelf) -> None:
    for name, *lower in (("a",), ("b", "a"), ("c", "b", "a"), ("other",)):
        shelf.save(name, *lower)
    for name in ("a", "b", "other"):
        shelf.catalogue.delete(name)

    assert (["a", "b", "c"], ["c"]) == (shelf.names, shelf.listed)
    assert ("b", "a") == shelf.catalogue.lower("c") == shelf.catalogue.describe("c")[2]
    fd = shelf.catalogue.content("a")
    assert b"content of a" == os.read(fd, 99)
    os.close(fd)
    for refused in (shelf.catalogue.describe, shelf.catalogue.lower, shelf.catalogue.delete):
        for name in ("a", "other"):
            with pytest.raises(SnapshotNotFound):
                refused(name)
    shelf.catalogue.delete("c")
    assert [] == shelf.names


@pytest.mark.anyone
def test_one_that_a_sandbox_lies_over_goes_with_the_sandbox(shelf: Shelf) -> None:
    for name, *lower in (("a",), ("b", "a"), ("c",)):
        shelf.save(name, *lower)
    shelf.hold("b")
    for name in ("b", "a"):
        shelf.catalogue.delete(name)
    assert ["a", "b", "c"] == shelf.names, "the one below is the sandbox's too"
    shelf.catalogue.let_go(["b", "c"])
    assert ["a", "b", "c"] == shelf.names, "it is still held"

    shelf.let_go("b")

    assert ["c"] == shelf.names
    shelf.hold("c")
    shelf.let_go("c")
    assert ["c"] == shelf.listed, "and one that was not deleted stays"


@pytest.mark.anyone
def test_a_damaged_one_is_deleted_and_keeps_no_other(shelf: Shelf) -> None:
    for name, *lower in (("a",), ("b", "a"), ("c",)):
        shelf.save(name, *lower)
    (shelf.path / "c/snapshot.json").write_text("{")
    shelf.catalogue.delete("b")
    shelf.catalogue.delete("a")
    assert ["c"] == shelf.names
    shelf.catalogue.delete("c")
    assert [] == shelf.names
    shelf.save("d")
    (shelf.path / "d/snapshot.json").unlink()
    shelf.catalogue.delete("d")
    assert [] == shelf.names


@pytest.mark.anyone
def test_a_tidy_catalogue_has_neither_halves_nor_what_was_deleted(shelf: Shelf) -> None:
    for name, *lower in (("a",), ("b", "a")):
        shelf.save(name, *lower)
    shelf.catalogue.delete("a")
    (shelf.path / "b/.tree-1").mkdir()
    (shelf.path / "b/names.new").touch()
    (shelf.path / "b/snapshot.json").rename(shelf.path / "b/deleted.json")  # killed there

    shelf.catalogue.tidy()
    assert [] == shelf.names
    shelf.save("c")
    (shelf.path / "c/.tree-1").mkdir()
    (shelf.path / "c/names.new").touch()
    shelf.catalogue.tidy()
    assert ["content.tar", "snapshot.json"] == sorted(os.listdir(shelf.path / "c"))
    Catalogue(str(shelf.path / "none"), "native").tidy()


@pytest.mark.anyone
def test_one_over_an_image_or_another_is_a_layer(shelf: Shelf) -> None:
    shelf.save("whole")
    shelf.save("over", "whole")
    shelf.save("image", spec=SandboxSpec(image="x"))
    shelf.catalogue.delete("whole")
    assert [False, True, True] == [
        shelf.catalogue.is_layer(name) for name in ("whole", "over", "image")
    ]


@pytest.mark.anyone
def test_a_description_that_is_changed_in_its_place_is_read_again(shelf: Shelf) -> None:
    """Of the same inode and size: what a process has read before is no longer true."""
    shelf.save("a")
    assert ["a"] == shelf.listed
    path = shelf.path / "a/snapshot.json"
    inode, text = path.stat().st_ino, path.read_text()
    path.write_text(text.replace("se-1", "se-2"))
    assert inode == path.stat().st_ino
    with pytest.raises(SnapshotCorrupt):
        shelf.catalogue.describe("a")
    path.write_text(text)
    assert "se-1" == shelf.catalogue.describe("a")[0].session_id


@pytest.mark.anyone
def test_a_description_of_another_format_says_so(shelf: Shelf) -> None:
    shelf.save("a")
    path = shelf.path / "a/snapshot.json"
    form = json.loads(path.read_text())
    for changed in ({"format": 2}, {"format": None}):
        new = {key: value for key, value in {**form, **changed}.items() if key != "check"}
        path.write_text(json.dumps({**new, "check": module._check(new)}))
        with pytest.raises(SnapshotCorrupt, match="unknown format"):
            shelf.catalogue.describe("a")
    path.write_text("[]")
    with pytest.raises(SnapshotCorrupt, match="unknown format"):
        shelf.catalogue.describe("a")


@pytest.mark.anyone
def test_so_many_descriptions_are_remembered(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_known", {})
    monkeypatch.setattr(module, "_MOST_KNOWN", 3)
    for name in "abcdefgh":
        shelf.save(name)
        shelf.catalogue.describe(name)
        assert len(module._known) <= 3
    (shelf.path / ".partial-i").mkdir()
    assert [*"abcdefgh"] == shelf.listed


@pytest.mark.anyone
@pytest.mark.parametrize("is_durable", [True, False])
def test_a_durable_snapshot_is_on_disk_before_and_after_its_name(
    shelf: Shelf, is_durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.save("before")
    real, synced = os.fsync, list[str]()

    def fsync(fd: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), shelf.path))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    shelf.save("a", is_durable=is_durable)

    partial = ".partial-a"
    files = [f"{partial}/content.tar", f"{partial}/snapshot.json"]
    assert ([*files, partial, "."] if is_durable else files[1:]) == synced
    assert 0o700 == stat.S_IMODE((shelf.path / "a").stat().st_mode)


@pytest.mark.root
def test_a_workspace_is_a_users_and_goes_whatever_happens(shelf: Shelf) -> None:
    for uid in (23456, os.geteuid()):
        with ExitStack() as stack:
            place = stack.enter_context(shelf.catalogue.workspace(uid))
            assert (uid, 0o700) == (os.stat(place).st_uid, stat.S_IMODE(os.stat(place).st_mode))
            Path(place, "memory").touch()
        assert [] == shelf.names
    fails = ExitStack()
    fails.enter_context(shelf.catalogue.workspace(os.geteuid()))
    fails.__exit__(KeyError, KeyError(), None)
    assert [] == shelf.names
    assert 0o700 == stat.S_IMODE(shelf.path.stat().st_mode)
