"""Directories that another user of the machine may have made first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.strangers import let_others_in

from ringfence.backends.local.host.own_places import own_directory, place_in, remove_tree
from ringfence.errors import IsolationError


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """As /tmp is."""
    path = tmp_path / "shared"
    path.mkdir()
    path.chmod(0o1777)
    return path


def _taken(shared: Path, how: str) -> None:
    """What somebody else can make of the name, as far as this user can be that one."""
    path = shared / "place"
    if how == "writable for others":
        path.mkdir()
        path.chmod(0o777)
    elif how == "writable for the group":
        path.mkdir()
        path.chmod(0o770)
    elif how == "a link":
        (shared / "elsewhere").mkdir()
        path.symlink_to("elsewhere")
    elif how == "a file":
        path.write_text("")
    else:
        if os.geteuid():
            pytest.skip("only root can make what is another user's")
        path.mkdir()
        os.chown(path, 65534, 65534)


TAKEN = ["another user's", "writable for others", "writable for the group", "a link", "a file"]


@pytest.mark.parametrize("how", TAKEN)
@pytest.mark.parametrize("mode", [0o700, 0o711])
def test_another_name_is_taken_and_found_again(shared: Path, how: str, mode: int) -> None:
    _taken(shared, how)
    before = set(os.listdir(shared))
    found = {place_in(str(shared), "place", mode) for _ in range(3)}

    (made,) = set(os.listdir(shared)) - before
    assert found == {str(shared / made)}
    assert made.startswith("place.")
    info = os.stat(found.pop())
    assert (os.geteuid(), mode) == (info.st_uid, info.st_mode & 0o777)


def test_a_free_name_is_what_was_asked_for(shared: Path) -> None:
    assert str(shared / "place") == place_in(str(shared), "place")
    assert own_directory(str(shared / "place"))
    assert ["place"] == os.listdir(shared)


def test_what_others_may_write_is_not_taken_in_its_stead(shared: Path) -> None:
    """An attacker may make such names, too."""
    _taken(shared, "writable for others")
    (shared / "place.0000").symlink_to(shared)
    (shared / "place.0001").mkdir()
    (shared / "place.0001").chmod(0o777)

    assert place_in(str(shared), "place") not in {str(shared / f"place.000{i}") for i in (0, 1)}


def test_where_nothing_can_be_made_it_says_what_to_do(shared: Path) -> None:
    (shared / "file").write_text("")
    with pytest.raises(IsolationError) as refusal:
        place_in(str(shared / "file"), "place")
    assert refusal.value.hint


@pytest.mark.root
def test_empty_directories_of_another_user_are_removed_and_all_else_beside_full_ones(
    tmp_path: Path,
) -> None:
    """A launcher that maps ids makes some as another user, in directories that are this one's."""
    tree = tmp_path / "tree"
    for name in ("root/a/b", "root/proc", "root/usr", "root/full/of", "root/z"):
        (tree / name).mkdir(parents=True)
    for name in ("root/a/file", "root/x", "lock"):
        (tree / name).write_text("")
    for path in (tmp_path, tree, *tree.rglob("*")):
        os.chown(path, 23456, 23456)
    for name in ("root/proc", "root/usr", "root/full", "root/full/of"):
        os.chown(tree / name, 200_000, 200_000)

    let_others_in(tmp_path.parent)
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setresgid(23456, 23456, 23456)
            os.setresuid(23456, 23456, 23456)
            remove_tree(str(tree), last="lock")
            os._exit(0)
        finally:
            os._exit(1)
    assert 0 == os.waitpid(child, 0)[1]

    assert {"lock", "root", "root/full", "root/full/of"} == {
        str(each.relative_to(tree)) for each in tree.rglob("*")
    }
    os.rmdir(tree / "root/full/of")
    remove_tree(str(tree), last="lock")
    assert not tree.exists()
