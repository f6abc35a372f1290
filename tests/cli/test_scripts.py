"""Which argument is the script: pure judgement over a directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence.cli.scripts import scripts_of

pytestmark = pytest.mark.anyone

CASES = [
    (["python3", "a.py"], "a.py"),
    (["python3.12", "-u", "a.py", "b.py"], "a.py"),
    (["/usr/bin/python3", "a.py"], "a.py"),
    (["python3", "-m", "a.py"], "a.py"),
    (["python3", "-c", "print()", "a.py"], None),
    (["bash", "-o", "pipefail", "a.py"], "a.py"),
    (["node20", "--require", "x", "a.py"], "a.py"),
    (["java", "-cp", "b.py", "a.py"], "a.py"),
    (["java", "Missing"], None),
    (["sh", "--", "a.py"], "a.py"),
    (["sh", "--"], None),
    (["sh"], None),
    (["cat", "a.py"], None),
    (["./a.py"], "a.py"),
    ([".//./a.py"], "a.py"),
    (["sub/c.py"], "sub/c.py"),
    (["./sub"], None),
    (["./missing"], None),
    (["sub/../a.py"], None),
    (["../outside.py"], None),
    (["python3", "../outside.py"], None),
    (["python3", "link.py"], None),
    (["python3", "inner.py"], "inner.py"),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "here/sub").mkdir(parents=True)
    for name in ("here/a.py", "here/b.py", "here/sub/c.py", "outside.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "here/link.py").symlink_to("../outside.py")
    (tmp_path / "here/inner.py").symlink_to("sub/c.py")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.mark.parametrize(("argv", "found"), CASES, ids=str)
def test_the_script(here: Path, argv: list[str], found: str | None) -> None:
    expected = f"/home/sandbox/{found}" if found else None
    inside = [target for _source, target in scripts_of(argv, "/home/sandbox")]

    assert inside == ([expected] if expected else [])


def test_an_absolute_path_keeps_its_place(here: Path) -> None:
    path = str(here / "a.py")

    assert [(path, path)] == scripts_of([path], "/work")
    assert [] == scripts_of(["/usr/bin/env"], "/work")
    assert [] == scripts_of([f"{here}/sub/../a.py"], "/work"), "what it is called is not what it is"
    assert [] == scripts_of(["python3", path], "/work"), "the interpreter reads it where it is"


def test_a_link_to_a_directory_whose_name_begins_alike_leads_outside(here: Path) -> None:
    (here.parent / "here-too").mkdir()
    (here.parent / "here-too/a.py").write_text("")
    (here / "alike.py").symlink_to("../here-too/a.py")
    assert [] == scripts_of(["python3", "alike.py"], "/work")
    assert [] == scripts_of(["./alike.py"], "/work")


def test_a_link_is_resolved_once_and_keeps_its_name(here: Path) -> None:
    assert [(str(here / "sub/c.py"), "/w/inner.py")] == scripts_of(["./inner.py"], "/w/")


def test_an_interpreter_of_ones_own_comes_with_its_script(here: Path) -> None:
    (here / "python3").write_text("")

    assert ["/w/python3", "/w/a.py"] == [
        target for _source, target in scripts_of(["./python3", "a.py"], "/w")
    ]
