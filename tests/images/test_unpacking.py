"""Layers as they should be, and as an enemy makes them."""

from __future__ import annotations

import array
import fcntl
import gzip
import io
import os
import stat
import tarfile
import termios
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.errors import ImageRefused
from ringfence.images.unpack import Layer, unpack
from tests.images.making import Entry, digest_of, directory, hardlink, layer, symlink


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def _unpack(target: Path, *layers: bytes, **bounds: int) -> int:
    found = []
    for i, data in enumerate(layers):
        path = target.parent / f"layer-{i}"
        path.write_bytes(data)
        found.append(Layer(str(path)))
    return unpack(found, str(target), **bounds)


def _tree(target: Path) -> dict[str, str]:
    found = {}
    for path in sorted(target.rglob("*")):
        name = str(path.relative_to(target))
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        else:
            found[name] = "/" if path.is_dir() else path.read_text()
    return found


def test_a_layer_replaces_removes_and_adds(target: Path) -> None:
    lower = layer(
        directory("a"), Entry("a/kept", b"1"), Entry("a/gone", b"2"), Entry("a/other", b"3"),
        directory("b"), Entry("b/x", b"4"), directory("c"), Entry("c/low", b"5"),
    )  # fmt: skip
    upper = layer(
        Entry("a/.wh.gone"), Entry("a/other", b"new"), Entry(".wh.b"),
        Entry("c/high", b"6"), Entry("c/.wh..wh..opq"),
    )  # fmt: skip

    size = _unpack(target, lower, upper)

    assert {"a": "/", "a/kept": "1", "a/other": "new", "c": "/", "c/high": "6"} == _tree(target)
    assert size == 1 + 1 + 1 + 1 + 1 + 3 + 1


def test_links_and_modes(target: Path) -> None:
    usr = layer(
        directory("usr/bin"), symlink("bin", "usr/bin"), Entry("bin/tool", b"x", 0o4755),
        hardlink("usr/bin/same", "bin/tool"), directory("closed", 0o555),
        Entry("closed/in", b"y", 0o400), directory("bin"), directory("team", 0o7777),
        hardlink("also", "bin"),
    )  # fmt: skip

    _unpack(target, usr, layer(Entry("closed/more", b"z")))

    assert "-> usr/bin" == _tree(target)["bin"], "a directory in a layer is no reason to unlink"
    info = os.stat(target / "usr/bin/tool")
    assert (info.st_ino, 2) == (os.stat(target / "usr/bin/same").st_ino, info.st_nlink)
    assert 0o755 == stat.S_IMODE(info.st_mode), "no set-id bits"
    assert 0o555 == stat.S_IMODE(os.stat(target / "closed").st_mode)
    assert 0o1777 == stat.S_IMODE(os.stat(target / "team").st_mode), "no set-id bits here either"
    assert "usr/bin" == os.readlink(target / "also"), "a hard link to a symlink is a symlink"
    assert (target / "closed/more").exists()


def test_directories_are_only_so_deep(target: Path) -> None:
    """Deeper ones, of which the layer need not have any, nobody could remove again."""
    _unpack(target, layer(Entry("d/" * 256 + "file", b"deep")))
    assert "deep" == (target / ("d/" * 256) / "file").read_text()

    with pytest.raises(ImageRefused, match="nested deeper"):
        _unpack(target, layer(Entry("d/" * 257 + "file")))


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.compress])
def test_compressions(target: Path, compress: object) -> None:
    _unpack(target, compress(layer(Entry("file", b"content"))))  # type: ignore[operator]

    assert {"file": "content"} == _tree(target)


def test_devices_are_left_out(target: Path) -> None:
    _unpack(target, layer(Entry("disk", kind=tarfile.BLKTYPE), Entry("tty", kind=tarfile.CHRTYPE)))

    assert {} == _tree(target)


OUTSIDE = "../outside"


