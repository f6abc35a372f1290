"""Streams that are unpacked inside a sandbox, as its root too: every name in them is below the destination."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.anyone

# In a process of its own, whose directory and umask it changes.
_UNPACK = """
import sys
from ringfence.launcher.helpers import trees
try:
    trees.unpack(0, sys.argv[1], one_file_system=bool(sys.argv[2]))
except OSError as exc:
    print(exc.strerror)
"""


def unpacked(place: Path, members: list[tuple[str, bytes, str]], *, is_snapshot: bool) -> str:
    """Unpack members of a name, a type, and the target of a link or the content; returns the refusal."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for name, kind, said in members:
            info, data = tarfile.TarInfo(name), b""
            info.type, info.mode, info.uid, info.gid = kind, 0o644, os.getuid(), os.getgid()
            if kind == tarfile.REGTYPE:
                data = said.encode()
                info.size = len(data)
            else:
                info.linkname = said
            tar.addfile(info, io.BytesIO(data))
    return subprocess.run(
        [sys.executable, "-c", _UNPACK, str(place), "yes" * is_snapshot],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        input=raw.getvalue(),
        capture_output=True,
        check=True,
    ).stdout.decode()


@pytest.mark.parametrize("is_snapshot", [False, True])
def test_a_hard_link_to_a_symlink_is_another_name_of_the_link(
    tmp_path: Path, is_snapshot: bool
) -> None:
    """The kernel would else give the file outside a name inside, and what is written to that goes there."""
    outside, place = tmp_path / "outside", tmp_path / "place"
    outside.write_text("kept")
    members = [
        ("link", tarfile.SYMTYPE, str(outside)),
        ("name", tarfile.LNKTYPE, "link"),
        ("relative", tarfile.SYMTYPE, "../outside"),
        ("other", tarfile.LNKTYPE, "relative"),
    ]

    assert "" == unpacked(place, members, is_snapshot=is_snapshot)

    assert 1 == outside.stat().st_nlink
    assert str(outside) == os.readlink(place / "name")
    assert "../outside" == os.readlink(place / "other")


@pytest.mark.parametrize("is_snapshot", [False, True])
def test_a_hard_link_takes_the_place_of_what_was_there(tmp_path: Path, is_snapshot: bool) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "name").write_text("before")
    members = [("file", tarfile.REGTYPE, "content"), ("name", tarfile.LNKTYPE, "file")]

    assert "" == unpacked(place, members, is_snapshot=is_snapshot)

    assert "content" == (place / "name").read_text()
    assert 2 == (place / "file").stat().st_nlink


@pytest.mark.parametrize("name", ["../outside", "/{}/outside", "way/outside", "a/../../outside"])
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_no_name_and_no_target_of_a_hard_link_leads_out(
    tmp_path: Path, name: str, kind: bytes
) -> None:
    outside, place = tmp_path / "outside", tmp_path / "place"
    outside.write_text("kept")
    place.mkdir()
    (place / "way").symlink_to("..")
    name = name.format(tmp_path)
    members = [("file", tarfile.REGTYPE, "content"), (name, kind, "file")]
    if kind == tarfile.LNKTYPE:
        members.append(("inside", kind, name))

    for each in (members, [members[0], members[-1]]):
        assert unpacked(place, each, is_snapshot=True) != ""

    assert "kept" == outside.read_text()
    assert 1 == outside.stat().st_nlink
