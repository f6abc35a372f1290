"""Unpacked snapshots: held only where they are what was unpacked, at this boot, and given back after that."""

from __future__ import annotations

import fcntl
import io
import json
import marshal
import os
import stat
import subprocess
import sys
import tarfile
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.native.outside import until

from ringfence.launcher.helpers.layers import GONE
from ringfence.model.files import DIRECTORY, FILE, OTHER, SYMLINK
from ringfence.snapshots import layers

DEEPEST = 256
CHOWN, DAC_OVERRIDE, FOWNER = 1 << 0, 1 << 1, 1 << 3  # capability.h


def stream(*names: str, links: dict[str, str] | None = None, **owner: int) -> int:
    """A tar stream; a name with `/` at its end is a directory."""
    fd = os.memfd_create("stream")
    with open(fd, "wb", closefd=False) as file, tarfile.open(fileobj=file, mode="w") as tar:
        for name in names:
            member = tarfile.TarInfo(f"./{name}".rstrip("/"))
            member.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            member.mode = 0o750 if name.endswith("/") else 0o640
            member.uid, member.gid = owner.get("uid", 0), owner.get("gid", 0)
            member.size = 0 if name.endswith("/") else len(name)
            tar.addfile(member, io.BytesIO(name.encode()))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(f"./{name}")
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
    return fd


def unpack(place: Path, content: int, *, is_layer: bool = False) -> bool:
    place.mkdir(exist_ok=True)
    try:
        with layers.alone(str(place)):
            return layers.unpack(str(place), content, is_layer=is_layer)
    finally:
        os.close(content)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_it_is_held_while_somebody_has_it_open(tmp_path: Path) -> None:
    place = tmp_path / "snap-a"
    before = descriptors()
    assert unpack(place, stream("d/", "d/a"))
    assert b"d/a" == (place / "tree" / "d" / "a").read_bytes()
    assert ["entries", "names", "tree", "unpacked"] == sorted(os.listdir(place))
    assert not layers.is_held(str(place))
    held = [layers.hold(str(place)) for _ in range(2)]
    assert min(held) >= 0
    for fd in held:
        assert layers.is_held(str(place))
        assert not os.get_inheritable(fd)
        os.close(fd)
    assert not layers.is_held(str(place))
    assert before == descriptors()


Ready = list[Any]
NOT_IT: dict[str, Callable[[Ready], object]] = {
    "another boot": lambda ready: [ready[0].replace("-", "0"), *ready[1:]],
    "no boot": lambda ready: ["", *ready[1:]],
    "another device": lambda ready: [ready[0], ready[1] + 1, ready[2]],
    "another directory": lambda ready: [ready[0], ready[1], ready[2] + 1],
    "less": lambda ready: ready[:2],
    "more": lambda ready: [*ready, 0],
    "none": lambda _ready: {},
}


@pytest.mark.parametrize("what", NOT_IT)
def test_what_is_not_what_was_unpacked_is_not_held(tmp_path: Path, what: str) -> None:
    """A tree of another boot may lack what the disk had not yet, and a copy has other change times."""
    place = tmp_path / "snap-a"
    unpack(place, stream("a"))
    before = descriptors()
    text = (place / "unpacked").read_text()
    (place / "unpacked").write_text(json.dumps(NOT_IT[what](json.loads(text))))
    assert -1 == layers.hold(str(place))
    assert not layers.has_failed(str(place))
    assert before == descriptors()
    (place / "unpacked").write_text(text)
    os.close(layers.hold(str(place)))


def test_half_of_it_is_not_held(tmp_path: Path) -> None:
    place = tmp_path / "snap-a"
    place.mkdir()
    before = descriptors()
    assert -1 == layers.hold(str(place))
    assert not layers.is_held(str(place))
    unpack(place, stream("a"))
    text = (place / "unpacked").read_text()
    (place / "unpacked").write_text(text[:-3])
    assert -1 == layers.hold(str(place))
    (place / "unpacked").write_text(text)
    layers.remove_tree(str(place / "tree"))
    assert -1 == layers.hold(str(place))
    assert before == descriptors()


