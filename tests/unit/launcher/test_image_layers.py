"""What a sandbox changed of its image is saved, and comes back; the image's own stays where it is."""

from __future__ import annotations

import errno
import io
import marshal
import os
import tarfile
from pathlib import Path

import pytest

from ringfence.launcher.helpers import layers


def names_of(root: Path) -> dict[bytes, dict[bytes, int]]:
    """What an image has: each directory's entries, and when each was made what it is."""
    found: dict[bytes, dict[bytes, int]] = {}
    for directory, _, _ in os.walk(os.fsencode(root)):
        found[directory[1:]] = {
            entry.name: entry.stat(follow_symlinks=False).st_ctime_ns
            for entry in os.scandir(directory)
        }
    return found


def packed(root: Path, names: dict[bytes, dict[bytes, int]], mounted: set[str]) -> bytes:
    reading = os.memfd_create("names")
    os.write(reading, marshal.dumps(names))
    os.lseek(reading, 0, 0)
    stream = os.memfd_create("layer")
    try:
        layers.pack(stream, reading, str(root), one_file_system=True, mounted=mounted)
        return os.pread(stream, os.fstat(stream).st_size, 0)
    finally:
        os.close(reading)
        os.close(stream)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "kept" / "deep").mkdir(parents=True)
    for name in ("kept/deep/file", "kept/changed", "kept/gone", "kept/becomes"):
        (root / name).write_text("image")
    (root / "gone" / "below").mkdir(parents=True)
    (root / "turns").mkdir()
    return root


def test_only_changes_are_saved_and_what_is_gone_is_told(root: Path) -> None:
    names = names_of(root)
    (root / "kept" / "changed").write_text("changed")
    (root / "kept" / "gone").unlink()
    (root / "gone" / "below").rmdir()
    (root / "gone").rmdir()
    (root / "new").write_text("new")
    (root / "shown").mkdir()
    (root / "shown" / "mounted").write_text("of the host")

    data = packed(root, names, {str(root / "shown")})

    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        found = {m.name.removeprefix("./"): m for m in tar.getmembers()}
        files = {n for n, m in found.items() if m.isreg()}
        assert {"kept/changed", "new", "kept/.wh.gone", ".wh.gone"} == files
        content = tar.extractfile(found["kept/changed"])
        assert content is not None
        assert b"changed" == content.read()


@pytest.mark.parametrize("name", [".wh.x", ".wh."])
def test_a_name_that_would_read_as_a_whiteout_is_refused(root: Path, name: str) -> None:
    names = names_of(root)
    (root / name).touch()

    with pytest.raises(OSError, match="cannot be saved") as refused:
        packed(root, names, set())
    assert errno.EINVAL == refused.value.errno
    layers.check_name("/x/wh.x")
    layers.check_name("/.wh.x/x")


def member(name: str, *, directory: bool = False) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = tarfile.DIRTYPE if directory else tarfile.REGTYPE
    return info


def test_way_is_made_for_a_member_and_for_nothing_else(root: Path) -> None:
    def prepare(name: str, *, directory: bool = False) -> bool:
        return layers.prepare(member(name, directory=directory), str(root / name))

    assert not prepare(".wh.gone")
    assert not (root / "gone").exists()
    assert not prepare("kept/.wh.gone")
    assert not (root / "kept" / "gone").exists()
    assert not prepare(".wh.absent")
    assert prepare("turns")  # a directory becomes a file
    assert not (root / "turns").exists()
    assert prepare("kept/becomes", directory=True)  # and a file one
    assert not (root / "kept" / "becomes").exists()
    assert prepare("kept", directory=True)
    assert prepare("kept/changed")
    assert prepare("absent")
    assert ["changed", "deep"] == sorted(os.listdir(root / "kept"))


def test_mount_points_are_read_as_the_kernel_writes_them(tmp_path: Path) -> None:
    lines = "1 2 0:1 / / rw - tmpfs none rw\n3 1 0:2 / /a\\040b rw - tmpfs none rw\n"
    lines += "4 1 0:3 / /c\\134d\\011\\012 rw - tmpfs none rw\n"
    (tmp_path / "mountinfo").write_text(lines)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        assert {"/a b", "/c\\d\t\n"} == layers.find_mounted(fd)
    finally:
        os.close(fd)
    assert "/proc" in layers.find_mounted()
