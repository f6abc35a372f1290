"""Changes below a directory, as the helper that watches it tells them, one line for each."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ringfence.launcher.helpers import finding, watching
from ringfence.linux import inotify, namespaces

pytestmark = pytest.mark.anyone

Said = dict[str, Any]


class Watching:
    """A helper that watches, in a process of its own: what it says, until it ends."""

    def __init__(self, pid: int, fd: int) -> None:
        self.pid, self.lines = pid, open(fd, encoding="utf-8")  # noqa: SIM115  see `watched`

    def next(self) -> Said:
        said: Said = json.loads(self.lines.readline())
        return said

    def until(self, path: Path) -> list[Said]:
        """All that it says before the first word of `path`."""
        said = iter(self.next, None)
        return list(iter(lambda: next(said), {"kind": "created", "path": str(path)} | _FILE))

    def rest(self) -> list[Said]:
        return [json.loads(line) for line in self.lines]


_FILE, _DIRECTORY = {"is_directory": False}, {"is_directory": True}


@contextmanager
def watched(path: Path, *, recursive: bool = False, marks: str = "") -> Iterator[Watching]:
    reading, writing = os.pipe()
    pid = namespaces.fork_with(0)
    if pid == 0:
        os.close(reading)
        _watch(writing, str(path), json.dumps({"recursive": recursive, "marks": marks}))
    os.close(writing)
    helper = Watching(pid, reading)
    with helper.lines:
        yield helper
    _, status = os.waitpid(pid, 0)
    assert 0 == status


def _watch(stream: int, path: str, options: str) -> None:
    code = 1
    try:
        watching.watch(stream, path, options)
        code = 0
    except BrokenPipeError:
        code = 0  # nobody reads any more
    except OSError as exc:
        os.write(stream, json.dumps({"errno": exc.errno, "text": exc.strerror}).encode() + b"\n")
        code = 0
    finally:
        os._exit(code)


def kinds(said: list[Said], path: Path) -> list[str]:
    return [each["kind"] for each in said if str(path) == each["path"]]


def test_each_change_is_told_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with watched(tmp_path) as helper:
        assert {"kind": "watching", "path": str(tmp_path)} == helper.next()
        (tmp_path / "file").write_text("x")
        (tmp_path / "file").chmod(0o600)
        (tmp_path / "file").rename(tmp_path / "named")
        (tmp_path / "named").unlink()
        (tmp_path / "made").mkdir()
        for name in ("there", "made"):
            (tmp_path / name / "below").touch()
        (tmp_path / "end").touch()
        said = helper.until(tmp_path / "end")

    cookies = {each.pop("cookie") for each in said if each["kind"].startswith("moved")}
    assert 1 == len(cookies)
    assert [
        *({"kind": kind, "path": str(tmp_path / "file")} | _FILE for kind in _FIRST),
        {"kind": "moved_to", "path": str(tmp_path / "named")} | _FILE,
        {"kind": "deleted", "path": str(tmp_path / "named")} | _FILE,
        {"kind": "created", "path": str(tmp_path / "made")} | _DIRECTORY,
    ] == said


_FIRST = ("created", "modified", "written", "attributes", "moved_from")


def test_what_is_below_is_told_where_that_is_asked_for(tmp_path: Path) -> None:
    deep, elsewhere = tmp_path / "top" / "a" / "b", tmp_path / "elsewhere"
    deep.mkdir(parents=True)
    elsewhere.mkdir()
    top = tmp_path / "top"
    with watched(top, recursive=True) as helper:
        helper.next()
        (deep / "file").touch()
        (elsewhere / "c" / "d").mkdir(parents=True)
        (elsewhere / "c" / "d" / "full").write_text("x")
        (elsewhere / "c" / "empty").touch()
        (elsewhere / "c").rename(top / "c")
        (top / "end").touch()
        said = helper.until(top / "end")
        (top / "c" / "d" / "later").touch()
        (top / "c" / "d" / "later").unlink()
        (top / "made").mkdir()
        (top / "again").touch()
        later = helper.until(top / "again")
        (top / "made" / "inside").touch()
        (top / "last").touch()
        last = helper.until(top / "last")

    assert "created" == kinds(said, deep / "file")[0]
    assert ["moved_to"] == kinds(said, top / "c")
    assert ["created"] == kinds(said, top / "c" / "d")
    assert ["created", "modified"] == kinds(said, top / "c" / "d" / "full")
    assert ["created"] == kinds(said, top / "c" / "empty")
    assert _DIRECTORY.items() <= next(e for e in said if e["path"] == str(top / "c" / "d")).items()
    assert ["created", "deleted"] == [
        each
        for each in kinds(later, top / "c" / "d" / "later")
        if "ted" in each and "it" not in each
    ]
    assert "created" == kinds(last, top / "made" / "inside")[0]


def test_a_change_of_a_directory_below_is_told_once_by_the_one_above(tmp_path: Path) -> None:
    below = tmp_path / "below"
    below.mkdir()
    with watched(tmp_path, recursive=True) as helper:
        helper.next()
        below.chmod(0o700)
        below.rename(tmp_path / "named")
        (tmp_path / "end").touch()
        said = helper.until(tmp_path / "end")
        (tmp_path / "named").rmdir()
        (tmp_path / "again").touch()
        later = helper.until(tmp_path / "again")

    assert ["attributes", "moved_from"] == kinds(said, below)
    assert ["moved_to"] == kinds(said, tmp_path / "named")
    assert "deleted" in {each["kind"] for each in later}


@pytest.mark.parametrize("is_directory", [True, False])
def test_it_ends_with_what_it_watches(tmp_path: Path, is_directory: bool) -> None:
    top = tmp_path / "top"
    top.mkdir() if is_directory else top.touch()
    with watched(top, recursive=is_directory) as helper:
        helper.next()
        top.rmdir() if is_directory else top.unlink()
        said = helper.rest()

    assert "deleted" == said[-1]["kind"]
    assert {str(top)} == {each["path"] for each in said}


def test_it_ends_when_nobody_reads(tmp_path: Path) -> None:
    with watched(tmp_path) as helper:
        helper.next()


def test_it_is_told_where_it_was_moved_and_goes_on(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    with watched(top) as helper:
        helper.next()
        top.rename(tmp_path / "named")
        (tmp_path / "named" / "file").touch()
        assert ("moved_from", str(top)) == (lambda said: (said["kind"], said["path"]))(
            helper.next()
        )
        assert {"kind": "created", "path": str(top / "file")} | _FILE == helper.next()


def test_a_link_is_watched_itself(tmp_path: Path) -> None:
    (tmp_path / "aim" / "below").mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to("aim")
    with watched(link, recursive=True) as helper:
        helper.next()
        (tmp_path / "aim" / "file").touch()
        (tmp_path / "aim" / "below" / "file").touch()
        link.unlink()
        said = helper.rest()

    assert {str(link)} == {each["path"] for each in said}


def test_a_mark_comes_after_all_that_happened_before_it(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    with watched(tmp_path, recursive=False, marks=str(marks)) as helper:
        helper.next()
        for number in range(2):
            (tmp_path / str(number)).mkdir()
            (marks / str(number)).touch()  # which opens a file there, and not the directory
            os.listdir(marks)
            assert {
                "kind": "created",
                "path": str(tmp_path / str(number)),
            } | _DIRECTORY == helper.next()
            assert {"kind": "mark", "path": str(tmp_path)} == helper.next()


@pytest.mark.parametrize("recursive", [True, False])
def test_directories_that_are_watched_have_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recursive: bool
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(watching, "_MOST_WATCHES", 3)
    with watched(tmp_path, recursive=recursive) as helper:
        assert "watching" == helper.next()["kind"]
        (tmp_path / "a").rmdir()  # which takes no room any more
        (tmp_path / "c").mkdir()
        (tmp_path / "end").touch()
        helper.until(tmp_path / "end")
        (tmp_path / "d").mkdir()
        if recursive:
            *_, last = helper.rest()
            assert errno.ENOSPC == last["errno"]
    monkeypatch.setattr(watching, "_MOST_WATCHES", 3 if recursive else 0)
    with watched(tmp_path, recursive=recursive) as helper:
        (said,) = helper.rest()
    assert errno.ENOSPC == said["errno"]


def test_what_lies_too_deep_is_refused_or_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finding, "_MOST_DEEP", 1)
    top, elsewhere = tmp_path / "top", tmp_path / "elsewhere" / "a" / "b" / "c"
    top.mkdir()
    elsewhere.mkdir(parents=True)
    with watched(top, recursive=True) as helper:
        helper.next()
        (tmp_path / "elsewhere" / "a").rename(top / "a")
        (top / "end").touch()
        said = helper.until(top / "end")
    assert ["created", "overflow"] == kinds(said, top / "a" / "b" / "c")
    with watched(top, recursive=True) as helper:
        (refused,) = helper.rest()
    assert errno.ENAMETOOLONG == refused["errno"]


def test_events_that_the_kernel_dropped_are_told(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    watcher = watching._Watcher(writing, str(tmp_path), False, "")
    try:
        assert watcher._tell(-1, inotify.IN_Q_OVERFLOW, 0, "")
        assert watcher._tell(99, inotify.IN_CREATE, 0, "of a watch that is gone")
        said = os.read(reading, 4096)
    finally:
        for fd in (reading, writing, watcher._fd):
            os.close(fd)
    assert {"kind": "overflow", "path": str(tmp_path)} == json.loads(said)


def test_a_directory_that_is_gone_before_it_is_watched_hinders_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gone", "there"):
        (tmp_path / name).mkdir()
    found = list(finding.walk(str(tmp_path), lambda _path: None))
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(watching, "walk", lambda *_: found)
    with watched(tmp_path, recursive=True) as helper:
        helper.next()
        (tmp_path / "there" / "file").touch()
        assert str(tmp_path / "there" / "file") == helper.next()["path"]


def test_a_place_that_is_not_there_is_told(tmp_path: Path) -> None:
    with watched(tmp_path / "missing") as helper:
        (said,) = helper.rest()
    assert errno.ENOENT == said["errno"]