def test_one_that_was_replaced_while_it_was_waited_for_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "snap-a"
    unpack(place, stream("a"))
    before, original = descriptors(), fcntl.flock

    def replaced(fd: int, how: int) -> None:
        original(fd, how)
        layers._write(str(place / "unpacked"), (place / "unpacked").read_bytes())

    with monkeypatch.context() as patch:
        patch.setattr("ringfence.snapshots.layers.fcntl.flock", replaced)
        assert -1 == layers.hold(str(place))
    assert before == descriptors()


def test_one_that_cannot_be_unpacked_is_not_tried_again_at_this_boot(tmp_path: Path) -> None:
    place = tmp_path / "snap-a"
    assert not layers.has_failed(str(place))
    too_deep = "d/" * (DEEPEST - 1)
    names = [too_deep[: 2 * (at + 1)] for at in range(DEEPEST - 1)]
    assert unpack(tmp_path / "snap-b", stream(*names, f"{too_deep}f"))
    before = descriptors()
    assert not unpack(place, stream(*names, f"{too_deep}d/", f"{too_deep}d/f"))
    assert ["unpacked"] == os.listdir(place)
    assert layers.has_failed(str(place))
    assert -1 == layers.hold(str(place))
    assert before == descriptors()
    ready = json.loads((place / "unpacked").read_text())
    (place / "unpacked").write_text(json.dumps(["another boot", *ready[1:]]))
    assert not layers.has_failed(str(place))
    (place / "unpacked").write_text("{")
    assert not layers.has_failed(str(place))
    assert unpack(place, stream("a"))
    assert not layers.has_failed(str(place))


def test_it_is_unpacked_in_place_of_what_an_earlier_boot_left(tmp_path: Path) -> None:
    place = tmp_path / "snap-a"
    unpack(place, stream("old"))
    (place / ".tree-1").mkdir()
    (place / ".tree-1" / "half").write_text("")
    for name in ("names.new", "other.new"):
        (place / name).write_text("half")
    (place / "snapshot.json").write_text("{}")
    unpack(place, stream("new"))
    assert ["new"] == os.listdir(place / "tree")
    assert ["entries", "names", "snapshot.json", "tree", "unpacked"] == sorted(os.listdir(place))
    layers.tidy(str(tmp_path / "none"))


