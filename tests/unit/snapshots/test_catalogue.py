"""What a runtime leaves as a guest's memory is taken in as a file, and as nothing else."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
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
