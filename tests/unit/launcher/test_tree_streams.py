"""Trees that become streams, chosen parts of them, and what a stream makes of the place it is unpacked in."""

from __future__ import annotations

import errno
import io
import json
import os
import socket
import stat
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.linux.child import result_of

from ringfence.launcher.helpers import attributes, tars, trees

pytestmark = pytest.mark.anyone


def packed(path: Path, **options: Any) -> dict[str, tarfile.TarInfo]:
    """Members by their names, without the `./` before each."""
    stream = os.memfd_create("stream")
    try:
        trees.pack(stream, str(path), **{"one_file_system": False, **options})
        data = os.pread(stream, os.fstat(stream).st_size, 0)
    finally:
        os.close(stream)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {each.name.removeprefix("./"): each for each in tar}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    top = tmp_path / "top"
    for name in ("a/x", "a/y", "b/deep/z", "c"):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(name)
    (top / "way").symlink_to("a")
    return top


@pytest.mark.parametrize(
    ("only", "found"),
    [
        (["a/x"], {"a", "a/x"}),
        (["a/x", "b/deep/z", "missing", "a/missing"], {"a", "a/x", "b", "b/deep", "b/deep/z"}),
        (["a"], {"a"}),
        (["a", "a/y"], {"a", "a/y"}),
        (["way/x"], {"way"}),
        (["c/x"], {"c"}),
        (["../outside", "a/../../outside", "./c", "/c", "a/."], {"a"}),
        ([], set()),
    ],
)
def test_chosen_paths_and_the_directories_above_them_are_packed(
    tree: Path, only: list[str], found: set[str]
) -> None:
    (tree.parent / "outside").write_text("kept")
    members = packed(tree, **trees.packing(json.dumps(only)))
    assert found == members.keys() - {"."}
    if "way" in found:
        assert members["way"].issym()


def test_options_of_a_whole_tree_are_no_choice() -> None:
    assert {"is_ours": False} == trees.packing("")
    assert {"is_ours": True} == trees.packing("ours")
    assert {"is_ours": True, "only": []} == trees.packing("[]")


def test_each_file_has_its_content_once(tree: Path) -> None:
    os.link(tree / "a" / "x", tree / "b" / "again")
    members = packed(tree)
    assert (tarfile.LNKTYPE, "./a/x") == (members["b/again"].type, members["b/again"].linkname)
    assert (tarfile.REGTYPE, 3) == (members["a/x"].type, members["a/x"].size)
    assert tarfile.REGTYPE == members["a/y"].type