def test_others_wait_while_one_unpacks(tmp_path: Path) -> None:
    def is_free() -> bool:
        fd = os.open(tmp_path, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
        return True

    with layers.alone(str(tmp_path)):
        assert not is_free()
    assert is_free()
    with pytest.raises(ValueError, match="x"), layers.alone(str(tmp_path)):
        raise ValueError("x")
    assert is_free()


def test_what_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "names"
    layers._write(str(path), b"old")

    def fail(*_args: object) -> None:
        raise OSError(28, "full")

    with monkeypatch.context() as patch:
        patch.setattr("ringfence.snapshots.layers.os.rename", fail)
        with pytest.raises(OSError, match="full"):
            layers._write(str(path), b"new")
    assert (["names"], b"old") == (os.listdir(tmp_path), path.read_bytes())


def test_entries_are_read_up_to_the_bound(tmp_path: Path) -> None:
    place = tmp_path / "snap-a"
    unpack(place, stream("d/", "d/a", "b", links={"l": "target"}))
    size = (place / "entries").stat().st_size
    assert layers.entries_of(str(place), size - 1) is None
    entries = layers.entries_of(str(place), size)
    assert entries is not None
    assert {"", "d"} == entries.keys()
    top = {n: layers.unpack_entry(e) for n, e in layers.unpack_directory(entries[""]).items()}
    assert (DIRECTORY, 0, 0o750, b"-") == top["d"]
    assert (FILE, 1, 0o640) == top["b"][:3]
    assert (SYMLINK, 0, 0, b"target") == top["l"]
    with pytest.raises(FileNotFoundError):
        layers.entries_of(str(tmp_path), size)


@pytest.mark.parametrize("is_layer", [True, False])
def test_a_whiteout_is_one_in_a_layer_alone(tmp_path: Path, is_layer: bool) -> None:
    place = tmp_path / "snap-a"
    assert unpack(place, stream("d/", "d/.wh.a", "b"), is_layer=is_layer)
    name = "a" if is_layer else ".wh.a"
    assert [name] == os.listdir(place / "tree" / "d")
    info = (place / "tree" / "d" / name).lstat()
    assert is_layer == stat.S_ISCHR(info.st_mode)
    assert info.st_rdev == 0
    entries = layers.entries_of(str(place), 1 << 20)
    assert entries is not None
    kind = layers.unpack_entry(layers.unpack_directory(entries["d"])[name])[0]
    assert kind == (GONE if is_layer else FILE)
    names = layers.names_of([str(place)], {b"": {b"d": 1}, b"d": {b"a": 1, b"z": 2}})
    assert {b"z"} | (set() if is_layer else {b".wh.a", b"a"}) == names[b"d"].keys()
    assert names[b""][b"b"] == (place / "tree" / "b").stat().st_ctime_ns


@pytest.mark.parametrize(
    "of_root",
    [pytest.param(True, marks=pytest.mark.root), pytest.param(False, marks=pytest.mark.rootless)],
)
def test_root_keeps_the_owners_and_others_have_one_id(tmp_path: Path, of_root: bool) -> None:
    place = tmp_path / "snap-a"
    assert unpack(place, stream("a", uid=4242, gid=4243))
    info = (place / "tree" / "a").stat()
    wanted = (4242, 4243) if of_root else (os.geteuid(), os.getegid())
    assert wanted == (info.st_uid, info.st_gid)


def test_what_unpacks_is_confined_before_it_reads_any_of_the_stream(tmp_path: Path) -> None:
    """A guest has chosen every byte of it."""
    code = layers._CODE.format(path=[os.path.abspath(each) for each in sys.path if each])
    few = 'ulimit -Sn 64; exec "$@"'
    argv = ["sh", "-c", few, "sh", sys.executable, "-I", "-S", "-c", code, str(tmp_path)]

    def facts(pid: int | str) -> dict[str, str]:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (each.partition(":") for each in lines)}

    with subprocess.Popen(argv, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        pipe = process.stdin.fileno()
        os.write(pipe, b"a")

        def is_read() -> bool:
            left = fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))
            return not int.from_bytes(left, sys.byteorder)

        assert until(is_read)
        found, limits = facts(process.pid), Path(f"/proc/{process.pid}/limits").read_text()
        process.kill()
    kept = CHOWN | DAC_OVERRIDE | FOWNER if os.geteuid() == 0 else 0
    kept &= int(facts("self")["CapEff"], 16)
    assert [kept] * 2 == [int(found[name], 16) for name in ("CapEff", "CapPrm")]
    assert ("1", "2") == (found["NoNewPrivs"], found["Seccomp"])
    [files] = [line.split() for line in limits.splitlines() if line.startswith("Max open files")]
    assert "64" != files[3] == files[4]