@pytest.mark.full
@pytest.mark.parametrize(
    "entries",
    [
        [Entry(OUTSIDE, b"x")],
        [Entry("a/../../outside", b"x")],
        [symlink("up", ".."), Entry("up/outside", b"x")],
        [symlink("up", "../.."), symlink("more", "up/.."), Entry("more/outside", b"x")],
        [symlink("file", OUTSIDE), Entry("file", b"x")],
        [symlink("up", ".."), Entry("up/.wh.keep")],
        [symlink("up", ".."), Entry("up/.wh..wh..opq")],
        [Entry(".wh...", b"")],
        [Entry(".wh..", b"")],
        [hardlink("mine", "../keep")],
        [symlink("up", ".."), hardlink("mine", "up/keep")],
        [symlink("up", ".."), directory("up/outside")],
    ],
)
def test_no_way_out(target: Path, entries: list[Entry]) -> None:
    (target.parent / "keep").write_text("mine")

    try:
        _unpack(target, layer(*entries))
    except ImageRefused:
        pass  # or it stayed inside

    assert not (target.parent / "outside").exists()
    assert "mine" == (target.parent / "keep").read_text()
    assert 1 == os.stat(target.parent / "keep").st_nlink


def test_no_way_out_by_an_absolute_link(target: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()

    _unpack(target, layer(symlink("out", str(there)), Entry("x", b"")))
    with pytest.raises(ImageRefused):
        _unpack(target, layer(hardlink("y", "out/none")))
    assert [] == list(there.iterdir())


def test_bombs_are_bounded(target: Path) -> None:
    zeros = gzip.compress(layer(Entry("zeros", bytes(8 << 20))))
    with pytest.raises(ImageRefused, match="larger"):
        _unpack(target, zeros, most_bytes=4 << 20)
    many = layer(*(Entry(f"f{i}") for i in range(50)))
    with pytest.raises(ImageRefused, match="more files"):
        _unpack(target, many, most_entries=49)
    assert 8 << 20 == _unpack(target, zeros, most_bytes=8 << 20), "the control"


def test_a_bomb_behind_the_end_of_the_archive(target: Path) -> None:
    data = gzip.compress(layer(Entry("x", b"1")) + bytes(64 << 20))
    with pytest.raises(ImageRefused, match="larger"):
        _unpack(target, data, most_bytes=1 << 20, most_entries=10)


def test_what_unpacks_can_do_nothing_else_before_it_reads(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked at while it waits for the second half of a layer, which comes through a FIFO."""
    monkeypatch.setenv("SECRET", "secret")
    os.mkfifo(pipe := tmp_path / "pipe")
    data = layer(Entry("first", b"1", 0o666), directory("open", 0o777), Entry("last", b"22"))
    with ThreadPoolExecutor() as pool, pipe.open("r+b", buffering=0) as end:
        end.write(data[:4])  # by which its compression is told
        unpacked = pool.submit(unpack, [Layer(str(pipe), digest_of(data))], str(target))
        left = array.array("i", [4])
        while left[0] and not unpacked.done():
            time.sleep(0.001)
            fcntl.ioctl(end, termios.FIONREAD, left)
        end.write(data[:1024])
        while not (target / "first").exists() and not unpacked.done():
            time.sleep(0.001)
        (found,) = (each for each in _children() if b"images.unpacker" in _of(each, "cmdline"))
        while str(target / "first") in _links(found).values():  # being written
            time.sleep(0.001)
        status = dict(line.split(b":\t", 1) for line in _of(found, "status").splitlines())
        environment = _of(found, "environ")
        links = _links(found)
        end.write(data[1024:])
        end.close()
        assert 3 == unpacked.result(60)
    assert (b"2", b"1") == (status[b"Seccomp"], status[b"NoNewPrivs"])
    assert {0} == {int(status[name], 16) for name in (b"CapEff", b"CapPrm", b"CapInh", b"CapAmb")}
    assert b"LC_ALL=C.UTF-8" == environment.rstrip(b"\0")
    assert "/dev/null" == links.pop("0")
    assert {str(target), str(pipe)} == {each for each in links.values() if each[0] == "/"}
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in target.iterdir()}
    assert {"first": 0o666, "open": 0o777, "last": 0o644} == modes, "no mask of the caller's"


def _children() -> list[str]:
    lists = Path("/proc/self/task").glob("*/children")
    return [pid for each in lists for pid in each.read_text().split()]


def _of(pid: str, name: str) -> bytes:
    return Path("/proc", pid, name).read_bytes()


def _links(pid: str) -> dict[str, str]:
    """What a process has open, by number."""
    found = dict[str, str]()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed in between
            found[name] = os.readlink(f"/proc/{pid}/fd/{name}")
    return found


def test_a_damaged_layer_is_refused_whatever_it_is_compressed_with(target: Path) -> None:
    for start in (b"\x1f\x8b", b"\x28\xb5\x2f\xfd"):
        with pytest.raises(ImageRefused, match="damaged"):
            _unpack(target, start + b"garbage" * 100)
    assert [] == list(target.iterdir())


def test_another_diff_id_is_refused(target: Path, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(data := layer(Entry("x", b"1")))

    right, wrong = (Layer(str(tmp_path / "one"), digest_of(each)) for each in (data, b"other"))
    for number, layers in ((1, [wrong]), (2, [right, wrong]), (1, [wrong, right])):
        with pytest.raises(ImageRefused, match=f"layer {number} is .*should be"):
            unpack(layers, str(target))
    unpack([right, right], str(target))


@pytest.mark.full
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_damaged_layers_are_refused_or_harmless(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever a bit flip makes of an archive: an answer, and nothing beside the target."""
    place = tmp_path_factory.mktemp("damaged")
    (place / "root").mkdir()
    good = bytearray(layer(directory("d"), Entry("d/f", b"x" * 600), symlink("l", "d/f")))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, 3000))] ^= data.draw(st.integers(1, 255))

    try:
        _unpack(place / "root", bytes(good))
    except ImageRefused:
        pass
    assert {"root", "layer-0"} == {path.name for path in place.iterdir()}


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_names_sizes_and_times_of_every_dialect(target: Path, form: int) -> None:
    """What a general writer puts down for long names and odd times is read as it was meant."""
    deep = "/".join(["d" * 60] * 2) + "/" + "n" * (60 if form == tarfile.USTAR_FORMAT else 150)
    far = "t" * (90 if form == tarfile.USTAR_FORMAT else 200)
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=form) as tar:
        first = tarfile.TarInfo(deep)
        first.size, first.mtime, first.mode = 3, 1_600_000_000.25, 0o640
        if form == tarfile.USTAR_FORMAT:
            first.mtime = 1_600_000_000
        tar.addfile(first, io.BytesIO(b"one"))
        link = tarfile.TarInfo("./link//to/")
        link.type, link.linkname = tarfile.SYMTYPE, far
        tar.addfile(link)
        old = tarfile.TarInfo("old/")
        old.type = tarfile.AREGTYPE  # as directories were before there were any
        tar.addfile(old)
    times = {tarfile.PAX_FORMAT: 1_600_000_000_250_000_000}

    _unpack(target, gzip.compress(made.getvalue()[:700]) + gzip.compress(made.getvalue()[700:]))

    info = os.stat(target / deep)
    assert ("one", 0o640) == ((target / deep).read_text(), stat.S_IMODE(info.st_mode))
    assert times.get(form, 1_600_000_000_000_000_000) == info.st_mtime_ns
    assert far == os.readlink(target / "link/to")
    assert (target / "old").is_dir()


def test_files_with_holes_are_refused(target: Path) -> None:
    """Nothing that builds images writes them, and two readers may see two files in one."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        sparse = tarfile.TarInfo("sparse")
        sparse.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.realsize": "5"}
        tar.addfile(sparse)

    with pytest.raises(ImageRefused, match="not allowed in a layer"):
        _unpack(target, made.getvalue())


def test_a_file_that_is_no_archive(target: Path) -> None:
    with pytest.raises(ImageRefused):
        _unpack(target, b"not a tar" * 100)
    with pytest.raises(ImageRefused):
        _unpack(target, gzip.compress(layer(Entry("x", b"1" * 5000)))[:60])
    assert [] == list(target.iterdir())
