"""Whole trees in and out."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest

from ...errors import FileError, FileExists, FileNotFound
from ...launcher.helpers.trees import remove
from .base import ConformanceBase

if TYPE_CHECKING:
    from pathlib import Path

    from ..lab import Lab

_DEEP = 1100  # more than Python's frames, and longer than PATH_MAX

Tree = dict[str, tuple[str, object, int]]
"""Relative path to kind, content or target, and permission bits."""


class Trees(ConformanceBase):
    one_sandbox = True

    def test_a_tree_comes_back_as_it_went(self, sandbox: Lab, tmp_path: Path) -> None:
        _plant(tmp_path / "up", self.big_bytes)

        sandbox.files.upload_tree(str(tmp_path / "up"), "deep/tree")
        sandbox.files.download_tree("deep/tree", str(tmp_path / "down"))

        assert _read(tmp_path / "up") == _read(tmp_path / "down")

    def test_commands_may_use_what_was_uploaded(self, sandbox: Lab, tmp_path: Path) -> None:
        _plant(tmp_path / "up", 1)

        sandbox.files.upload_tree(str(tmp_path / "up"), "tree")

        assert "ran\n" == sandbox.run("tree/sub/script").text
        assert sandbox.sh("echo more >> tree/text && echo new > tree/sub/new").ok
        assert b"text\nmore\n" == sandbox.get("tree/text")

    def test_one_file(self, sandbox: Lab, tmp_path: Path) -> None:
        (tmp_path / "one").write_bytes(b"1")

        sandbox.files.upload_tree(str(tmp_path / "one"), "new/place/one")
        sandbox.files.download_tree("new/place/one", str(tmp_path / "back"))

        assert b"1" == (tmp_path / "back").read_bytes()

    def test_a_tree_may_be_deeper_than_a_path_is_long(self, sandbox: Lab, tmp_path: Path) -> None:
        (tmp_path / "up").mkdir()
        fd = os.open(tmp_path / "up", os.O_RDONLY)
        for _ in range(_DEEP):
            os.mkdir("deep", dir_fd=fd)
            below = os.open("deep", os.O_RDONLY, dir_fd=fd)
            os.close(fd)
            fd = below
        os.close(os.open("leaf", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=fd))
        os.close(fd)

        try:
            sandbox.files.upload_tree(str(tmp_path / "up"), "tree")
            sandbox.files.download_tree("tree", str(tmp_path / "down"))

            fd = os.open(tmp_path / "down", os.O_RDONLY)
            for _ in range(_DEEP):
                below = os.open("deep", os.O_RDONLY, dir_fd=fd)
                os.close(fd)
                fd = below
            assert ["leaf"] == os.listdir(fd)
            os.close(fd)
            sandbox.files.remove("tree", recursive=True)
        finally:  # pytest cannot remove them, and fails
            for each in os.listdir(tmp_path):
                remove(str(tmp_path / each), one_file_system=False)

    def test_uploading_again_replaces_files(self, sandbox: Lab, tmp_path: Path) -> None:
        tree = tmp_path / "up"
        tree.mkdir()
        (tree / "file").write_bytes(b"first, longer")
        sandbox.files.upload_tree(str(tree), "tree")
        (tree / "file").write_bytes(b"second")

        sandbox.files.upload_tree(str(tree), "tree")

        assert b"second" == sandbox.get("tree/file")

    def test_progress_is_told(self, sandbox: Lab, tmp_path: Path) -> None:
        _plant(tmp_path / "up", self.big_bytes)
        up: list[tuple[int, str]] = []
        down: list[tuple[int, str]] = []

        sandbox.files.upload_tree(
            str(tmp_path / "up"), "tree", progress=lambda *step: up.append(step)
        )
        sandbox.files.download_tree(
            "tree", str(tmp_path / "down"), progress=lambda *step: down.append(step)
        )

        total = sum(len(content) for _, content, _ in _read(tmp_path / "up").values()
                    if isinstance(content, bytes))  # fmt: skip
        for steps in (up, down):
            counts = [count for count, _ in steps]
            assert sorted(counts) == counts
            assert total <= counts[-1]  # what carries the files may count too
            assert all(path for _, path in steps)

    def test_uploads_do_not_follow_links(self, sandbox: Lab, tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        secret.write_text("host only")
        (tmp_path / "up").mkdir()
        (tmp_path / "up" / "link").symlink_to(secret)

        sandbox.files.upload_tree(str(tmp_path / "up"), "tree")

        assert str(secret) == sandbox.files.stat("tree/link").link_target
        with pytest.raises(FileError):
            sandbox.get("tree/link")

    def test_uploads_do_not_write_through_links(self, sandbox: Lab, tmp_path: Path) -> None:
        """A link planted by the sandbox is replaced, not followed."""
        sandbox.put("victim", b"precious")
        sandbox.files.make_dir("tree")
        sandbox.run("ln", "-s", "../victim", "tree/file")
        (tmp_path / "up").mkdir()
        (tmp_path / "up" / "file").write_bytes(b"new")

        sandbox.files.upload_tree(str(tmp_path / "up"), "tree")

        assert b"precious" == sandbox.get("victim")
        assert b"new" == sandbox.get("tree/file")

    def test_downloads_stay_below_their_directory(self, sandbox: Lab, tmp_path: Path) -> None:
        """A link among what was downloaded before does not lead the next download out."""
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "file").write_bytes(b"precious")
        sandbox.run("ln", "-s", str(outside), "tree-link")
        sandbox.files.make_dir("tree")
        sandbox.run("ln", "-s", str(outside), "tree/sub")
        sandbox.run("ln", "-s", str(outside / "file"), "tree/file")
        sandbox.files.download_tree("tree", str(tmp_path / "down"))
        sandbox.files.remove("tree", recursive=True)
        sandbox.files.make_dir("tree/sub")
        sandbox.put("tree/sub/file", b"evil")
        sandbox.put("tree/sub/other", b"evil")
        sandbox.put("tree/file", b"evil")

        try:
            sandbox.files.download_tree("tree", str(tmp_path / "down"), overwrite=True)
        except FileError:
            pass  # refused rather than replaced: as safe
        else:
            assert b"evil" == (tmp_path / "down" / "sub" / "file").read_bytes()

        assert ["file"] == os.listdir(outside)
        assert b"precious" == (outside / "file").read_bytes()

    def test_downloads_replace_files_only_when_asked(self, sandbox: Lab, tmp_path: Path) -> None:
        sandbox.files.make_dir("tree/sub")
        for name in ("tree/sub/new", "tree/sub/same"):
            sandbox.put(name, b"inside")
        down = tmp_path / "down"
        (down / "sub").mkdir(parents=True)
        (down / "sub" / "same").write_bytes(b"outside")
        (down / "other").write_bytes(b"other")

        with pytest.raises(FileExists, match="sub/same"):
            sandbox.files.download_tree("tree", str(down))
        assert b"outside" == (down / "sub" / "same").read_bytes()

        sandbox.files.download_tree("tree", str(down), overwrite=True)
        for name, content in (("sub/same", b"inside"), ("sub/new", b"inside"), ("other", b"other")):
            assert content == (down / name).read_bytes()

    def test_downloads_copy_links_as_links(self, sandbox: Lab, tmp_path: Path) -> None:
        sandbox.files.make_dir("tree")
        sandbox.run("ln", "-s", "/etc/passwd", "tree/link")

        sandbox.files.download_tree("tree", str(tmp_path / "down"))

        assert "/etc/passwd" == os.readlink(tmp_path / "down" / "link")

    def test_special_files_are_refused(self, sandbox: Lab, tmp_path: Path) -> None:
        """Reading a pipe would wait for ever; skipping it would lose it silently."""
        (tmp_path / "up").mkdir()
        os.mkfifo(tmp_path / "up" / "pipe")

        with pytest.raises(FileError) as refusal:
            sandbox.files.upload_tree(str(tmp_path / "up"), "tree")

        assert "pipe" in refusal.value.path

    def test_a_tree_longer_than_any_path_is_removed(self, sandbox: Lab) -> None:
        """Made of two, each as long as the kernel takes; what a link in it leads to stays."""
        half = "/".join(["d" * 200] * 18)
        sandbox.put("kept", b"precious")
        sandbox.files.make_dir(f"top/{half}")
        sandbox.files.make_dir(f"other/{half}")
        sandbox.files.move("other", f"top/{half}/other")
        sandbox.run("ln", "-s", "../kept", "top/link")

        sandbox.files.remove("top", recursive=True)

        with pytest.raises(FileNotFound):
            sandbox.files.stat("top")
        assert b"precious" == sandbox.get("kept")

    def test_copying_what_is_not_there(self, sandbox: Lab, tmp_path: Path) -> None:
        with pytest.raises(FileNotFound) as refusal:
            sandbox.files.upload_tree(str(tmp_path / "none"), "tree")
        with pytest.raises(FileNotFound):
            sandbox.files.download_tree("none", str(tmp_path / "down"))

        assert str(tmp_path / "none") == refusal.value.path
        assert not (tmp_path / "down").exists()


def _plant(root: Path, big_bytes: int) -> None:
    """A tree with everything a tree can have."""
    (root / "sub" / "empty").mkdir(parents=True)
    (root / "text").write_bytes(b"text\n")
    (root / "nothing").write_bytes(b"")
    (root / "big").write_bytes(os.urandom(big_bytes))
    (root / "odd name\n ü").write_bytes(b"odd")
    (root / os.fsdecode(b"\xff")).write_bytes(b"not utf-8")
    (root / "sub" / "script").write_bytes(b"#!/bin/sh\necho ran\n")
    (root / "sub" / "script").chmod(0o755)
    (root / "sub" / "private").write_bytes(b"mine")
    (root / "sub" / "private").chmod(0o600)
    (root / "relative").symlink_to("sub/script")
    (root / "dangling").symlink_to("/no/such/place")
    (root / "to-directory").symlink_to("sub")


def _read(root: Path) -> Tree:
    """The tree below `root`, links not followed."""
    found: Tree = {}
    for directory, names, files in os.walk(root):
        for name in (*names, *files):
            path = os.path.join(directory, name)
            mode = os.lstat(path).st_mode
            key = os.path.relpath(path, root)
            if stat.S_ISLNK(mode):
                found[key] = ("symlink", os.readlink(path), 0)
            elif stat.S_ISDIR(mode):
                found[key] = ("directory", None, stat.S_IMODE(mode))
            else:
                with open(path, "rb") as file:
                    found[key] = ("file", file.read(), stat.S_IMODE(mode))
    return found
