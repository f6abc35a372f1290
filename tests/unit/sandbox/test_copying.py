"""Files that are copied in and out of a sandbox of this process: holes, sizes, errors, and what stays open."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from tests.native.outside import same_descriptors

from ringfence.errors import (
    FileError,
    FileExists,
    FileNotFound,
    InvalidRequest,
    IoError,
    IsADirectory,
    NotADirectory,
    PermissionDenied,
    ResourceExhausted,
)
from ringfence.model.files import DIRECTORY, FILE, SYMLINK, FileInfo
from ringfence.model.mount import READ_ONLY, READ_WRITE
from ringfence.model.session import ResolvedMount
from ringfence.sandbox import files as room
from ringfence.sandbox.files import Files, _copy, _data_of

pytestmark = pytest.mark.anyone

MIB = 1 << 20


def sparse(path: Path, *parts: tuple[int, bytes], size: int = 0) -> bytes:
    """Make a file with data at these places only; its whole content."""
    with path.open("wb") as file:
        for offset, data in parts:
            file.seek(offset)
            file.write(data)
        file.truncate(max(size, file.tell()))
    return path.read_bytes()


SHAPES: dict[str, tuple[tuple[tuple[int, bytes], ...], int]] = {
    "data alone": (((0, b"x" * 5000),), 0),
    "a hole at the beginning": (((4 * MIB, b"end"),), 0),
    "a hole in the middle": (((0, b"begin"), (4 * MIB, b"end")), 0),
    "a hole at the end": (((0, b"begin"),), 4 * MIB),
    "holes everywhere": (((2 * MIB, b"a"), (4 * MIB, b"b")), 6 * MIB),
    "a hole alone": ((), 3 * MIB),
    "nothing": ((), 0),
    "more than one piece": (((0, os.urandom(9 * MIB + 1)),), 0),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_sparse_file_is_the_same_and_as_sparse(shape: str, tmp_path: Path) -> None:
    parts, size = SHAPES[shape]
    whole, seen = sparse(tmp_path / "source", *parts, size=size), list[tuple[int, str]]()
    with open(tmp_path / "source", "rb") as source, open(tmp_path / "target", "wb") as target:
        _copy(source, target, "n", lambda count, name: seen.append((count, name)))
    assert whole == (tmp_path / "target").read_bytes()
    taken = [os.stat(tmp_path / name).st_blocks for name in ("source", "target")]
    assert taken[1] <= taken[0] + 16
    counts = [count for count, _ in seen]
    assert counts == sorted(set(counts)), "it grows with each call"
    assert not seen or {"n"} == {name for _, name in seen}
    with open(tmp_path / "source", "rb") as source:
        found = [*_data_of(source.fileno())]
    assert all(start < end for start, end in found)
    assert counts[-1:] == [sum(end - start for start, end in found)] * bool(counts)


class _Stream(io.BytesIO):
    """As a guest's: bytes in their order, at no place."""

    def seekable(self) -> bool:
        return False

    def fileno(self) -> int:
        raise io.UnsupportedOperation("fileno")

    def close(self) -> None:
        self.last = self.getvalue()
        super().close()


@pytest.mark.parametrize(
    "kinds", ["file stream", "stream file", "file memory", "memory file", "proc file"]
)
@pytest.mark.parametrize("size", [0, 5, room._CHUNK, 2 * room._CHUNK + 7])
def test_what_the_kernel_cannot_copy_goes_through_a_buffer(
    kinds: str, size: int, tmp_path: Path
) -> None:
    data, seen = os.urandom(size), list[int]()
    make: dict[str, Callable[[str], Any]] = {
        "stream": lambda _: _Stream(),
        "memory": lambda _: io.BytesIO(),
        "file": lambda name: (tmp_path / name).open("w+b"),
        "proc": lambda _: Path("/proc/version").open("rb"),  # noqa: SIM115  closed below
    }
    kind_of_source, kind_of_target = kinds.split()
    source, target = make[kind_of_source]("source"), make[kind_of_target]("target")
    with source, target:
        if kind_of_source == "proc":
            data = Path("/proc/version").read_bytes()
        else:
            source.write(data)
            source.flush()
            source.seek(0) if source.seekable() else io.BytesIO.seek(source, 0)
        _copy(source, target, "n", lambda count, _: seen.append(count))
        target.flush()
        found = target.getvalue() if hasattr(target, "getvalue") else None
    assert data == (found if found is not None else (tmp_path / "target").read_bytes())
    assert not data or len(data) == seen[-1]