def test_what_unpacks_gets_nothing_of_its_parent_but_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream is read from its beginning, wherever its descriptor is."""
    monkeypatch.setenv("RINGFENCE_API_KEY", "secret")
    monkeypatch.setenv("PYTHONSTARTUP", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    code = (
        "import json, os, sys; print(json.dumps([sys.path[:] and list(os.environ), os.getcwd(),"
        " sys.flags.isolated, sys.flags.no_site, sys.argv[1:], sys.stdin.read()]))"
    )
    monkeypatch.setattr(layers, "_CODE", code)
    content = os.memfd_create("stream")
    os.write(content, b"whole")
    try:
        for is_layer, more in ((False, []), (True, ["layer"])):
            said = json.loads(layers._run(str(tmp_path), content, is_layer=is_layer))
            assert [["LC_ALL"], "/", 1, 1, [str(tmp_path), *more], "whole"] == said
    finally:
        os.close(content)


def test_the_top_of_an_unpacked_tree_may_be_changed_by_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert unpack(tmp_path / "snap-a", stream("a"))
    finally:
        os.umask(before)
    assert 0o755 == stat.S_IMODE((tmp_path / "snap-a" / "tree").stat().st_mode)


def test_entries_have_the_special_bits_of_modes(tmp_path: Path) -> None:
    place, content = tmp_path / "snap-a", os.memfd_create("stream")
    with open(content, "wb", closefd=False) as file, tarfile.open(fileobj=file, mode="w") as tar:
        member = tarfile.TarInfo("./d")
        member.type, member.mode = tarfile.DIRTYPE, 0o1777
        tar.addfile(member)
    assert unpack(place, content)
    entries = layers.entries_of(str(place), 1 << 20)
    assert entries is not None
    entry = layers.unpack_entry(layers.unpack_directory(entries[""])["d"])
    assert (DIRECTORY, 0, 0o1777, b"-") == entry
    assert 0o1777 == stat.S_IMODE((place / "tree" / "d").stat().st_mode)


def test_names_are_passed_on_in_a_descriptor_of_their_own() -> None:
    names: layers.Names = {b"": {b"d": 1}, b"d": {b"x": layers.WHITEOUT_CTIME}}
    fd = layers.as_file(names)
    try:
        assert not os.get_inheritable(fd)
        assert names == marshal.loads(os.read(fd, 1 << 16))
    finally:
        os.close(fd)


def test_what_a_layer_removes_is_forgotten_with_all_below_it(tmp_path: Path) -> None:
    place = tmp_path / "snap-a"
    unpack(place, stream(".wh.d", "e", "f/"), is_layer=True)
    below: layers.Names = {
        b"d/x/y": {b"z": 1},  # in any order
        b"d/x": {b"y": 1},
        b"": {b"d": 1, b"e": 2, b"f": 3, b"dd": 4},
        b"d": {b"x": 1},
        b"dd": {b"z": 1},
        b"e": {b"x": 1},
        b"f": {b"kept": 7},
    }
    names = layers.names_of([str(place)], below)
    assert {b"", b"dd", b"f"} == names.keys()
    assert {b"e", b"f", b"dd"} == names[b""].keys()
    assert {b"kept": 7} == names[b"f"]
    assert {b"z": 1} == names[b"dd"]


KINDS: list[tuple[str, int, int, bytes]] = [
    (FILE, 1 << 40, 0o4755, b"digest"),
    (DIRECTORY, 0, 0o1777, b"-"),
    (SYMLINK, 0, 0, b"/target"),
    (OTHER, 0, 0o600, b"-"),
    (GONE, 0, 0, b""),
]


def test_every_kind_of_entry_is_packed_and_found_again() -> None:
    entries = {str(number): each for number, each in enumerate(KINDS)}
    packed = layers.pack_directory(entries)
    assert packed == layers.pack_directory(dict(reversed(entries.items())))
    found = layers.unpack_directory(packed)
    assert entries == {name: layers.unpack_entry(each) for name, each in found.items()}


@pytest.mark.parametrize("mode", [0o000, 0o300, 0o500, 0o600])
def test_a_tree_is_removed_although_its_owner_may_not_read_it(tmp_path: Path, mode: int) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o755)
    root = tmp_path / "root"
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "c").write_text("")
    (root / "a" / "link").symlink_to(outside)
    (tmp_path / "linked").write_text("")
    (tmp_path / "linked").chmod(0o440)
    (root / "a" / "name").hardlink_to(tmp_path / "linked")
    (root / "a" / "b").chmod(mode)
    (root / "a").chmod(mode)
    layers.remove_tree(str(root))
    assert not root.exists()
    assert 0o755 == stat.S_IMODE(outside.stat().st_mode)
    assert 0o440 == stat.S_IMODE((tmp_path / "linked").stat().st_mode)


def test_a_walk_follows_no_link_and_closes_what_it_opens(tmp_path: Path) -> None:
    (tmp_path / "root" / "a").mkdir(parents=True)
    (tmp_path / "outside" / "b").mkdir(parents=True)
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")
    before = descriptors()
    found = {path: sorted(entries) for path, _, entries in layers.walk(str(tmp_path / "root"))}
    assert {"": ["a", "link"], "a": []} == found
    assert before == descriptors()
    with pytest.raises(OSError, match=r"Not a directory|symbolic"):
        next(layers.walk(str(tmp_path / "root" / "link")))
    walk = layers.walk(str(tmp_path / "root"))
    next(walk)
    next(walk)
    walk.close()  # type: ignore[attr-defined]
    assert before == descriptors()
