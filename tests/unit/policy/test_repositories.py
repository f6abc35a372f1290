"""Search for the git directories below a mount: what one is, how deep it looks, and where it gives up."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence.errors import InvalidRequest
from ringfence.policy import repositories
from ringfence.policy.repositories import look

pytestmark = pytest.mark.anyone


def git_directory(path: Path, *without: str) -> Path:
    path.mkdir(parents=True)
    for each in {"objects", "refs"}.difference(without):
        (path / each).mkdir()
    if "HEAD" not in without:
        (path / "HEAD").touch()
    return path


def found(root: Path) -> tuple[set[str], set[str]]:
    result = look(str(root))
    assert len(result.directories) == len({*result.directories})
    return {*result.directories}, {*result.links}


def test_a_repository_is_known_by_what_is_in_it(tmp_path: Path) -> None:
    git_directory(tmp_path / "app" / ".git")
    git_directory(tmp_path / "bare.git")
    for missing in ("HEAD", "objects", "refs"):
        git_directory(tmp_path / f"no-{missing}", missing)

    assert ({"app/.git", "bare.git"}, set()) == found(tmp_path)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_it_looks_three_directories_deep(tmp_path: Path, depth: int) -> None:
    below = "/".join("abcd"[:depth])
    git_directory(tmp_path / below / ".git")

    assert ({f"{below}/.git"} if depth <= 3 else set()) == found(tmp_path)[0]


def test_a_bare_repository_is_found_as_deep_as_a_directory_is_looked_into(tmp_path: Path) -> None:
    git_directory(tmp_path / "a" / "b" / "c")
    git_directory(tmp_path / "d" / "e" / "f" / "g")

    assert {"a/b/c"} == found(tmp_path)[0]


@pytest.mark.parametrize(
    "name", ["node_modules", "__pycache__", ".venv", "venv", ".cache", ".tox", "target"]
)
def test_dependencies_and_caches_are_not_looked_into(tmp_path: Path, name: str) -> None:
    git_directory(tmp_path / name / "x" / ".git")
    git_directory(tmp_path / f"{name}s" / "x" / ".git")

    assert {f"{name}s/x/.git"} == found(tmp_path)[0]


def test_parts_of_a_repository_are_found_however_deep_and_other_directories_of_it_are_not(
    tmp_path: Path,
) -> None:
    """Submodules below submodules, and the halves of linked work trees, which have no objects."""
    inner = git_directory(tmp_path / ".git")
    git_directory(inner / "modules" / "a" / "b" / "c" / "d" / "e")
    git_directory(inner / "modules" / "node_modules")
    tree = inner / "worktrees" / "linked"
    tree.mkdir(parents=True)
    (tree / "HEAD").touch()
    (tree / "commondir").touch()
    (inner / "worktrees" / "none").mkdir()
    (inner / "worktrees" / "none" / "HEAD").touch()
    git_directory(inner / "objects" / "x")
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("HEAD", "commondir"):
        (outside / name).touch()

    assert {
        ".git",
        ".git/modules/a/b/c/d/e",
        ".git/modules/node_modules",
        ".git/worktrees/linked",
    } == found(tmp_path)[0]


def test_files_that_name_a_repository_are_links_and_the_mount_s_own_is_not(tmp_path: Path) -> None:
    """That of the mount itself is among the names that are protected in every mount."""
    for place in (tmp_path, tmp_path / "sub", tmp_path / "a" / "b"):
        place.mkdir(parents=True, exist_ok=True)
        (place / ".git").write_text("gitdir: elsewhere")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / ".git").symlink_to("/nowhere")
    git_directory(tmp_path / "whole" / ".git")

    directories, links = found(tmp_path)

    assert {"sub/.git", "a/b/.git", "linked/.git"} == links
    assert {"whole/.git"} == directories


def test_no_link_is_followed(tmp_path: Path) -> None:
    git_directory(tmp_path / "elsewhere" / "repo" / ".git")
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path / "elsewhere")
    (root / "loop").symlink_to(root)

    assert (set(), set()) == found(root)
    assert {"repo/.git"} == found(tmp_path / "elsewhere")[0]


def test_a_directory_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    """Neither what is no directory any more, nor what this user may not open, stops the search."""
    git_directory(tmp_path / "seen" / ".git")
    file = tmp_path / "file"
    file.touch()

    assert (set(), []) == repositories._list(str(file)), "ENOTDIR"
    assert (set(), []) == repositories._list(str(tmp_path / "gone")), "ENOENT"
    (closed := tmp_path / "closed").mkdir(mode=0o000)
    assert (set(), []) == repositories._list(str(closed)), "EACCES, of an ordinary user"
    assert {"seen/.git"} == found(tmp_path)[0]


def test_it_finds_as_many_as_may_be_and_not_one_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directories and links together; a list that is cut would leave some open without a word."""
    monkeypatch.setattr(repositories, "_MOST_FOUND", 3)
    for name in ("a", "b"):
        git_directory(tmp_path / name / ".git")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / ".git").touch()
    (tmp_path / "d" / "e").mkdir(parents=True)
    assert 3 == sum(map(len, found(tmp_path)))

    (tmp_path / "d" / ".git").touch()
    with pytest.raises(InvalidRequest, match="too many") as refusal:
        look(str(tmp_path))
    assert "protect" == refusal.value.field


def test_it_looks_at_as_many_as_may_be_and_at_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repositories, "_MOST_LOOKED_AT", 4)
    for name in "abc":
        (tmp_path / name).mkdir()
    assert (set(), set()) == found(tmp_path), "four, the mount among them"

    (tmp_path / "d").mkdir()
    with pytest.raises(InvalidRequest, match="too many"):
        look(str(tmp_path))


def test_the_bounds_are_wide_enough_for_work_and_no_wider() -> None:
    assert (20_000, 100) == (repositories._MOST_LOOKED_AT, repositories._MOST_FOUND)