def test_files_of_two_file_systems_are_two(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An inode's number says which it is only beside its file system's."""
    (tree / "b").mkdir(exist_ok=True)
    os.link(tree / "a" / "x", tree / "b" / "elsewhere")
    real = trees.Packer._stat

    def stat_of(self: trees.Packer, path: str) -> Any:
        info = real(self, path)
        found = {name: getattr(info, name) for name in dir(info) if name.startswith("st_")}
        found["st_dev"] += path.endswith("elsewhere")
        return SimpleNamespace(**found)

    monkeypatch.setattr(trees.Packer, "_stat", stat_of)
    assert tarfile.REGTYPE == packed(tree)["b/elsewhere"].type


def test_what_is_no_file_is_saved_or_refused(tree: Path) -> None:
    os.mkfifo(tree / "fifo", 0o640)
    with pytest.raises(OSError, match="is not a file, directory or link") as refused:
        packed(tree)
    assert (errno.EINVAL, str(tree / "fifo")) == (refused.value.errno, refused.value.filename)
    with socket.socket(socket.AF_UNIX) as sock:
        here = os.getcwd()
        os.chdir(tree)  # a path of a socket is short
        try:
            sock.bind("socket")
        finally:
            os.chdir(here)
        members = packed(tree, one_file_system=True)
        assert "socket" not in members
        assert members["fifo"].isfifo()
        (tree / "fifo").unlink()
        with pytest.raises(OSError, match="is not a file, directory or link"):
            packed(tree)


def test_files_may_claim_so_many_bytes_that_they_have_not(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("x", "y"):
        os.truncate(tree / "a" / name, 1 << 20)
    blocks = sum((tree / "a" / name).stat().st_blocks * 512 for name in ("x", "y"))
    monkeypatch.setattr(trees, "_MOST_HOLES", (2 << 20) - blocks)
    packed(tree)
    monkeypatch.setattr(trees, "_MOST_HOLES", (2 << 20) - blocks - 1)
    with pytest.raises(OSError, match="sparse files claim") as refused:
        packed(tree)
    assert errno.EFBIG == refused.value.errno


def stream_of(*members: tuple[str, bytes, str], **fields: Any) -> int:
    """A stream in a file: names, types, and the target of a link or the content of a file."""
    stream = os.memfd_create("stream")
    with tars.Writer(stream) as tar:
        for name, kind, said in members:
            info = tarfile.TarInfo(name)
            info.type, info.uid, info.gid = kind, os.getuid(), os.getgid()
            for field, value in fields.items():
                setattr(info, field, value)
            if kind == tarfile.REGTYPE:
                content = os.memfd_create("content")
                os.write(content, said.encode())
                os.lseek(content, 0, os.SEEK_SET)
                info.size = len(said.encode())
                tar.add(info, content)
                os.close(content)
            else:
                info.linkname = said
                tar.add(info)
    os.lseek(stream, 0, os.SEEK_SET)
    return stream


def unpacked(place: Path, stream: int, *, one_file_system: bool = True, **more: Any) -> list[Any]:
    """What refuses it: number, text and name; none of them where nothing does."""

    def unpack() -> list[Any]:
        try:
            trees.unpack(stream, str(place), one_file_system=one_file_system, **more)
        except OSError as exc:
            return [exc.errno, exc.strerror, exc.filename]
        return []

    try:
        said: list[Any] = result_of(unpack)
        return said
    finally:
        os.close(stream)


FILE, DIRECTORY, LINK = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE


def test_directories_get_their_modes_and_times_once_they_are_filled(tmp_path: Path) -> None:
    place = tmp_path / "place"
    members = ("d", DIRECTORY, ""), ("d/e", DIRECTORY, ""), ("d/e/f", FILE, "x"), ("d/g", FILE, "y")
    assert [] == unpacked(place, stream_of(*members, mode=0o7555, mtime=1_000_000))
    for name in ("d", "d/e", "d/e/f", "d/g"):
        info = (place / name).stat()
        assert (0o1555, 1_000_000) == (stat.S_IMODE(info.st_mode), info.st_mtime), name
    assert ("x", "y") == ((place / "d/e/f").read_text(), (place / "d/g").read_text())
    (place / "d").chmod(0o700)
    (place / "d" / "e").chmod(0o700)


def test_what_is_there_is_replaced_and_never_written_through(tmp_path: Path) -> None:
    place, outside = tmp_path / "place", tmp_path / "outside"
    place.mkdir()
    outside.write_text("kept")
    (place / "link").symlink_to(outside)
    (place / "file").write_text("longer than the other")
    os.link(place / "file", tmp_path / "other name")
    (place / "other").write_text("x")
    (place / "directory").symlink_to(tmp_path)
    members = ("link", FILE, "new"), ("file", FILE, "new"), ("other", LINK, "aim")
    assert [] == unpacked(place, stream_of(*members))
    assert ["new", "new"] == [(place / name).read_text() for name in ("link", "file")]
    assert "aim" == os.readlink(place / "other")
    assert ("kept", "longer than the other") == (
        outside.read_text(),
        (tmp_path / "other name").read_text(),
    )
    said = unpacked(place, stream_of(("directory", DIRECTORY, "")))
    assert [errno.ELOOP, "would go through a symlink", "directory"] == said
    said = unpacked(place, stream_of(("directory/file", FILE, "x")))
    assert [errno.ELOOP, "would go through a symlink", "directory/file"] == said
    said = unpacked(place, stream_of(("file/below", FILE, "x")))
    assert errno.ENOTDIR == said[0]


def test_names_of_neighbours_lead_to_their_own_directories(tmp_path: Path) -> None:
    names = [
        "a/b/c/1",
        "a/b/c/2",
        "a/b/3",
        "a/d/c/4",
        "a/b/c/5",
        "6",
        "a/b/c/7",
        "./a/./d//8",
        "a/b/c/./9",
    ]
    place = tmp_path / "place"
    for name in ("a/b/c", "a/d/c"):
        (place / name).mkdir(parents=True)
    assert [] == unpacked(place, stream_of(*((name, FILE, name) for name in names)))
    assert names == [(place / name).read_text() for name in names]


def test_only_what_is_restored_has_more_than_files(tmp_path: Path) -> None:
    place = tmp_path / "place"
    fifo = ("fifo", tarfile.FIFOTYPE, "")
    said = unpacked(place, stream_of(fifo), one_file_system=False)
    assert [errno.EINVAL, "is not a file, directory or link", "fifo"] == said
    device = ("device", tarfile.CHRTYPE, "")
    assert [] == unpacked(place, stream_of(fifo, device, mode=0o640))
    assert ["fifo"] == os.listdir(place)
    info = (place / "fifo").stat()
    assert stat.S_ISFIFO(info.st_mode)
    assert 0o640 == stat.S_IMODE(info.st_mode)
    (place / "fifo").unlink()
    (place / "fifo").write_text("before")
    assert [] == unpacked(place, stream_of(fifo))
    assert stat.S_ISFIFO((place / "fifo").stat().st_mode)


def test_what_is_no_whole_stream_is_said_to_be_none(tmp_path: Path) -> None:
    stream = stream_of(("file", FILE, "x" * 1000))
    os.ftruncate(stream, 700)
    number, text, _ = unpacked(tmp_path / "place", stream)
    assert errno.EINVAL == number
    assert text.startswith("is not a whole, uncompressed tar stream")


def test_who_unpacks_may_choose_the_places_and_hears_of_each(tmp_path: Path) -> None:
    place = tmp_path / "place"
    members = ("top/a", FILE, "one"), ("top/b", tarfile.LNKTYPE, "top/a"), ("top/c", FILE, "no")
    stream = stream_of(*members)
    told: list[tuple[str, str]] = []
    digests: dict[int, bytes] = {}

    def prepare(member: tarfile.TarInfo, target: str) -> bool:
        told.append((member.name, target))
        return not member.name.endswith("c")

    def unpack() -> list[Any]:
        trees.unpack(
            stream,
            str(place),
            one_file_system=False,
            prepare=prepare,
            place=lambda name: name.replace("top", "."),
            digests=digests,
        )
        return [told, [digest.hex() for digest in digests.values()], list(digests)]

    names, found, inodes = result_of(unpack)
    os.close(stream)
    wanted = tars.new_digest()
    wanted.update(b"one")
    assert [["./a", "./a"], ["./b", "./b"], ["./c", "./c"]] == names
    assert [wanted.hexdigest()] == found
    assert [(place / "a").stat().st_ino, 2] == [*inodes, (place / "b").stat().st_nlink]
    assert ["a", "b"] == sorted(os.listdir(place))


@pytest.fixture
def has_attributes(tmp_path: Path) -> None:
    (tmp_path / "tried").touch()
    try:
        os.setxattr(tmp_path / "tried", "user.tried", b"")
    except OSError:
        pytest.skip("this file system has no extended attributes of users")


@pytest.mark.usefixtures("has_attributes")
def test_attributes_are_read_and_set_anew(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0o640)
        for attribute in ("p.kept", "p.gone", "other"):
            os.setxattr(tmp_path / name, f"user.{attribute}", b"old")

    def asked(names: list[str], wanted: dict[str, str] | None) -> list[Any]:
        reading, writing = os.pipe()
        options = json.dumps({"names": names, "prefix": "user.p.", "set": wanted})
        try:
            attributes.attributes(writing, str(tmp_path), options)
        finally:
            os.close(writing)
            with open(reading, encoding="utf-8") as file:
                lines = [json.loads(line) for line in file]
        assert {"done": True} == lines.pop()
        return [(os.path.basename(each["path"]), each["attributes"]) for each in lines]

    old = {"kept": "old", "gone": "old"}
    assert [("two", old), ("missing", {})] == asked(["two", "missing"], None)
    before = (tmp_path / "one").stat().st_ctime_ns
    assert [("one", {"kept": "new", "made": "x"})] == asked(["one"], {"kept": "new", "made": "x"})
    names = {"user.p.kept", "user.p.made", "user.other"}
    assert names == set(os.listxattr(tmp_path / "one"))
    assert 0o640 == stat.S_IMODE((tmp_path / "one").stat().st_mode)
    assert before < (tmp_path / "one").stat().st_ctime_ns
    assert [("two", {})] == asked(["two"], {})
    assert ["user.other"] == os.listxattr(tmp_path / "two")
    with pytest.raises(FileNotFoundError):
        asked(["missing"], {})
