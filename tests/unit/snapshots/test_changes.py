"""Two streams are compared by content, within bounds whatever a guest has written."""

from __future__ import annotations

import io
import os
import tarfile
import time
from pathlib import Path

import pytest

from ringfence.errors import ResourceExhausted
from ringfence.fork import trees
from ringfence.model.changes import Changes
from ringfence.snapshots import changes as module
from ringfence.snapshots.changes import MOST_DIFF_CHARACTERS, MOST_ITEMS, compare

pytestmark = pytest.mark.anyone


def _stream(files: dict[str, bytes], links: dict[str, str] | None = None) -> int:
    fd = os.memfd_create("stream")
    with open(fd, "wb", closefd=False) as file, tarfile.open(fileobj=file, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size, member.mtime = len(content), time.time()
            tar.addfile(member, io.BytesIO(content))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(f"./{name}")
            member.type, member.linkname = tarfile.LNKTYPE, f"./{target}"
            tar.addfile(member)
    return fd


def _compare(before: int, after: int, root: int = -1, *, is_layer: bool = False) -> Changes:
    try:
        return compare([before], [after], is_layer=is_layer, root=root, is_mounted=lambda _: False)
    finally:
        os.close(before)
        os.close(after)


def _told(found: Changes) -> list[tuple[str, str]]:
    return [(each.path, each.change) for each in found.items]


def test_content_is_compared_and_times_are_not() -> None:
    found = _compare(_stream({"a": b"1", "b": b"1"}), _stream({"a": b"1", "b": b"2"}))

    assert [("/b", "changed")] == _told(found)
    assert found == Changes.from_json(found.to_json())


def test_another_name_of_a_file_is_new_with_the_content_of_the_first() -> None:
    found = _compare(_stream({"a": b"x\n"}), _stream({"a": b"x\n"}, {"b": "a"}))

    assert [("/b", "added")] == _told(found)
    assert "+x\n" in found.diff()


def test_the_list_and_the_diff_end_at_their_bounds() -> None:
    many = {f"f{number:05}": b"" for number in range(MOST_ITEMS + 1)}
    large = {f"f{number}": os.urandom(60_000).hex().encode() for number in range(12)}

    listed = _compare(_stream({}), _stream(many))
    written = _compare(_stream({}), _stream(large))

    assert (MOST_ITEMS, False) == (len(listed.items), listed.is_complete)
    assert (12, False) == (len(written.items), written.is_complete)
    assert 0 < len(written.diff()) <= MOST_DIFF_CHARACTERS


def test_more_entries_than_memory_is_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "MOST_ENTRIES", 2)

    with pytest.raises(ResourceExhausted, match="more than 2 files"):
        _compare(_stream({}), _stream({"a": b"", "b": b"", "c": b""}))


def test_lines_that_are_slow_to_compare_take_no_time() -> None:
    before = b"".join(b"%d\n" % (number % 7) for number in range(60_000))
    after = b"".join(b"%d\n" % (number % 11) for number in range(60_000))
    begun = time.process_time()

    found = _compare(_stream({"a": before}), _stream({"a": after}))

    assert time.process_time() - begun < 2
    assert found.diff().startswith("--- a/a\n+++ b/a\n@@ -")


def test_the_diff_is_one_that_git_applies(tmp_path: Path) -> None:
    import subprocess

    long = [f"{number}\n" for number in range(3000)]
    old = {"a": b"1\n2\x0c3", "long": "".join(long).encode(), "gone": b"x\n"}
    long[1500] = "other\n"
    new = {"a": b"1\n2\x0c4\n", "long": "".join(long).encode(), "new": b"\xe2\x80\xa8\ny"}
    for name, content in old.items():
        (tmp_path / name).write_bytes(content)

    text = _compare(_stream(old), _stream(new)).diff()
    command = ["git", "apply", "--unidiff-zero", "-"]
    subprocess.run(command, input=text.encode(), cwd=tmp_path, check=True)

    assert new == {each.name: each.read_bytes() for each in tmp_path.iterdir()}


def test_a_name_that_steers_a_terminal_is_escaped() -> None:
    found = _compare(_stream({}), _stream({"a\x1b[2J\nb": b"x\n"}))

    assert "+++ b/a\\x1b[2J\\nb\n" in found.diff()


