"""Patterns of names, text that is found in files, and text that is replaced in them."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ringfence.launcher.helpers import finding

pytestmark = pytest.mark.anyone

Line = dict[str, Any]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """After how many seconds the kernel was to end each: nobody is killed here."""
    asked: list[int] = []
    monkeypatch.setattr("signal.alarm", asked.append)
    return asked


def answer(function: Callable[[int, str, str], None], path: Path, **options: Any) -> list[Line]:
    reading, writing = os.pipe()
    try:
        function(writing, str(path), json.dumps(options))
    finally:
        os.close(writing)
        with open(reading, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
    return lines


def found(path: Path, pattern: str, most: int = 99) -> list[Line]:
    return answer(finding.find, path, pattern=pattern, most=most)


def search(path: Path, pattern: str, **options: Any) -> list[Line]:
    asked = {"pattern": pattern, "regex": False, "ignore_case": False, "glob": "", "most": 99}
    return answer(finding.search, path, **{**asked, **options})


def replace(path: Path, pattern: str, files: list[str], new: str, **options: Any) -> list[Line]:
    asked = {"pattern": pattern, "regex": False, "ignore_case": False}
    return answer(finding.replace, path, files=files, replacement=new, **{**asked, **options})


@pytest.mark.parametrize(
    ("pattern", "names", "others"),
    [
        ("*.py", ["x.py", ".py", "a\nb.py"], ["a/x.py", "x.pyc", "xpy"]),
        ("./x?", ["xy"], ["x", "x/", "xyz"]),
        ("**/x", ["x", "a/x", "a/b/x"], ["ax", "a/x/b"]),
        ("a/**", ["a/b", "a/b/c"], ["a", "ab", "b/a/c"]),
        ("a/**/x", ["a/x", "a/b/x"], ["a/bx", "x"]),
        ("[ab].c", ["a.c", "b.c"], ["c.c", "ab.c", "[.c"]),
        ("[!ab]", ["c", "!"], ["a", "b"]),
        ("[a-c]", ["b"], ["-", "d"]),
        ("[]]", ["]"], ["[", "[]"]),
        ("[\\]", ["\\"], ["]"]),
        ("[[]", ["["], ["]"]),
        ("[a", ["[a"], ["a"]),
        ("a.b+", ["a.b+"], ["axb+", "a.bb"]),
        ("x..y", ["x..y"], ["x.zy"]),
    ],
)
def test_what_a_pattern_of_names_means(pattern: str, names: list[str], others: list[str]) -> None:
    expression = finding.pattern_of(pattern)
    assert names == [each for each in names if expression.match(each)]
    assert [] == [each for each in others if expression.match(each)]


@pytest.mark.parametrize("pattern", ["/x", ".//x", "..", "../x", "a/../x", "a/..", "[z-a]"])
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(OSError, match="pattern") as refused:
        finding.pattern_of(pattern)
    assert errno.EINVAL == refused.value.errno


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("a/x.py", "a/b/y.py", "z.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one\nTwo needle needle\nthree\n")
    (tmp_path / "way").symlink_to("a")
    (tmp_path / "link.py").symlink_to("a/x.py")
    return tmp_path


def test_as_many_as_were_asked_for_are_found_and_more_is_told(tree: Path) -> None:
    *two, last = found(tree, "**/*.py", 2)
    assert 2 == len(two)
    assert {"done": True, "truncated": True, "too_deep": False} == last
    *all_of_them, last = found(tree, "**/*.py", 3)
    assert {"done": True, "truncated": False, "too_deep": False} == last
    names = [os.path.relpath(each["path"], tree) for each in all_of_them]
    assert ["a/b/y.py", "a/x.py", "link.py"] == names, "in order, and not through a link"


def test_what_is_found_is_described(tree: Path) -> None:
    os.mkfifo(tree / "fifo")
    (tree / "z.txt").chmod(0o640)
    os.utime(tree / "z.txt", ns=(0, 1_500_000_000))
    rows = {each.pop("name"): each for each in found(tree, "*")[:-1]}
    assert {
        "path": str(tree / "z.txt"),
        "kind": "file",
        "size_bytes": 28,
        "mode": 0o640,
        "mtime_s": 1.5,
        "link_target": None,
    } == rows["z.txt"]
    kinds = {name: (each["kind"], each["link_target"]) for name, each in rows.items()}
    assert ("directory", None) == kinds["a"]
    assert ("symlink", "a") == kinds["way"]
    assert ("other", None) == kinds["fifo"]


def test_what_lies_too_deep_is_said_to(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "a" / "b" / "c").mkdir()
    (tree / "a" / "b" / "c" / "d.py").write_text("needle")
    monkeypatch.setattr(finding, "_MOST_DEEP", 2)
    *rows, last = found(tree, "**")
    assert {"y.py", "c"} <= {each["name"] for each in rows}
    assert "d.py" not in {each["name"] for each in rows}
    assert last["too_deep"]
    assert search(tree, "needle")[-1]["too_deep"]
    monkeypatch.setattr(finding, "_MOST_DEEP", 3)
    assert not found(tree, "**")[-1]["too_deep"]


def test_a_path_has_as_many_bytes_as_the_kernel_takes(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / "a" / "b" / "é").touch()
    length = len(os.fsencode(tree / "a" / "b" / "é"))
    monkeypatch.setattr(finding, "_LONGEST_PATH", length + 2)  # y.py is longer
    *rows, last = found(tree, "a/b/*")
    assert ([], True) == (rows, last["too_deep"])
    monkeypatch.setattr(finding, "_LONGEST_PATH", length + 4)
    *rows, last = found(tree, "a/b/*")
    assert (["y.py", "é"], False) == ([each["name"] for each in rows], last["too_deep"])
    (tree / "a" / "b" / "y.py").unlink()
    monkeypatch.setattr(finding, "_LONGEST_PATH", length)
    assert found(tree, "a/b/*")[-1]["too_deep"]


def test_a_place_that_is_none_is_refused(tree: Path) -> None:
    with pytest.raises(FileNotFoundError):
        found(tree / "missing", "*")
    with pytest.raises(NotADirectoryError):
        found(tree / "z.txt", "*")
    with pytest.raises(FileNotFoundError):
        search(tree / "missing", "x")


def test_lines_are_found_with_their_places(tree: Path, patience: list[int]) -> None:
    *rows, last = search(tree, "needle")
    text = "Two needle needle"
    wanted = [
        {"path": str(tree / name), "line": 2, "column": 5, "text": text}
        for name in ("a/b/y.py", "a/x.py", "z.txt")
    ]
    assert wanted == rows
    assert {"done": True, "truncated": False, "too_deep": False} == last
    assert wanted[:1] == search(tree, "needle", glob="a/b/*")[:-1]
    assert wanted[-1:] == search(tree / "z.txt", "needle")[:-1]
    *rows, last = search(tree, "needle", most=2)
    assert (wanted[:2], True) == (rows, last["truncated"])
    assert not search(tree, "needle", most=3)[-1]["truncated"]
    assert [30] * 5 == patience


def test_a_pattern_is_text_unless_it_is_said_to_be_more(tree: Path) -> None:
    (tree / "z.txt").write_bytes(b"a.b\nA.B\naxb\n\xff a.b")
    only = {"glob": "z.txt"}

    def lines(pattern: str, **options: Any) -> list[int]:
        return [each["line"] for each in search(tree, pattern, **only, **options)[:-1]]

    assert [1, 4] == lines("a.b")
    assert [1, 3, 4] == lines("a.b", regex=True)
    assert [1, 2, 4] == lines("a.b", ignore_case=True)
    assert [1] == lines("^a[.]b$", regex=True)
    assert "\ufffd a.b" == search(tree, "a.b", **only)[1]["text"]
    with pytest.raises(OSError, match="without regex= it is plain text") as refused:
        lines("(", regex=True)
    assert errno.EINVAL == refused.value.errno


def test_only_text_is_looked_through(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tree / "fifo")
    (tree / "early").write_bytes(b"needle\n" + bytes(8185 - 1) + b"\0")
    (tree / "late").write_bytes(b"needle\n" + b"x" * 8185 + b"\0")
    assert 8192 == (tree / "late").read_bytes().index(b"\0")
    names = [os.path.basename(each["path"]) for each in search(tree, "needle")[:-1]]
    assert ["y.py", "x.py", "late", "z.txt"] == names
    (tree / "long").write_text("x" * 1999 + "needle")
    (row,) = search(tree, "needle", glob="long")[:-1]
    assert (2000, 2000) == (row["column"], len(row["text"]))
    monkeypatch.setattr(finding, "_MOST_FILE_BYTES", 28)
    assert 3 == len(search(tree, "needle")[:-1])
    monkeypatch.setattr(finding, "_MOST_FILE_BYTES", 27)
    assert [] == search(tree, "needle")[:-1]


def test_text_is_replaced_in_each_file_or_it_stays_as_it_is(
    tree: Path, patience: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / "a" / "x.py").chmod(0o751)
    (tree / "large").write_text("needle" * 5)
    os.mkfifo(tree / "fifo")
    monkeypatch.setattr(finding, "_MOST_FILE_BYTES", 29)
    before = (tree / "a" / "b" / "y.py").stat()
    opened = os.listdir("/proc/self/fd")
    names = ["missing", "link.py", "fifo", "large", "a/x.py", "a", "z.txt"]

    *rows, last = replace(tree, "needle", names, r"\1n")
    unchanged = replace(tree, "absent", ["a/b/y.py"], "x")

    assert {"done": True, "truncated": False} == last
    told = {each["path"]: (each["replacements"], each["error"]) for each in rows}
    assert {
        "missing": (0, os.strerror(errno.ENOENT)),
        "link.py": (0, os.strerror(errno.ELOOP)),
        "fifo": (0, "is not a regular file"),
        "large": (0, os.strerror(errno.EFBIG)),
        "a/x.py": (2, None),
        "a": (0, "is not a regular file"),
        "z.txt": (2, None),
    } == told
    assert "one\nTwo \\1n \\1n\nthree\n" == (tree / "a" / "x.py").read_text()
    assert 0o751 == stat.S_IMODE((tree / "a" / "x.py").stat().st_mode)
    assert [{"path": "a/b/y.py", "replacements": 0, "error": None}] == unchanged[:-1]
    assert before == (tree / "a" / "b" / "y.py").stat()
    assert ["b", "x.py"] == sorted(os.listdir(tree / "a"))
    assert [30, 30] == patience
    assert opened == os.listdir("/proc/self/fd")


def test_groups_of_an_expression_are_put_in(tree: Path) -> None:
    replace(tree, "(NEED)(le)", ["z.txt"], r"\2\1", regex=True, ignore_case=True)
    assert "one\nTwo leneed leneed\nthree\n" == (tree / "z.txt").read_text()
    *rows, _ = replace(tree, "(o)", ["z.txt", "a/x.py"], r"\2", regex=True)
    assert 2 == len(rows)
    assert all("invalid group reference" in each["error"] for each in rows)


def test_a_file_that_cannot_be_put_in_place_leaves_nothing_beside_it(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr("os.rename", refuse)
    *rows, _ = replace(tree, "needle", ["a/x.py"], "n")
    assert "no" == rows[0]["error"]
    assert ["b", "x.py"] == sorted(os.listdir(tree / "a"))
    assert "needle" in (tree / "a" / "x.py").read_text()