# -- through `sandbox.files` -----------------------------------------------------------------------


class Inner:
    """The files of a backend, in a directory; each operation is noted, and may fail.

    Attributes:
        fails: What the streams of an operation raise where they are used.
    """

    def __init__(self, top: Path) -> None:
        self.top, self.asked, self.fails = top, list[tuple[Any, ...]](), dict[str, OSError]()

    def stat(self, path: str) -> FileInfo:
        self.asked.append(("stat", path))
        where = self.top / path.lstrip("/")
        if not os.path.lexists(where):
            raise FileNotFound("none", path=path)
        kind = SYMLINK if where.is_symlink() else DIRECTORY if where.is_dir() else FILE
        target = os.readlink(where) if kind == SYMLINK else None
        absolute = path if path.startswith("/") else f"/{path}"
        return FileInfo(absolute, where.name, kind, 1, 0o644, 1.0, target)

    def open_read(self, path: str) -> BinaryIO:
        self.asked.append(("open_read", path))
        return _Failing((self.top / path).open("rb"), self.fails.get("read"))  # type: ignore[return-value]

    def open_write(self, path: str, *, append: bool = False, mode: int = 0o644) -> BinaryIO:
        self.asked.append(("open_write", path, append, mode))
        try:
            file = (self.top / path).open("ab" if append else "wb")
        except FileNotFoundError:
            raise FileNotFound("none", path=path) from None
        return _Failing(file, self.fails.get("write"))  # type: ignore[return-value]

    def make_dir(self, path: str, *, parents: bool) -> None:
        self.asked.append(("make_dir", path, parents))
        (self.top / path).mkdir(parents=parents)

    def upload_tree(self, local: str, remote: str, *, progress: Any) -> None:
        self.asked.append(("upload_tree", remote, sorted(os.listdir(local))))
        if progress:
            progress(7, f"{local}/x")

    def download_tree(self, remote: str, local: str, *, overwrite: bool, progress: Any) -> None:
        self.asked.append(("download_tree", remote, overwrite))
        os.makedirs(local, exist_ok=True)
        Path(local, "x").write_text("x")


class _Failing:
    """A file whose content cannot be read or written, or only at its end."""

    def __init__(self, file: Any, exc: OSError | None) -> None:
        self._file, self._exc = file, exc

    def __enter__(self) -> _Failing:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        if self._exc is not None and name in ("read", "write", "flush", "seek", "fileno"):
            raise self._exc
        return getattr(self._file, name)


@pytest.fixture(name="inner")
def fixture_inner(tmp_path: Path) -> Inner:
    (tmp_path / "inside").mkdir()
    return Inner(tmp_path / "inside")


def files_of(inner: Inner, *mounts: ResolvedMount) -> Files:
    return Files(inner, lambda: mounts)  # type: ignore[arg-type]


def mounted(host: Path, access: str = READ_WRITE) -> ResolvedMount:
    return ResolvedMount.from_json({"host_path": str(host), "target": "/m", "access": access})


ERRORS = {
    errno.ENOSPC: ResourceExhausted,
    errno.EDQUOT: ResourceExhausted,
    errno.EACCES: PermissionDenied,
    errno.EISDIR: IsADirectory,
    errno.ENOTDIR: NotADirectory,
}


@pytest.mark.parametrize("number", ERRORS)
def test_errors_of_a_stream_have_their_class_and_path(
    number: int, inner: Inner, tmp_path: Path
) -> None:
    """And the stream is closed."""
    files, error = files_of(inner), ERRORS[number]
    (tmp_path / "here").write_text("data")
    (inner.top / "f").write_text("data")
    failure = OSError(number, "so")
    calls: list[Callable[[], object]] = [
        lambda: files.write("f", "x"),
        lambda: files.upload(str(tmp_path / "here"), "f"),
        lambda: files.read("f"),
        lambda: files.read("f", offset=1, max_bytes=1),
    ]
    for call in calls:
        inner.fails = {}
        call()
        inner.fails = {"write": failure, "read": failure}
        with same_descriptors(), pytest.raises(error, match="f"):
            call()


def test_a_file_is_uploaded_with_its_permissions_and_no_more(inner: Inner, tmp_path: Path) -> None:
    (tmp_path / "here").write_bytes(b"data")
    (tmp_path / "here").chmod(0o6755)
    with same_descriptors():
        files_of(inner).upload(str(tmp_path / "here"), "f")
        with pytest.raises(FileNotFound):
            files_of(inner).upload(str(tmp_path / "none"), "g")
    assert [("open_write", "f", False, 0o755)] == inner.asked
    assert b"data" == (inner.top / "f").read_bytes()