def test_files_of_an_image_are_changed_or_removed_and_not_added(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/motd").write_text("old\n")
    (tmp_path / "etc/gone").write_text("gone\n")
    (tmp_path / "out").symlink_to("/etc")
    root = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    after = _stream({"etc/motd": b"new\n", "etc/.wh.gone": b"", "out/passwd": b"mine\n"})

    found = _compare(_stream({}), after, root, is_layer=True)
    os.close(root)

    told = [("/etc/gone", "removed"), ("/etc/motd", "changed"), ("/out/passwd", "added")]
    assert told == _told(found)
    assert "-old\n+new\n" in found.diff()
    assert "-gone\n" in found.diff()


def test_what_a_mount_covers_and_what_a_layer_repeats_is_no_change(tmp_path: Path) -> None:
    """A layer may write what the image has already, and remove what it has not."""
    (tmp_path / "same").write_text("s\n")
    (tmp_path / "same").chmod(0o644)
    root = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    files = {"same": b"s\n", ".wh.never": b"", "mounted/a": b"1", "new": b"1\n"}
    before, after = _stream({}), _stream(files)

    found = compare([before], [after], is_layer=True, root=root, is_mounted="/mounted/a".__eq__)

    assert [("/new", "added")] == _told(found)
    for fd in (before, after, root):
        os.close(fd)


def test_trees_that_lie_over_one_another_are_one(tmp_path: Path) -> None:
    """What replaces a directory takes along what was in it, whatever it is."""
    lower = {"gone/x": b"1\n", "file/y": b"2\n", "stays/z": b"3\n", "old": b"4\n"}
    for name in ("gone", "file", "stays"):
        lower = {name: b"", **lower}
    streams = [_tree(lower), _tree({".wh.gone": b"", "file": b"5\n", "old": b"6\n"}, as_file=True)]
    nothing = _stream({})

    found = compare([nothing], streams, is_layer=False, root=-1, is_mounted=lambda _: False)

    told = [("/file", "added"), ("/old", "added"), ("/stays", "added"), ("/stays/z", "added")]
    assert told == _told(found)
    assert "+5\n" in found.diff()
    assert "+3\n" in found.diff()
    assert "+4\n" not in found.diff()
    for fd in (nothing, *streams):
        os.close(fd)


def _tree(files: dict[str, bytes], *, as_file: bool = False) -> int:
    """A stream in which names without content are directories."""
    fd = os.memfd_create("stream")
    with open(fd, "wb", closefd=False) as file, tarfile.open(fileobj=file, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(content)
            if not content and not as_file:
                member.type = tarfile.DIRTYPE
            tar.addfile(member, io.BytesIO(content))
    return fd


@pytest.mark.parametrize("is_below", [True, False])
def test_texts_share_one_bound_and_one_that_comes_twice_counts_once(
    tmp_path: Path, is_below: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of the streams, and of the files of an image below that are removed."""
    monkeypatch.setattr(module, "_MOST_TEXTS_BYTES", 8)
    own = {"a": b"11\n", "b": b"11\n", "c": b"222\n", "d": b"3\n"}
    before = len(os.listdir("/proc/self/fd"))
    if is_below:
        for name, content in own.items():
            (tmp_path / name).write_bytes(content if name != "b" else b"")
        root = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
        removed = {f".wh.{name}": b"" for name in own}
        text = _compare(_stream({}), _stream(removed), root, is_layer=True).diff()
        os.close(root)
    else:
        text = _compare(_stream({}), _stream(own)).diff()

    sign = "-" if is_below else "+"
    assert f"{sign}11\n" in text
    assert f"{sign}222\n" in text
    assert f"{sign}3\n" not in text
    assert 1 == text.count("Binary files")
    assert before == len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("more", [0, 1])
def test_a_text_is_so_long_and_no_longer(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_TEXT_BYTES", 8)
    text = _compare(_stream({}), _stream({"a": b"x" * (8 + more)})).diff()
    assert bool(more) == text.startswith("Binary files")


def test_a_line_that_is_replaced_by_its_like_is_shown_once() -> None:
    """Where the common beginning and the common end would overlap."""
    many = [f"{number}\n" for number in range(1200)]
    for old, new, shown in (
        (["a\n", "a\n"], ["a\n", "a\n", "a\n"], ["+a"]),
        (["a\n", "a\n", "a\n"], ["a\n"], ["-a", "-a"]),
        (["a\n"], ["b\n"], ["-a", "+b"]),
    ):
        sides = ["".join([*many, *each]).encode() for each in (old, new)]
        lines = _compare(_stream({"f": sides[0]}), _stream({"f": sides[1]})).diff().splitlines()
        assert shown == [each for each in lines[3:] if each]
