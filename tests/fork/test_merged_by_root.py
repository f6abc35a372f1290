"""Merges by root into a directory of another user."""

from __future__ import annotations

import io
import os
import tarfile
from functools import partial
from pathlib import Path
from typing import BinaryIO

import pytest

from ringfence import SandboxSpec
from ringfence.fork import merging
from tests.fork.test_three_way import member, pack, write

pytestmark = pytest.mark.root

OWNER = 12345


def test_what_a_merge_makes_belongs_to_the_owner_of_the_target(tmp_path: Path) -> None:
    """Files and directories; of set-group-id bits none reaches the host."""
    root = write(tmp_path / "x", {"a": "1\n"})
    os.chown(root, OWNER, OWNER)

    def theirs(file: BinaryIO) -> None:
        with tarfile.open(fileobj=file, mode="w") as tar:
            tar.addfile(member(".", tarfile.DIRTYPE, 0o755))
            tar.addfile(member("./d", tarfile.DIRTYPE, 0o2750))
            script = member("./d/b", tarfile.REGTYPE, 0o600)
            script.size = 2
            tar.addfile(script, io.BytesIO(b"1\n"))

    found = merging.into_host(
        partial(merging.whole, lambda file: pack({}, file), theirs),
        str(root),
        SandboxSpec(),
        prefer=None,
        dry_run=False,
    )

    assert found.is_applied
    made = [(root / each).stat() for each in ("d", "d/b")]
    assert [(OWNER, OWNER, 0o750), (OWNER, OWNER, 0o600)] == [
        (each.st_uid, each.st_gid, each.st_mode & 0o7777) for each in made
    ]


def test_a_directory_that_is_there_keeps_its_owner_and_gets_its_mode(tmp_path: Path) -> None:
    root = write(tmp_path / "x", {"d/a": "1\n"})
    os.chown(root, OWNER, OWNER)
    os.chown(root / "d", OWNER + 1, OWNER + 2)
    (root / "d").chmod(0o755)

    def tree(mode: int, file: BinaryIO) -> None:
        with tarfile.open(fileobj=file, mode="w") as tar:
            tar.addfile(member(".", tarfile.DIRTYPE, 0o755))
            tar.addfile(member("./d", tarfile.DIRTYPE, mode))

    found = merging.into_host(
        partial(merging.whole, partial(tree, 0o755), partial(tree, 0o2750)),
        str(root),
        SandboxSpec(),
        prefer=None,
        dry_run=False,
    )

    assert ["d"] == [each.path for each in found.changes]
    info = (root / "d").stat()
    assert (OWNER + 1, OWNER + 2, 0o750) == (info.st_uid, info.st_gid, info.st_mode & 0o7777)
