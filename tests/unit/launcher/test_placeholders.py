"""What stood in for protected paths goes when nobody needs it, and nothing else does."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.native.outside import same_descriptors

from ringfence.launcher import placeholders
from ringfence.launcher.placeholders import FILES, MARK


def made(path: Path, content: bytes | None = None) -> tuple[str, str, int, int]:
    """Make one as a sandbox does."""
    if content is None:
        path.mkdir()
        path.chmod(0o700 | MARK)
    else:
        path.write_bytes(content)
    info = path.stat()
    return str(path.parent), path.name, info.st_dev, info.st_ino


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    with same_descriptors():
        yield


def test_those_inside_others_go_first(tmp_path: Path) -> None:
    some = [made(tmp_path / ".git"), made(tmp_path / ".git" / "hooks")]
    some += [made(tmp_path / ".git" / name, content) for name, content in FILES.items()]
    placeholders.remove(some)

    assert [] == list(tmp_path.iterdir())


def test_one_that_somebody_made_anew_stays(tmp_path: Path) -> None:
    some = [made(tmp_path / "hooks"), made(tmp_path / "hgrc", FILES["hgrc"])]
    for name in ("hooks", "hgrc"):
        (tmp_path / name).rename(tmp_path / f"{name}.old")  # so that its number stays taken
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hgrc").write_bytes(FILES["hgrc"])
    placeholders.remove(some)

    assert {"hooks", "hooks.old", "hgrc", "hgrc.old"} == set(os.listdir(tmp_path))


def test_one_that_another_sandbox_needs_stays(tmp_path: Path) -> None:
    some = [made(tmp_path / "hooks"), made(tmp_path / "hgrc", FILES["hgrc"])]
    needed = [os.open(tmp_path / name, os.O_RDONLY) for name in ("hooks", "hgrc")]
    for fd in needed:
        fcntl.flock(fd, fcntl.LOCK_SH)
    placeholders.remove(some)
    assert {"hooks", "hgrc"} == set(os.listdir(tmp_path))

    for fd in needed:
        os.close(fd)
    placeholders.remove(some)
    assert [] == os.listdir(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[hooks]\nupdate = evil\n", FILES["hgrc"] + b"x"])
def test_a_file_that_is_in_use_now_stays(tmp_path: Path, content: bytes) -> None:
    one = made(tmp_path / "hgrc", FILES["hgrc"])
    (tmp_path / "hgrc").write_bytes(content)
    other = made(tmp_path / "of-the-user", FILES["hgrc"])
    placeholders.remove([one, other])

    assert {"hgrc", "of-the-user"} == set(os.listdir(tmp_path))


def test_a_directory_that_is_in_use_now_is_the_users_own(tmp_path: Path) -> None:
    """And one that holds another sandbox's placeholders alone still is what it was."""
    some = [made(tmp_path / name) for name in ("used", "holding", "linked", "mixed")]
    (tmp_path / "used" / "pre-commit").touch()
    made(tmp_path / "holding" / "hooks")
    made(tmp_path / "holding" / "hgrc", FILES["hgrc"])
    (tmp_path / "linked" / "hgrc").symlink_to("/dev/null")
    made(tmp_path / "mixed" / "hooks")
    (tmp_path / "mixed" / "plain").mkdir()
    placeholders.remove(some)

    marked = {path.name: bool(path.stat().st_mode & MARK) for path in tmp_path.iterdir()}
    assert {"used": False, "holding": True, "linked": False, "mixed": False} == marked
    assert 0o700 == stat.S_IMODE((tmp_path / "used").stat().st_mode)


def test_no_link_leads_to_another(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    directory, name, device, inode = made(tmp_path / "here" / "hooks")
    (tmp_path / "way").symlink_to("here")
    (tmp_path / "link").symlink_to("here/hooks")
    placeholders.remove(
        [
            (str(tmp_path / "way"), name, device, inode),
            (str(tmp_path), "link", device, inode),
            (str(tmp_path / "absent"), name, device, inode),
            (directory, "absent", device, inode),
        ]
    )
    assert (tmp_path / "here" / "hooks").is_dir()
    assert (tmp_path / "link").is_symlink()


PICKS = "# comment\n\npick 1234 subject\nfixup 5678\n"


@pytest.mark.parametrize(
    ("name", "files", "stays"),
    [
        ("rebase-merge", {"git-rebase-todo": PICKS}, True),
        ("rebase-merge", {"git-rebase-todo": ""}, True),
        ("rebase-merge", {"git-rebase-todo": PICKS + "exec evil\n"}, False),
        ("rebase-merge", {"git-rebase-todo": PICKS + "x evil\n"}, False),
        ("rebase-merge", {"git-rebase-todo": " \texec evil\n"}, False),
        ("rebase-merge", {}, False),
        ("rebase-merge", {"todo": PICKS}, False),
        ("rebase-merge", {"git-rebase-todo": PICKS, "strategy": "ort"}, True),
        ("rebase-merge", {"git-rebase-todo": PICKS, "strategy": "evil"}, False),
        ("rebase-merge", {"git-rebase-todo": PICKS, "opts": "[options]\nanything = 1"}, True),
        ("sequencer", {"todo": "pick 1\nrevert 2\n"}, True),
        ("sequencer", {"todo": "pick 1\nedit 2\n"}, False),
        ("sequencer", {"git-rebase-todo": "pick 1\n"}, False),
        ("sequencer", {"todo": "pick 1\n", "opts": "[options]\n\tsignoff = true\n"}, True),
        ("sequencer", {"todo": "pick 1\n", "opts": "[options]\n\tstrategy = evil\n"}, False),
        ("sequencer", {"todo": "pick 1\n", "opts": "[options]\n\tgpg-sign = x\n"}, False),
        ("sequencer", {"todo": "pick 1\n", "opts": "[other]\n"}, False),
        ("sequencer", {"todo": "#" * (1 << 16)}, True),
        ("sequencer", {"todo": "#" * (1 << 16) + "#"}, False),
    ],
)
def test_what_git_would_go_on_with_is_taken_from_its_way_unless_it_runs_nothing(
    tmp_path: Path, name: str, files: dict[str, str], stays: bool
) -> None:
    state = tmp_path / name
    state.mkdir()
    for each, text in files.items():
        (state / each).write_text(text)
    placeholders.remove([(str(tmp_path), name, 0, 0)])

    (left,) = tmp_path.iterdir()
    assert stays == (left.name == name)
    assert left.name.startswith(name if stays else f"{name}.left-")
    assert set(files) == {path.name for path in left.iterdir()}


@pytest.mark.parametrize("kind", ["link", "fifo", "directory", "link as todo"])
def test_what_is_no_file_is_never_believed(tmp_path: Path, kind: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "todo").write_text("pick 1\n")
    state = tmp_path / "sequencer"
    if kind == "link":
        state.symlink_to("elsewhere")
    else:
        state.mkdir()
        todo = state / "todo"
        if kind == "fifo":
            os.mkfifo(todo)
        elif kind == "directory":
            todo.mkdir()
        else:
            todo.symlink_to("../elsewhere/todo")
    placeholders.remove([(str(tmp_path), "sequencer", 0, 0)])

    assert "sequencer" not in os.listdir(tmp_path)
    assert 2 == len(os.listdir(tmp_path))
    placeholders.remove([(str(tmp_path), "sequencer", 0, 0)])  # absent
