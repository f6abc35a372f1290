"""Mounts in mounts, and many of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringfence import Mount, Sandbox
from ringfence.errors import InvalidRequest
from ringfence.model.mount import READ_WRITE
from tests.native.conftest import MakeSandbox


@pytest.fixture
def outer(tmp_path: Path) -> Path:
    """A host directory with a directory, a file and a link in it."""
    path = tmp_path / "outer"
    (path / "inner").mkdir(parents=True)
    (path / "file").write_text("file")
    (path / "link").symlink_to("inner")
    return path


@pytest.fixture
def other(tmp_path: Path) -> Path:
    path = tmp_path / "other"
    path.mkdir()
    (path / "kept").write_text("kept")
    return path


def test_a_mount_point_lives_as_long_as_the_sandbox(
    make: MakeSandbox, outer: Path, other: Path
) -> None:
    """Absent in the writable mount around it, it is made there, for as long as it is needed."""
    mounts = [Mount("/data", str(outer), READ_WRITE), Mount("/data/new/deep", str(other))]
    sandbox = make(mounts=mounts)

    shown = sandbox.shell("cat /data/new/deep/kept; echo x > /data/new/deep/kept")
    assert "kept" == shown.stdout_text
    assert not shown.ok
    assert not sandbox.shell("mv /data/new /data/moved || rmdir /data/new/deep").ok
    assert "kept" == (other / "kept").read_text()

    sandbox.terminate()
    assert ["file", "inner", "link"] == sorted(os.listdir(outer))


@pytest.mark.parametrize(
    ("inside", "is_file"),
    [("/data/absent", False), ("/data/inner", True), ("/data/file", False), ("/data/link", False)],
)
def test_where_nothing_can_be_mounted(
    make: MakeSandbox, outer: Path, other: Path, inside: str, is_file: bool
) -> None:
    """In a read-only mount nothing is made, and kinds must fit: the target is named, with the reason."""
    source = str(other / "kept" if is_file else other)
    mounts = [Mount("/data", str(outer)), Mount(inside, source)]

    with pytest.raises(InvalidRequest, match=f"{inside}: nothing can be mounted there") as refusal:
        make(mounts=mounts)

    assert "mounts.target" == refusal.value.field
    assert refusal.value.hint


def test_as_many_mounts_as_there_may_be(make: MakeSandbox, other: Path) -> None:
    """And one more is refused; neither costs the sandboxes that live already anything."""
    before = make()
    mounts = [Mount(f"/data/{i}", str(other)) for i in range(201)]

    sandbox = make(mounts=mounts[:-1])
    assert "200\n" == sandbox.shell("cat /data/*/kept | grep -o kept | wc -l").stdout_text
    with pytest.raises(InvalidRequest, match="201 are more than 200"):
        Sandbox.create(mounts=mounts)

    assert before.shell("true").ok
