"""Layers tell what differs between two trees, as comparing both whole would."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.errors import ResourceExhausted
from ringfence.fork import trees
from ringfence.fork.trees import StreamTree
from ringfence.model.files import DIRECTORY, FILE
from ringfence.snapshots import layers
from ringfence.snapshots.differences import (
    Part,
    Removal,
    StreamLayer,
    UnpackedLayer,
    View,
    compare,
)

pytestmark = pytest.mark.anyone

Tree = dict[str, str | None]  # the content of a file; None: a directory
PATHS = ("a", "a/b", "a/b/c", "a/d", "e", "e/f", "ab")


def _tree(chosen: dict[str, str | None]) -> Tree:
    """Only what has directories above it."""
    found: Tree = {}
    for path in sorted(chosen):
        above = path.rpartition("/")[0]
        if not above or (above in found and found[above] is None):
            found[path] = chosen[path]
    return found


TREES = st.dictionaries(st.sampled_from(PATHS), st.sampled_from([None, None, "1", "2"])).map(_tree)


def _difference(old: Tree, new: Tree) -> dict[str, str | None]:
    """A layer that makes `new` of `old`, with `.wh.NAME` for what goes."""
    found: dict[str, str | None] = {}
    for path in sorted(old.keys() | new.keys()):
        directory, _, name = path.rpartition("/")
        if path not in new:
            is_directory = not directory or (directory in new and new[directory] is None)
            if is_directory and (not directory or old.get(directory, "") is None):
                found[f"{directory}/.wh.{name}".lstrip("/")] = ""
        elif path not in old or old[path] != new[path]:
            found[path] = new[path]
    for path in [*found]:
        while path := path.rpartition("/")[0]:
            found[path] = None
    return found


def _layer(stack: ExitStack, content: dict[str, str | None], top: str = "") -> StreamLayer:
    tree = StreamTree(is_layer=True)
    stack.callback(tree.close)

    def pack(file: BinaryIO) -> None:
        with tarfile.open(fileobj=file, mode="w") as tar:
            for path in sorted(content, key=lambda each: (each.count("/"), each)):
                member = tarfile.TarInfo(f"./{path}")
                text = content[path]
                member.type = tarfile.DIRTYPE if text is None else tarfile.REGTYPE
                member.mode = 0o755 if text is None else 0o644
                member.size = len(text or "")
                tar.addfile(member, io.BytesIO((text or "").encode()))

    tree.add(pack)
    return StreamLayer(tree, top)


def _on_disk(root: str, tree: Tree) -> int:
    for path, text in tree.items():
        if text is None:
            os.mkdir(f"{root}/{path}")
        else:
            Path(f"{root}/{path}").write_text(text)
        os.chmod(f"{root}/{path}", 0o755 if text is None else 0o644)
    return os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def _shown(part: Part, path: str) -> str | bool | None:
    """What a part has at a path; False: nothing."""
    entry = part.get(path)
    if entry is None:
        return False
    assert entry[0] in (FILE, DIRECTORY)
    return b"".join(part.pieces(path)).decode() if FILE == entry[0] else None


def _below(tree: Tree, top: str) -> dict[str, str | None]:
    start = f"{top}/" if top else ""
    return {path[len(start) :]: tree[path] for path in tree if path.startswith(start)}


@settings(max_examples=150, deadline=None)
@given(
    image=st.none() | TREES,
    common=st.lists(TREES, max_size=2),
    before=st.lists(TREES, max_size=2),
    after=st.lists(TREES, max_size=3),
    top=st.sampled_from(["", "a", "a/b"]),
)
def test_every_path_that_differs_is_there_as_it_is_on_both_sides(
    image: Tree | None, common: list[Tree], before: list[Tree], after: list[Tree], top: str
) -> None:
    with ExitStack() as stack, tempfile.TemporaryDirectory() as root:
        fd = -1
        if image is not None:
            fd = _on_disk(root, image)
            stack.callback(os.close, fd)
        pile: list[StreamLayer] = []
        now: Tree = image or {}
        for each in common:
            pile.append(_layer(stack, _difference(now, each)))
            now = each
        sides: list[tuple[list[StreamLayer], Tree]] = []
        for some in (before, after):
            own, tree = [*pile], now
            for each in some:
                own.append(_layer(stack, _difference(tree, each)))
                tree = each
            sides.append((own, tree))
        views = [View([*own], fd) for own, _ in sides]
        for view, (_, tree) in zip(views, sides, strict=True):
            assert {path for path in PATHS if view.get(path) is not None} == tree.keys()
        parts = compare(views[0], views[1], top)
        for part, (_, tree) in zip(parts, sides, strict=True):
            assert part.is_absent == (bool(top) and tree.get(top, "") is not None)
        _check(parts, [_below(tree, top) for _, tree in sides])
        # What both have in common is not looked at.
        if sides[0][0] == sides[1][0]:
            assert {} == parts[0].entries == parts[1].entries


def _check(parts: tuple[Part, Part], wanted: list[dict[str, str | None]]) -> None:
    for path in wanted[0].keys() | wanted[1].keys():
        values = [each.get(path, False) for each in wanted]
        if values[0] != values[1]:
            assert values == [_shown(part, f"/{path}") for part in parts], path
    for part, each in zip(parts, wanted, strict=True):
        for path in part.entries:
            assert _shown(part, path) == each.get(path[1:], False), path


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def test_a_stream_of_a_directory_lies_at_its_place(stack: ExitStack) -> None:
    layer = _layer(stack, {"b": "1", "c": None, "c/d": "2"}, "x/a")
    view = View([layer], -1)
    assert {"x/a", "x/a/c"} == {*layer.directories}
    assert [None, (FILE, 1)] == [
        entry[:2] if (entry := view.get(path)) else None for path in ("b", "x/a/b")
    ]
    assert b"2" == b"".join(view.pieces("x/a/c/d"))


def test_a_removal_removes_one_path(stack: ExitStack) -> None:
    layer = _layer(stack, {"a": None, "a/b": "1", "a/c": "2", "b": "3"})
    before, after = View([layer], -1), View([layer, Removal("a/b")], -1)
    assert [True, False] == [each.get("a/b") is not None for each in (before, after)]
    assert after.get("a/c") == before.get("a/c")
    assert after.get("b") == before.get("b")
    old, new = compare(before, after, "")
    assert {"/a", "/a/b"} == old.entries.keys()
    assert {"/a"} == new.entries.keys()
    assert {} == Removal("a/b").names("")
    assert Removal("b").get("", "b") is not None


@pytest.mark.parametrize("removed", ["a", "a/b"])
@pytest.mark.parametrize("top", ["a", "a/b", "a/b/c"])
def test_a_directory_that_is_gone_has_lost_all_that_it_had(
    stack: ExitStack, removed: str, top: str
) -> None:
    """Its removal is an entry of a directory above it, whatever part is compared."""
    layer = _layer(stack, {"a": None, "a/b": None, "a/b/c": None, "a/b/c/d": "1", "e": "2"})
    removed = min(removed, top)
    left: Tree = {} if removed == "a" else {"a": None}
    for gone in (Removal(removed), _layer(stack, _difference({"a": None, removed: None}, left))):
        old, new = compare(View([layer], -1), View([layer, gone], -1), top)
        assert "/a/b/c/d"[len(top) + 1 :] in old.entries
        assert {} == new.entries
        assert (False, True) == (old.is_absent, new.is_absent)
        again, _ = compare(View([layer, gone], -1), View([layer], -1), top)
        assert {} == again.entries


def test_a_layer_that_is_unpacked_is_read_where_it_is(tmp_path: Path, stack: ExitStack) -> None:
    def unpacked(name: str, content: dict[str, str | None]) -> tuple[UnpackedLayer, int]:
        place = tmp_path / name
        place.mkdir()
        fd = os.memfd_create("stream")
        _layer(stack, content)._tree._file.seek(0)
        file = _layer(stack, content)._tree._file
        file.seek(0)
        os.write(fd, file.read())
        with layers.alone(str(place)):
            assert layers.unpack(str(place), fd, is_layer=False)
        os.close(fd)
        size = (place / "entries").stat().st_size
        with pytest.raises(ResourceExhausted):
            UnpackedLayer(str(place), size - 1)
        before = len(os.listdir("/proc/self/fd"))
        found = UnpackedLayer(str(place), size)
        found.close()
        assert before == len(os.listdir("/proc/self/fd"))
        found = stack.enter_context(closing(UnpackedLayer(str(place), size)))
        return found, size

    one, size = unpacked("one", {"a": None, "a/b": "1", "same": None, "same/x": "9"})
    other, _ = unpacked("other", {"a": None, "a/b": "2", "same": None, "same/x": "9", "c": "3"})
    assert 0 < one.size < size
    assert {} == one.names("none")
    assert one.get("none", "x") is None
    old, new = compare(View([one], -1), View([other], -1), "")
    assert ["1", "2"] == [_shown(each, "/a/b") for each in (old, new)]
    assert [False, "3"] == [_shown(each, "/c") for each in (old, new)]
    assert "/same/x" not in new.entries


@pytest.mark.parametrize("most", [3, 4])
def test_so_many_paths_are_compared(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(trees, "MOST_ENTRIES", most)
    layer = _layer(stack, {})
    several = _layer(stack, {"a": "1", "b": "1", "c": "1"})
    more = _layer(stack, {"a": "2", "d": "1"})  # one of them is known already
    if 4 == most:
        assert 4 == len(compare(View([layer], -1), View([layer, several, more], -1), "")[1].entries)
        return
    assert compare(View([layer], -1), View([layer, several], -1), "")
    with pytest.raises(ResourceExhausted, match="files to compare"):
        compare(View([layer], -1), View([layer, several, more], -1), "")


@pytest.mark.parametrize(("bound", "enough"), [("MOST_ENTRIES", 3), ("MOST_NAMES", len("aa/ba/c"))])
@pytest.mark.parametrize("is_image", [False, True])
def test_what_was_below_a_removed_directory_counts_as_well(
    tmp_path: Path,
    stack: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
    is_image: bool,
    bound: str,
    enough: int,
) -> None:
    content: Tree = {"a": None, "a/b": "1", "a/c": "2"}
    fd, pile = -1, list[StreamLayer]()
    if is_image:
        fd = _on_disk(str(tmp_path), content)
        stack.callback(os.close, fd)
    else:
        pile = [_layer(stack, content)]
    before, after = View([*pile], fd), View([*pile, Removal("a")], fd)
    monkeypatch.setattr(trees, bound, enough)
    assert {"/a", "/a/b", "/a/c"} == compare(before, after, "")[0].entries.keys()
    monkeypatch.setattr(trees, bound, enough - 1)
    with pytest.raises(ResourceExhausted, match="files to compare"):
        compare(before, after, "")


@pytest.mark.parametrize("top", ["", "a", "a/b"])
def test_what_lies_directly_in_the_compared_directory_is_compared(
    stack: ExitStack, top: str
) -> None:
    """And what has a name that begins like its is not."""
    files = {"": "x", "a": "a/x", "a/b": "a/b/x"}
    old, new = (
        _layer(stack, {"a": None, "a/b": None, "a/bb": None, "a/bb/x": text}
               | dict.fromkeys(files.values(), text))
        for text in ("1", "2")
    )  # fmt: skip
    for before in ([old], [old, _layer(stack, {})]):
        for after in ([new], [old, new]):
            parts = compare(View([*before], -1), View([*after], -1), top)
            for part, text in zip(parts, ("1", "2"), strict=True):
                assert text == _shown(part, "/x")
                assert (text if top == "a" else False) == _shown(part, "/bb/x")


def test_what_an_image_has_is_listed_with_one_descriptor_that_is_closed(
    tmp_path: Path, stack: ExitStack
) -> None:
    fd = _on_disk(str(tmp_path), {"a": None, "a/b": None, "a/b/c": "1"})
    stack.callback(os.close, fd)
    view, before = View([], fd), len(os.listdir("/proc/self/fd"))
    assert ["a/b", "a/b/c"] == sorted(view.of_image("a"))
    assert [] == [*view.of_image("a/b/c")] == [*view.of_image("none")]
    assert before == len(os.listdir("/proc/self/fd"))
