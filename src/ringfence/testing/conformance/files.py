"""The files API."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from ...errors import (
    DirectoryNotEmpty,
    FileError,
    FileExists,
    FileNotFound,
    InvalidRequest,
    IsADirectory,
    NotADirectory,
    PermissionDenied,
    RingfenceError,
)
from .base import ConformanceBase

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ..lab import Lab

ODD_NAMES = [" ", "a b", "-rf", "ü漢", "new\nline", "'\"$;*", ".hidden", os.fsdecode(b"\xff\xfe")]


class Files(ConformanceBase):
    one_sandbox = True

    @pytest.mark.parametrize("content", [b"", b"text\n", bytes(range(256)) * 5])
    def test_what_is_written_is_read(self, sandbox: Lab, content: bytes) -> None:
        sandbox.put("file", content)

        assert content == sandbox.get("file")
        assert content == sandbox.run("cat", "file").stdout

    def test_files_of_any_size_are_streamed(self, sandbox: Lab) -> None:
        content = os.urandom(self.big_bytes)
        with sandbox.files.open_write("big") as file:
            for at in range(0, len(content), 77_777):
                file.write(content[at : at + 77_777])

        assert content == sandbox.get("big")
        assert len(content) == sandbox.files.stat("big").size_bytes

    def test_a_file_is_read_in_pieces(self, sandbox: Lab) -> None:
        sandbox.put("file", b"abcdef")

        with sandbox.files.open_read("file") as file:
            assert [b"abcd", b"ef", b""] == [file.read(4), file.read(4), file.read(4)]

    def test_what_a_command_wrote_is_read(self, sandbox: Lab) -> None:
        sandbox.sh("printf inside > made; printf more > /tmp/made")

        assert b"inside" == sandbox.get("made")
        assert b"more" == sandbox.get("/tmp/made")

    def test_a_command_may_change_what_was_written(self, sandbox: Lab) -> None:
        sandbox.put("file", b"one\n")

        assert sandbox.sh("echo two >> file").ok

        assert b"one\ntwo\n" == sandbox.get("file")

    def test_writing_replaces_or_appends(self, sandbox: Lab) -> None:
        sandbox.put("file", b"long content")

        sandbox.put("file", b"new")
        sandbox.put("file", b"er", append=True)

        assert b"newer" == sandbox.get("file")

    def test_the_mode_of_a_new_file(self, sandbox: Lab) -> None:
        sandbox.put("script", b"", mode=0o750)
        sandbox.put("plain", b"")

        assert 0o750 == sandbox.files.stat("script").mode
        assert 0o644 == sandbox.files.stat("plain").mode

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_any_name(self, sandbox: Lab, name: str) -> None:
        sandbox.files.make_dir("odd")
        sandbox.put(f"odd/{name}", b"x")

        assert [name] == [entry.name for entry in sandbox.files.list("odd")]
        assert b"x" == sandbox.run("cat", f"odd/{name}").stdout
        sandbox.files.remove(f"odd/{name}")
        assert [] == sandbox.files.list("odd")

    def test_what_is_not_there(self, sandbox: Lab) -> None:
        files = sandbox.files
        attempts: list[Callable[[], object]] = [
            lambda: files.open_read("none"),
            lambda: files.stat("none"),
            lambda: files.list("none"),
            lambda: files.remove("none"),
            lambda: files.move("none", "other"),
            lambda: files.open_write("no/directory"),
        ]
        for attempt in attempts:
            with pytest.raises(FileNotFound) as refusal:
                attempt()
            assert refusal.value.path

    def test_a_directory_is_no_file(self, sandbox: Lab) -> None:
        sandbox.files.make_dir("directory")

        with pytest.raises(IsADirectory):
            sandbox.get("directory")
        with pytest.raises(IsADirectory):
            sandbox.put("directory", b"")

    def test_a_file_is_no_directory(self, sandbox: Lab) -> None:
        sandbox.put("file", b"")

        with pytest.raises(NotADirectory):
            sandbox.files.list("file")
        with pytest.raises(NotADirectory):
            sandbox.get("file/below")

    def test_what_the_user_may_not_do(self, sandbox: Lab) -> None:
        """The files API has the rights of the sandbox's user, no more."""
        sandbox.put("closed", b"x", mode=0)

        with pytest.raises(PermissionDenied):
            sandbox.get("closed")
        with pytest.raises(PermissionDenied):
            sandbox.put("/usr/bin/planted", b"x")

    @pytest.mark.parametrize("path", ["", "a\0b"])
    def test_what_is_no_path(self, sandbox: Lab, path: str) -> None:
        with pytest.raises((InvalidRequest, FileError)):
            sandbox.get(path)

    def test_stat_tells_the_kinds(self, sandbox: Lab) -> None:
        sandbox.put("file", b"12345", mode=0o640)
        sandbox.files.make_dir("directory")
        sandbox.run("ln", "-s", "file", "link")

        file, directory, link = (sandbox.files.stat(p) for p in ("file", "directory", "link"))

        assert ("file", 5, 0o640) == (file.kind, file.size_bytes, file.mode)
        assert ("directory", "symlink") == (directory.kind, link.kind)
        assert (None, None, "file") == tuple(i.link_target for i in (file, directory, link))
        assert file.path.startswith("/")
        assert file.path.endswith("/file")
        assert file.mtime_s > 0

    def test_stat_does_not_follow(self, sandbox: Lab) -> None:
        sandbox.run("ln", "-s", "nowhere", "dangling")

        assert "symlink" == sandbox.files.stat("dangling").kind
        with pytest.raises(FileNotFound):
            sandbox.get("dangling")

    def test_list_is_sorted_and_complete(self, sandbox: Lab) -> None:
        sandbox.files.make_dir("d/sub")
        sandbox.put("d/b", b"22")
        sandbox.put("d/a", b"1")
        sandbox.run("ln", "-s", "a", "d/link")

        listed = sandbox.files.list("d")

        assert ["a", "b", "link", "sub"] == [entry.name for entry in listed]
        assert ["file", "file", "symlink", "directory"] == [entry.kind for entry in listed]
        assert listed[1] == sandbox.files.stat("d/b")

    def test_reading_follows_links_inside(self, sandbox: Lab) -> None:
        sandbox.put("/tmp/real", b"content")
        sandbox.run("ln", "-s", "/tmp/real", "link")

        assert b"content" == sandbox.get("link")

    def test_links_do_not_lead_outside(self, sandbox: Lab, tmp_path: Path) -> None:
        """A path of the host means, inside, a path inside."""
        secret = tmp_path / "secret"
        secret.write_text("host only")
        up = "../" * 20
        for name, target in (("absolute", str(secret)), ("relative", f"{up}{secret}")):
            sandbox.run("ln", "-s", target, name)

            with pytest.raises(FileError):
                sandbox.get(name)

    def test_a_link_loop_is_an_error(self, sandbox: Lab) -> None:
        sandbox.sh("ln -s two one; ln -s one two")

        with pytest.raises(FileError):
            sandbox.get("one")

    def test_make_dir(self, sandbox: Lab) -> None:
        sandbox.files.make_dir("a/b/c")
        sandbox.files.make_dir("a/b/c")
        sandbox.files.make_dir("a/d", parents=False)

        assert ["b", "d"] == [entry.name for entry in sandbox.files.list("a")]
        with pytest.raises(FileNotFound):
            sandbox.files.make_dir("x/y", parents=False)

    def test_make_dir_where_something_is(self, sandbox: Lab) -> None:
        sandbox.put("file", b"")
        sandbox.files.make_dir("directory")

        with pytest.raises(FileExists):
            sandbox.files.make_dir("file")
        with pytest.raises(NotADirectory):
            sandbox.files.make_dir("file/below")
        with pytest.raises(FileExists):
            sandbox.files.make_dir("directory", parents=False)

    def test_remove(self, sandbox: Lab) -> None:
        sandbox.put("file", b"")
        sandbox.files.make_dir("empty")

        sandbox.files.remove("file")
        sandbox.files.remove("empty")

        with pytest.raises(FileNotFound):
            sandbox.files.stat("file")
        with pytest.raises(FileNotFound):
            sandbox.files.stat("empty")

    def test_a_full_directory_is_removed_only_on_purpose(self, sandbox: Lab) -> None:
        sandbox.files.make_dir("full/sub")
        sandbox.put("full/sub/file", b"x")

        with pytest.raises(DirectoryNotEmpty):
            sandbox.files.remove("full")
        sandbox.files.remove("full", recursive=True)

        with pytest.raises(FileNotFound):
            sandbox.files.stat("full")

    def test_remove_does_not_follow(self, sandbox: Lab) -> None:
        sandbox.files.make_dir("kept")
        sandbox.put("kept/file", b"x")
        sandbox.files.make_dir("gone")
        sandbox.sh("ln -s kept link; ln -s ../kept gone/link")

        sandbox.files.remove("link", recursive=True)
        sandbox.files.remove("gone", recursive=True)

        assert b"x" == sandbox.get("kept/file")

    def test_move(self, sandbox: Lab) -> None:
        sandbox.files.make_dir("d/sub")
        sandbox.put("d/sub/file", b"x")
        sandbox.put("old", b"old")

        sandbox.files.move("d", "moved")
        sandbox.files.move("moved/sub/file", "old")

        assert b"x" == sandbox.get("old")
        assert [] == sandbox.files.list("moved/sub")
        with pytest.raises(FileNotFound):
            sandbox.files.stat("d")

    def test_move_to_another_file_system(self, sandbox: Lab) -> None:
        sandbox.put("file", b"x", mode=0o755)

        sandbox.files.move("file", "/mnt/memory/file")

        assert b"x" == sandbox.get("/mnt/memory/file")
        assert 0o755 == sandbox.files.stat("/mnt/memory/file").mode
        with pytest.raises(FileNotFound):
            sandbox.files.stat("file")

    def test_moving_a_directory_into_itself_is_refused(self, sandbox: Lab) -> None:
        sandbox.files.make_dir("d")

        with pytest.raises(RingfenceError):
            sandbox.files.move("d", "d/inner")

        assert "directory" == sandbox.files.stat("d").kind