def test_directories_are_made_once_and_the_file_is_as_asked(inner: Inner) -> None:
    files = files_of(inner)
    with pytest.raises(FileNotFound):
        files.write("a/b/f", b"x")
    assert [("open_write", "a/b/f", False, 0o644)] == inner.asked
    inner.asked.clear()
    files.write("a/b/f", "ä", append=True, mode=0o600, parents=True)
    opened = ("open_write", "a/b/f", True, 0o600)
    assert [opened, ("make_dir", "a/b", True), opened] == inner.asked
    files.write("a/b/f", b"+", append=True, parents=True)
    assert "ä+" == files.read_text("a/b/f")
    for wrong in ({"mode": 0o1000}, {"mode": -1}, {"data": 5}):
        with pytest.raises(InvalidRequest):
            files.write("a/b/f", **{"data": b"", **wrong})  # type: ignore[arg-type]
    assert "ä+" == files.read_text("a/b/f"), "it was not emptied"
    for mode in (0o1000, -1):
        with pytest.raises(InvalidRequest):
            files.open_write("a/b/f", mode=mode)
    assert "ä+" == files.read_text("a/b/f")


def test_a_download_replaces_only_where_asked_and_leaves_no_half(
    inner: Inner, tmp_path: Path
) -> None:
    (inner.top / "f").write_text("theirs")
    (tmp_path / "mine").write_text("mine, and longer")
    for mounts in ((), (mounted(tmp_path),)):
        files, new = files_of(inner, *mounts), tmp_path / f"new{len(mounts)}"
        with same_descriptors():
            with pytest.raises(FileExists):
                files.download("f", str(tmp_path / "mine"))
            files.download("f", str(new))
        assert ("mine, and longer", "theirs") == ((tmp_path / "mine").read_text(), new.read_text())
    with same_descriptors():
        inner.fails = {"read": OSError(errno.EIO, "so")}
        with pytest.raises((IoError, OSError)):
            files_of(inner).download("f", str(tmp_path / "half"))
        assert not (tmp_path / "half").exists()
        inner.fails = {}
        for mounts in ((), (mounted(tmp_path),)):
            (tmp_path / "mine").write_text("mine, and longer")
            files_of(inner, *mounts).download("f", str(tmp_path / "mine"), overwrite=True)
            assert "theirs" == (tmp_path / "mine").read_text()


def test_a_symlink_in_a_mounted_directory_leads_no_copy(inner: Inner, tmp_path: Path) -> None:
    """A program inside may have put it there. The control is a mount that it can only read."""
    shared, secret = tmp_path / "shared", tmp_path / "secret"
    shared.mkdir()
    secret.mkdir()
    (secret / "f").write_text("secret")
    (shared / "link").symlink_to(secret)
    (shared / "file").symlink_to(secret / "f")
    (inner.top / "f").write_text("theirs")
    (inner.top / "d").mkdir()
    files = files_of(inner, mounted(shared))
    calls: list[Callable[[Files], None]] = [
        lambda f: f.upload(str(shared / "link" / "f"), "up"),
        lambda f: f.upload(str(shared / "file"), "up"),
        lambda f: f.upload(str(shared / "link"), "up"),
        lambda f: f.download("f", str(shared / "link" / "f"), overwrite=True),
        lambda f: f.download("f", str(shared / "file"), overwrite=True),
        lambda f: f.download("f", str(shared / "link" / "new")),
        lambda f: f.download("d", str(shared / "link")),
        lambda f: f.download("d", str(shared / "link" / "deep")),
    ]
    for number, call in enumerate(calls):
        with same_descriptors(), pytest.raises(FileError, match="symlink is on the way"):
            call(files)
        assert ["secret"] == [each.read_text() for each in secret.iterdir()], number
    assert not (inner.top / "up").exists()
    for call in calls:
        with same_descriptors():
            call(files_of(inner, mounted(shared, READ_ONLY)))
    assert "theirs" == (secret / "f").read_text()


