"""Programs begun by vfork(2) and a table of calls: what they find, what is told where they cannot be."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ringfence.launcher.machine_code import vforked
from ringfence.launcher.pid1 import programs

pytestmark = pytest.mark.skipif(not vforked.is_here(), reason="another processor")


def _start(cwd: Path, *actions: Any) -> vforked.Start:
    ignored = programs.ignored_signals()
    return vforked.Start(os.getuid(), str(cwd), {"A": "ü", "B": ""}, list(actions), ignored)


def _said(cwd: Path, *argv: str) -> bytes:
    read, write = os.pipe2(os.O_CLOEXEC)
    start = _start(cwd, (os.POSIX_SPAWN_DUP2, write, 1))
    pid = start.begin("/bin/sh", ["sh", "-c", *argv])
    os.close(write)
    with open(read, "rb") as file:
        said = file.read()
    assert (pid, 0) == os.waitpid(pid, 0)
    return said


def test_it_has_what_it_was_given_and_a_session_of_its_own(tmp_path: Path) -> None:
    said = _said(tmp_path, 'pwd; echo "$A-$B-$1-$2"; ps -o sid= -p $$; echo $$', "x", "one", "ä b")

    where, given, session, pid = said.decode().split("\n")[:4]
    assert (str(tmp_path), "ü--one-ä b") == (where, given)
    assert session.split() == pid.split()


def test_standard_input_is_opened_anew(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    read, write = os.pipe2(os.O_CLOEXEC)
    opened = (os.POSIX_SPAWN_OPEN, 0, str(tmp_path / "file"), os.O_RDONLY, 0)
    pid = _start(tmp_path, opened, (os.POSIX_SPAWN_DUP2, write, 1)).begin("/bin/cat", ["cat"])
    os.close(write)
    with open(read, "rb") as file:
        assert b"content" == file.read()
    os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("path", "number"),
    [("/nowhere", errno.ENOENT), ("/etc", errno.EACCES), ("script", errno.ENOEXEC)],
)
def test_what_cannot_begin_is_told_and_gone(
    path: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script").write_text("echo it ran")
    (tmp_path / "script").chmod(0o755)
    reaped: list[int] = []

    def wait(pid: int, options: int) -> tuple[int, int]:
        reaped.append(os.WEXITSTATUS(os.waitpid(pid, options)[1]))
        return pid, 0

    monkeypatch.setattr("posix.waitpid", wait)
    with pytest.raises(OSError) as caught:
        _start(tmp_path).begin(path, ["it"])

    assert number == caught.value.errno
    assert not isinstance(caught.value, vforked.NoDirectory)
    assert [127] == reaped


def test_a_directory_that_is_not_there_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(vforked.NoDirectory) as caught:
        _start(tmp_path / "nowhere").begin("/bin/true", ["true"])

    assert errno.ENOENT == caught.value.errno


def test_no_program_begins_in_a_directory_of_ours_that_a_link_names(tmp_path: Path) -> None:
    """CVE-2024-21626: who chooses where a program begins may write a link to a descriptor there."""
    fd = os.open("/etc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    (tmp_path / "link").symlink_to(f"/proc/self/fd/{fd}")
    try:
        assert (tmp_path / "link/passwd").exists(), "the control: it leads there"
        with pytest.raises(vforked.NoDirectory) as caught:
            _start(tmp_path / "link").begin("/bin/true", ["true"])
    finally:
        os.close(fd)

    assert errno.ENOENT == caught.value.errno


def test_the_first_that_can_be_begun_is(tmp_path: Path) -> None:
    """As a shell looks: past what may not be run, what is a directory, and what is not there."""
    for name, mode in (("one", 0o644), ("two", 0o755)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "it").write_text("#!/bin/sh\nexit 7\n")
        (tmp_path / name / "it").chmod(mode)
    (tmp_path / "three/it").mkdir(parents=True)
    paths = [f"{name}/it" for name in ("none", "three", "one", "two")]
    pid = programs.first_of(paths, ["it"], _start(tmp_path).begin, str(tmp_path))
    assert 7 == os.WEXITSTATUS(os.waitpid(pid, 0)[1])

    with pytest.raises(PermissionError):
        programs.first_of(paths[:3], ["it"], _start(tmp_path).begin, str(tmp_path))
    (tmp_path / "two/it").write_text("#!/no/interpreter\n")
    with pytest.raises(OSError) as caught:
        programs.first_of(["two/it"], ["it"], _start(tmp_path).begin, str(tmp_path))
    assert errno.ELIBACC == caught.value.errno


def test_no_text_ends_before_its_end(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="null byte"):
        _start(tmp_path).begin("/bin/echo", ["echo", "a\0b"])
