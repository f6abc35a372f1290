"""Each kind of entry of a layer, applied in this process: where it may lead, and what it may replace."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from ringfence.errors import ImageRefused, IoError, StorageFull
from ringfence.images import unpack as unpacking
from ringfence.images.entries import DamagedError
from ringfence.images.unpack import Layer, unpack
from ringfence.images.unpacker import RefusedError, Tree, _normal, remove_tree
from tests.images.making import Entry, directory, hardlink, layer, symlink

FIFO = Entry("x", kind=tarfile.FIFOTYPE)


class Pieces:
    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    def read(self) -> bytes:
        return self._file.read(700)


class Target:
    """An empty tree, with a file beside it."""

    def __init__(self, top: Path) -> None:
        self.top, self.root = top, top / "root"
        self.root.mkdir()
        (top / "keep").write_text("mine")

    def apply(self, *layers: bytes, most_bytes: int = 1 << 20, most_entries: int = 1000) -> Tree:
        """Apply all layers, and check that every descriptor is given back once the tree is gone."""
        before = len(os.listdir("/proc/self/fd"))
        fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        tree = Tree(fd, most_bytes, most_entries)
        try:
            for each in layers:
                tree.apply(Pieces(each))
            tree.finish()
            assert before + 1 == len(os.listdir("/proc/self/fd"))
        finally:
            os.close(fd)
        return tree

    def is_alone(self) -> bool:
        """Tell whether what is beside the tree is as it was."""
        keep = self.top / "keep"
        return (
            {"root", "keep"} == {path.name for path in self.top.iterdir()}
            and "mine" == keep.read_text()
            and 1 == keep.stat().st_nlink
        )


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    yield Target(tmp_path)
    for top, names, _ in os.walk(tmp_path):
        for name in names:
            if not os.path.islink(os.path.join(top, name)):
                os.chmod(os.path.join(top, name), 0o700)  # or nobody but root could remove it


@pytest.mark.parametrize(
    ("entries", "error"),
    [
        ([Entry("../outside", b"x")], RefusedError),
        ([Entry("a/../../outside", b"x")], RefusedError),
        ([directory("../outside")], RefusedError),
        ([symlink("../outside", "x")], RefusedError),
        ([hardlink("mine", "../keep")], RefusedError),
        ([hardlink("mine", "")], RefusedError),
        ([hardlink("mine", "./")], RefusedError),
        ([hardlink("mine", "none")], RefusedError),
        ([hardlink("mine", "none/none")], RefusedError),
        ([directory("d"), hardlink("mine", "d")], RefusedError),
        ([Entry(".wh..")], RefusedError),
        ([Entry(".wh...")], RefusedError),
        ([Entry(".wh.")], RefusedError),
        ([Entry("d/.wh...")], RefusedError),
        ([symlink("up", "../.."), hardlink("mine", "up/keep")], RefusedError),
        ([symlink("up", ".."), Entry("up/.wh.keep")], None),
        ([symlink("up", ".."), Entry("up/.wh..wh..opq")], None),
        ([symlink("up", ".."), Entry("up/outside", b"x")], None),
        ([symlink("up", "../.."), symlink("more", "up/.."), Entry("more/outside", b"x")], None),
        ([symlink("up", ".."), directory("up/outside")], None),
        ([symlink("file", "../keep"), Entry("file", b"x")], None),
        ([symlink("file", "../outside"), Entry("file", b"x")], None),
        ([symlink("file", "../keep"), hardlink("also", "file"), Entry("also", b"x")], None),
        ([symlink("proc", "/proc/self/root"), Entry("proc/outside", b"x")], OSError),
    ],
)
def test_no_entry_leads_outside(
    target: Target, entries: list[Entry], error: type[Exception] | None
) -> None:
    target.apply(layer(Entry("before", b"kept")))
    with pytest.raises(error) if error else nullcontext():
        target.apply(layer(*entries))
    assert target.is_alone()
    assert not error or "kept" == (target.root / "before").read_text()


def test_a_hard_link_to_a_symlink_is_the_symlink(target: Target) -> None:
    target.apply(
        layer(
            directory("d"),
            *(symlink("l", "../keep"), hardlink("a", "l")),
            *(symlink("m", "d"), hardlink("b", "m")),
        )
    )
    assert ["../keep", "d"] == [os.readlink(target.root / name) for name in "ab"]
    assert target.is_alone()


def test_directories_have_their_modes_also_below_one_that_nobody_may_enter(target: Target) -> None:
    target.apply(layer(directory("a", 0o600), directory("a/b", 0o511)))
    (target.root / "a").chmod(0o700)

    assert 0o511 == stat.S_IMODE((target.root / "a" / "b").stat().st_mode)


BEFORE = {
    "nothing": [],
    "a file": [Entry("x", b"old")],
    "a symlink to a directory": [directory("d"), symlink("x", "d")],
    "a symlink to a file": [Entry("f", b"f"), symlink("x", "f")],
    "a symlink to nothing": [symlink("x", "none")],
    "a FIFO": [FIFO],
    "a hard link": [Entry("f", b"f"), hardlink("x", "f")],
    "a directory": [directory("x"), Entry("x/inner", b"inner")],
    "a full directory that may not be written": [
        directory("x", 0o500), directory("x/y", 0o500), Entry("x/y/inner", b"inner"),
    ],
}  # fmt: skip
AFTER = {
    "a file": Entry("x", b"new"),
    "a symlink": symlink("x", "new"),
    "a FIFO": FIFO,
    "a hard link": hardlink("x", "other"),
}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("after", AFTER)
def test_an_entry_replaces_whatever_a_lower_layer_has_there(
    target: Target, before: str, after: str
) -> None:
    target.apply(layer(Entry("other", b"other"), *BEFORE[before]), layer(AFTER[after]))

    found = target.root / "x"
    if after == "a symlink":
        assert "new" == os.readlink(found)
    elif after == "a FIFO":
        assert stat.S_ISFIFO(found.lstat().st_mode)
    else:
        assert {"a file": "new", "a hard link": "other"}[after] == found.read_text()
        assert not found.is_symlink()
    if (target.root / "f").exists():
        assert "f" == (target.root / "f").read_text(), "what a link led to is not written"


@pytest.mark.parametrize("before", BEFORE)
def test_a_directory_replaces_all_but_directories_and_links_to_them(
    target: Target, before: str
) -> None:
    target.apply(layer(*BEFORE[before]), layer(directory("x", 0o711)))

    found = target.root / "x"
    assert found.is_dir()
    assert ("a symlink to a directory" == before) == found.is_symlink()
    assert ("directory" in before and "symlink" not in before) == bool(os.listdir(found))
    if not found.is_symlink():
        assert 0o711 == stat.S_IMODE(found.stat().st_mode)


def test_bytes_and_entries_are_counted_over_all_layers(target: Target) -> None:
    one, other = layer(Entry("a", b"123")), layer(Entry("b", b"45"), symlink("l", "b"))

    tree = target.apply(one, other, most_bytes=5, most_entries=3)
    assert (0, 0) == (tree.left_bytes, tree.left_entries)
    with pytest.raises(RefusedError, match="larger"):
        target.apply(one, other, most_bytes=4, most_entries=3)
    with pytest.raises(RefusedError, match="more files"):
        target.apply(one, other, most_bytes=5, most_entries=2)


def test_entries_that_make_nothing_are_counted_too(target: Target) -> None:
    device = Entry("x", kind=tarfile.CHRTYPE)
    for entry in (device, Entry(".wh.x"), Entry(".wh..wh..opq"), directory("./")):
        target.apply(layer(entry), most_entries=1)
        with pytest.raises(RefusedError, match="more files"):
            target.apply(layer(entry), most_entries=0)
    assert [] == os.listdir(target.root)


def test_a_whiteout_hides_what_lower_layers_have_and_nothing_else(target: Target) -> None:
    lower = layer(
        directory("d"), Entry("d/a", b"a"), Entry("d/b", b"b"), directory("d/c"), Entry("d/c/x"),
        Entry("d2", b""), Entry(".wh", b"no whiteout"),
    )  # fmt: skip
    target.apply(lower, layer(Entry("d/.wh.a"), Entry("d/.wh.c"), Entry("d/.wh.none")))
    assert ["b"] == os.listdir(target.root / "d")
    upper = layer(Entry("d/new", b"n"), Entry("d/.wh..wh..opq"), Entry("d/newer", b"n"))
    target.apply(upper)
    assert ["new", "newer"] == sorted(os.listdir(target.root / "d"))
    target.apply(upper, layer(Entry("d/.wh..wh..opq")))
    assert [] == os.listdir(target.root / "d"), "each layer begins without entries of its own"
    assert {"d", "d2", ".wh"} == {*os.listdir(target.root)}
    target.apply(layer(Entry("last", b""), Entry(".wh..wh..opq")))
    assert ["last"] == os.listdir(target.root), "the root can be opaque as well"


@pytest.mark.parametrize(
    ("entry", "mode"),
    [
        (Entry("x", mode=0o7777), 0o1777),
        (Entry("x", mode=0o6644), 0o644),
        (directory("x", 0o7777), 0o1777),
        (Entry("x", mode=0o7666, kind=tarfile.FIFOTYPE), 0o666),
    ],
)
def test_no_entry_has_set_id_bits(target: Target, entry: Entry, mode: int) -> None:
    mask = os.umask(0)
    try:
        target.apply(layer(entry))
    finally:
        os.umask(mask)
    assert mode == stat.S_IMODE((target.root / "x").stat().st_mode)


@pytest.mark.parametrize("kind", [b"0", b"5", b"2", b"6"])
@pytest.mark.parametrize(
    ("told", "kept"), [(-5, 0), (0, 0), (1 << 33, 1 << 33), ((1 << 33) + 1, 1 << 33)]
)
def test_times_are_kept_within_what_file_systems_have(
    target: Target, kind: bytes, told: int, kept: int
) -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("x")
        info.type, info.mtime, info.linkname, info.mode = kind, told, "y", 0o755
        tar.addfile(info)
    target.apply(made.getvalue())

    assert kept == (target.root / "x").lstat().st_mtime


def test_directories_that_a_layer_leaves_out_are_made(target: Target) -> None:
    target.apply(layer(Entry("a/b/c", b"x"), Entry("a/d", b"y")))

    assert 0o755 & ~os.umask(os.umask(0o22)) == stat.S_IMODE((target.root / "a/b").stat().st_mode)
    assert ["b", "d"] == sorted(os.listdir(target.root / "a"))


def test_a_directory_that_a_later_layer_replaced_has_no_mode_of_its_own(target: Target) -> None:
    target.apply(layer(directory("x", 0o711)), layer(Entry("x", b"", 0o600)))
    assert 0o600 == stat.S_IMODE((target.root / "x").stat().st_mode)

    target.apply(layer(directory("y", 0o711)), layer(Entry(".wh.y"), symlink("y", "x")))
    assert 0o600 == stat.S_IMODE((target.root / "x").stat().st_mode), "no link is followed"


def test_a_directory_that_may_not_be_written_is_changed_by_a_layer_that_has_it(
    target: Target,
) -> None:
    """In the files of an image below, directories have their modes before a layer comes on top."""
    target.apply(layer(directory("x", 0o555), Entry("x/old", b"1"), directory("x/y", 0o400)))
    target.apply(
        layer(directory("x", 0o500), Entry("x/.wh.old"), directory("x/y"), Entry("x/y/new", b"2"))
    )

    assert ["y"] == os.listdir(target.root / "x")
    assert 0o500 == stat.S_IMODE((target.root / "x").stat().st_mode)
    assert "2" == (target.root / "x" / "y" / "new").read_text()


def test_a_stream_of_a_layer_must_be_whole(target: Target) -> None:
    data = layer(Entry("x", b"1" * 3000))
    for end in (0, 100, 511, 1024, 3000):
        with pytest.raises(DamagedError):
            target.apply(data[:end])


def test_names_are_made_plain() -> None:
    for given, plain in {
        "./a//b/./c/": "a/b/c",
        "/a": "a",
        ".": "",
        "./": "",
        "/": "",
        ".a": ".a",
        "..a/b..": "..a/b..",
        "a" * 4096: "a" * 4096,
        "d/" * 256: ("d/" * 256)[:-1],
    }.items():
        assert plain == _normal(given), given[:20]
    for wrong in ("..", "a/..", "../a", "a/../b", "/..", "a\0", "a" * 4097, "d/" * 257):
        with pytest.raises(RefusedError):
            _normal(wrong)


def test_a_tree_is_removed_without_following_links(tmp_path: Path) -> None:
    tree, kept = tmp_path / "tree", tmp_path / "kept"
    (tree / "a" / "b").mkdir(parents=True)
    kept.mkdir()
    (kept / "file").write_text("mine")
    (tree / "a" / "b" / "file").write_text("x")
    (tree / "a" / "link").symlink_to(kept)
    (tree / "a" / "b").chmod(0o500)
    (tree / "a").chmod(0o500)
    parent = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    before = len(os.listdir("/proc/self/fd"))
    remove_tree(parent, "tree")
    assert before == len(os.listdir("/proc/self/fd"))
    os.close(parent)

    assert ["kept"] == os.listdir(tmp_path)
    assert "mine" == (kept / "file").read_text()


def test_a_layer_that_is_refused_gives_its_descriptors_back(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    path = tmp_path / "layer"
    path.write_bytes(layer(Entry("../x")))
    before = len(os.listdir("/proc/self/fd"))

    with pytest.raises(ImageRefused, match="outside"):
        unpack([Layer(str(path)), Layer(str(path))], str(tmp_path / "root"))
    with pytest.raises(FileNotFoundError):
        unpack([Layer(str(path)), Layer(str(tmp_path / "none"))], str(tmp_path / "root"))
    assert before == len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ({"errno": 28, "text": "x"}, StorageFull),
        ({"errno": 122, "text": "x"}, StorageFull),
        ({"errno": 5, "text": "x"}, IoError),
        ({"refused": "x"}, ImageRefused),
        ({"text": "x"}, IoError),
        ({}, IoError),
    ],
)
def test_each_answer_of_the_unpacker_is_an_error_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: dict[str, object], error: type
) -> None:
    monkeypatch.setattr(unpacking, "_ask", lambda *_: answer)
    with pytest.raises(Exception, match="unpack") as raised:
        unpack([], str(tmp_path))
    assert error is type(raised.value)