def test_a_pipe_in_a_mounted_directory_is_refused_and_not_waited_for(
    inner: Inner, tmp_path: Path
) -> None:
    """A program inside may have made it. One end of it is held here, so that a download would find a reader."""
    (shared := tmp_path / "shared").mkdir()
    (tmp_path / "by another name").symlink_to(shared)
    os.mkfifo(shared / "pipe")
    (shared / "file").write_text("data")
    (inner.top / "f").write_text("theirs")
    for top in (shared, tmp_path / "by another name"):
        files, there = files_of(inner, mounted(top)), str(top / "pipe")
        with same_descriptors():
            with pytest.raises(FileError, match="not a file or directory"):
                files.upload(there, "up")
            reader = os.open(there, os.O_RDONLY | os.O_NONBLOCK)
            try:
                with pytest.raises(FileError, match="not a file or directory"):
                    files.download("f", there, overwrite=True)
                assert b"" == os.read(reader, 9)
            finally:
                os.close(reader)
            files.upload(str(top / "file"), "up")
        assert b"data" == (inner.top / "up").read_bytes()
        (inner.top / "up").unlink()


@pytest.mark.parametrize("name", ["mount", "realpath"])
def test_a_mount_is_known_by_its_own_directory(name: str, inner: Inner, tmp_path: Path) -> None:
    """However its source was written, and by whatever way the caller comes there."""
    (shared := tmp_path / "shared").mkdir()
    (tmp_path / "other name").symlink_to(shared)
    (tmp_path / "secret").write_text("secret")
    (shared / "link").symlink_to(tmp_path / "secret")
    source = tmp_path / "other name" if name == "mount" else shared
    for way in (shared, tmp_path / "other name", shared / ".." / "shared"):
        with pytest.raises(FileError, match="symlink is on the way"):
            files_of(inner, mounted(source)).upload(str(way / "link"), "up")
    assert [] == inner.asked


def test_trees_go_through_the_directory_that_was_looked_at(inner: Inner, tmp_path: Path) -> None:
    shared, seen = tmp_path / "shared", list[tuple[int, str]]()
    (shared / "tree").mkdir(parents=True)
    (shared / "tree" / "x").write_text("x")
    (inner.top / "d").mkdir()
    for files in (files_of(inner), files_of(inner, mounted(shared))):
        with same_descriptors():
            seen.clear()
            inner.asked.clear()
            files.upload(
                str(shared / "tree"), "t", progress=lambda count, name: seen.append((count, name))
            )
            assert [("upload_tree", "t", ["x"])] == inner.asked
            assert 7 == seen[0][0]
            assert seen[0][1].startswith(f"{shared}/tree/"), "it is told of by its own name"
            deep = shared / f"{len(os.listdir(shared))}" / "deep"
            deep.parent.mkdir()
            deep.mkdir()
            files.download("d", str(deep), overwrite=True)
            assert ("download_tree", "d", True) == inner.asked[-1]
            assert "x" == (deep / "x").read_text()


def test_a_link_is_followed_from_its_own_directory(inner: Inner) -> None:
    (inner.top / "a").mkdir()
    (inner.top / "a" / "near").symlink_to("../b")
    (inner.top / "b").write_text("b")
    (inner.top / "abs").symlink_to("/a/near")
    files = files_of(inner)
    assert "b" == files.stat("abs", follow=True).name
    assert [("stat", "abs"), ("stat", "/a/near"), ("stat", "/a/../b")] == inner.asked
    assert "/a/near" == files.stat("abs").link_target
    for count, error in ((39, None), (40, FileError)):
        for number in range(count):
            (inner.top / f"{count}-{number}").symlink_to(f"{count}-{number + 1}")
        (inner.top / f"{count}-{count}").write_text("end")
        if error is None:
            assert FILE == files.stat(f"{count}-0", follow=True).kind
        else:
            with pytest.raises(error, match="symbolic links"):
                files.stat(f"{count}-0", follow=True)


def test_only_what_is_not_there_does_not_exist(
    inner: Inner, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = files_of(inner)
    (inner.top / "dangling").symlink_to("none")
    assert (True, False) == (files.exists("dangling"), files.exists("none"))
    for error, exists in ((NotADirectory("x"), False), (PermissionDenied("x"), None)):

        def fail(_: str, exc: Exception = error) -> FileInfo:
            raise exc

        monkeypatch.setattr(inner, "stat", fail)
        if exists is None:
            with pytest.raises(PermissionDenied):
                files.exists("f")
        else:
            assert exists is files.exists("f")


def test_copies_follow_a_sandbox_that_takes_its_place(inner: Inner, tmp_path: Path) -> None:
    files = files_of(inner)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "f").write_text("other")
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "link").symlink_to(tmp_path / "other")
    files._lead_to(Inner(tmp_path / "other"), lambda: [mounted(shared)])  # type: ignore[arg-type]
    assert "other" == files.read_text("f")
    with pytest.raises(FileError, match="symlink is on the way"):
        files.upload(str(shared / "link" / "f"), "up")
