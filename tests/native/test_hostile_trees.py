"""Trees that a guest made to harm the host.

`unpack` on the host trusts nothing in the stream it reads: it is fed streams that no helper of ours
would ever write. What it may touch is the destination; beside it lies a canary.
"""

from __future__ import annotations

import io
import itertools
import os
import random
import stat
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ringfence import Sandbox
from ringfence.backends.native.backend import NativeBackend
from ringfence.client.unpack import unpack
from ringfence.errors import (
    FileError,
    FileExists,
    IoError,
    RingfenceError,
)
from ringfence.launcher.helpers.trees import pack
from ringfence.model.mount import READ_WRITE, Mount
from tests.native.callers import Caller
from tests.native.outside import PATIENCE_S, status_kib, until

MIB = 1 << 20


class Yard:
    """A destination for a download, and beside it what must stay as it is."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.destination = directory / "destination"
        self.outside = directory / "outside"
        self.outside.mkdir()
        self.canary = self.outside / "canary"
        self.canary.write_text("untouched")
        self.canary.chmod(0o640)
        self._before = self._look()

    def _look(self) -> list[tuple[str, int, int, bytes]]:
        found = [
            (p.name, (s := p.lstat()).st_mode, s.st_nlink, p.read_bytes())
            for p in self.outside.iterdir()
        ]
        names = {p.name for p in self.directory.iterdir()} - {"destination"}
        return [*found, *((name, 0, 0, b"") for name in sorted(names))]

    def is_untouched(self) -> bool:
        assert self._before == self._look()
        return True


@pytest.fixture
def yard(tmp_path: Path) -> Yard:
    (tmp_path / "yard").mkdir()
    return Yard(tmp_path / "yard")


# -- crafted streams ------------------------------------------------------------------------------


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", **fields: Any) -> Any:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def file(name: str, text: str = "evil", **fields: Any) -> tuple[Any, bytes]:
    return member(name, size=len(text), **fields), text.encode()


def directory(name: str, **fields: Any) -> tuple[Any, bytes]:
    return member(name, tarfile.DIRTYPE, mode=fields.pop("mode", 0o755), **fields), b""


def symlink(name: str, target: str) -> tuple[Any, bytes]:
    return member(name, tarfile.SYMTYPE, target), b""


def hard_link(name: str, target: str) -> tuple[Any, bytes]:
    return member(name, tarfile.LNKTYPE, target), b""


def stream_of(*members: tuple[Any, bytes]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return raw.getvalue()


def feed(stream: bytes, yard: Yard) -> None:
    """Let `unpack` read `stream` from a pipe, as it does."""
    read, write = os.pipe()

    def pour() -> None:
        try:
            with open(write, "wb") as pipe:
                pipe.write(stream)
        except BrokenPipeError:
            pass  # it has seen enough

    pourer = threading.Thread(target=pour)
    pourer.start()
    try:
        unpack(read, str(yard.destination))
    finally:
        os.close(read)
        pourer.join()


CRAFTED: dict[str, list[tuple[Any, bytes]]] = {
    "an absolute name": [file("/{outside}/canary")],
    "a name that climbs": [file("../outside/canary")],
    "a name that climbs late": [directory("a"), file("a/../../outside/new")],
    "a directory that climbs": [directory("../outside/made")],
    "through a symlink to a directory": [symlink("link", "../outside"), file("link/canary")],
    "through an absolute symlink": [symlink("link", "/{outside}"), file("link/new")],
    "through a symlink in the middle": [
        directory("a"),
        symlink("a/b", "../../outside"),
        directory("a/b/c"),
    ],
    "a symlink, then a directory of its name": [
        symlink("d", "../outside"),
        directory("d"),
        file("d/new"),
    ],
    "a hard link that climbs": [hard_link("link", "../outside/canary")],
    "a hard link to an absolute name": [hard_link("link", "/{outside}/canary")],
    "a hard link through a symlink": [
        symlink("s", "../outside"),
        hard_link("link", "s/canary"),
    ],
    "a hard link, then written to": [
        symlink("s", "../outside/canary"),
        hard_link("h", "s"),
        file("h"),
    ],
    "a hard link to the root": [hard_link("link", ".")],
    "a root that is a file": [file(".")],
    "a root that is a symlink": [symlink(".", "../outside")],
}


@pytest.mark.parametrize("kind", CRAFTED)
def test_a_crafted_stream_touches_nothing_outside(yard: Yard, kind: str) -> None:
    members = CRAFTED[kind]
    for info, _data in members:
        info.name = info.name.replace("/{outside}", str(yard.outside))
        info.linkname = info.linkname.replace("/{outside}", str(yard.outside))

    try:
        feed(stream_of(*members), yard)
    except (FileError, IoError):
        pass
    else:
        assert "a hard link, then written to" == kind  # harmless: the link itself is replaced

    assert yard.is_untouched()


def test_a_symlink_is_written_and_never_followed(yard: Yard) -> None:
    """It may point anywhere; a file of the same name replaces it."""
    feed(stream_of(symlink("link", str(yard.canary)), symlink("kept", "/etc"), file("link")), yard)

    assert "evil" == (yard.destination / "link").read_text()
    assert not (yard.destination / "link").is_symlink()
    assert "/etc" == os.readlink(yard.destination / "kept")
    assert yard.is_untouched()


def test_what_lies_in_the_destination_is_not_followed_either(yard: Yard) -> None:
    """An earlier download may have left symlinks there."""
    yard.destination.mkdir()
    (yard.destination / "dir").symlink_to(yard.outside)
    (yard.destination / "canary").symlink_to(yard.canary)

    with pytest.raises(FileError):
        feed(stream_of(file("dir/canary")), yard)
    feed(stream_of(file("canary")), yard)

    assert yard.is_untouched()


@pytest.mark.parametrize("mode", [0o4755, 0o2755, 0o1755, 0o6777])
def test_no_special_bits_on_the_host(yard: Yard, mode: int) -> None:
    feed(stream_of(file("tool", mode=mode), directory("dir", mode=mode)), yard)

    for name in ("tool", "dir"):
        assert mode & 0o777 == stat.S_IMODE((yard.destination / name).stat().st_mode)
    assert os.getuid() == (yard.destination / "tool").stat().st_uid


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, b"s"])
def test_no_device_is_made(yard: Yard, kind: bytes) -> None:
    feed(stream_of((member("node", kind, devmajor=1, devminor=3), b""), file("after")), yard)

    assert ["after"] == os.listdir(yard.destination)


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "nothing at all": lambda stream: b"",
    "cut in the content": lambda stream: stream[: len(stream) // 2],
    "no end": lambda stream: stream[:2048],
    "noise": lambda stream: random.Random(7).randbytes(4096),
    "noise in a header": lambda stream: stream[:100] + b"\xff" * 40 + stream[140:],
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_stream_is_an_error(yard: Yard, kind: str) -> None:
    whole = stream_of(directory("."), file("a", "x" * 3000), file("b", "y" * 3000))

    with pytest.raises((IoError, FileError)):
        feed(BROKEN[kind](whole), yard)

    assert yard.is_untouched()


_HUGE = """
import io, tarfile, threading
from ringfence.client.unpack import unpack

def header(kind, size):
    info = tarfile.TarInfo("x"); info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)

kind = sys.argv[1].encode()
read, write = os.pipe()
def pour():
    try:
        with open(write, "wb") as pipe:
            pipe.write(header(kind, 1 << 40))
            for _ in range(600):
                pipe.write(bytes(1 << 20))
    except BrokenPipeError:
        pass
pourer = threading.Thread(target=pour); pourer.start()
try:
    unpack(read, sys.argv[2])
    outcome = "unpacked"
except Exception as exc:
    outcome = type(exc).__name__
os.close(read); pourer.join()
say(outcome)
listen()
"""


@pytest.mark.parametrize("kind", ["x", "g", "L", "K"])
def test_a_huge_header_is_not_read_into_memory(yard: Yard, kind: str) -> None:
    """Names and attributes longer than any real one come as a member of their own."""
    with Caller(_HUGE, kind, yard.destination) as caller:
        assert caller.hear(40) in ("FileError", "IoError")

        assert status_kib(caller.pid, "VmHWM") < 120 << 10


def _described(name: str, told: dict[str, str], data: bytes = b"") -> tuple[Any, bytes]:
    return member(name, size=len(data), pax_headers=told), data


def _old_holes(size: int) -> bytes:
    """A header of GNU tar's own kind for a file of `size` zeros: its map is in it. Source: tar.h."""
    info = member("holes", tarfile.GNUTYPE_SPARSE)
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[386 : 386 + 24] = b"%011o\0%011o\0" % (size, 0)
    header[482] = 0
    header[483:495] = b"%011o\0" % size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(1024)


_HOLES = {"GNU.sparse.size": str(1 << 40), "GNU.sparse.numblocks": "1"}
UNTYPED: dict[str, bytes] = {
    "holes of GNU tar": _old_holes(1 << 32),
    "holes 0.0": stream_of(
        _described("h", {**_HOLES, "GNU.sparse.offset": "0", "GNU.sparse.numbytes": "0"})
    ),
    "holes 0.1": stream_of(_described("h", {**_HOLES, "GNU.sparse.map": f"{1 << 40},0"})),
    "holes 1.0": stream_of(
        _described(
            "h",
            {
                "GNU.sparse.major": "1",
                "GNU.sparse.minor": "0",
                "GNU.sparse.realsize": str(1 << 40),
            },
            b"1\n0\n0\n".ljust(512, b"\0"),
        )
    ),
    "a map that is no number": stream_of(_described("h", {**_HOLES, "GNU.sparse.map": "a,b"})),
    "a time without end": stream_of(_described("t", {"mtime": "inf"})),
    "a time that is none": stream_of(_described("t", {"mtime": "nan"})),
    "a directory's time without end": stream_of(
        (member("t", tarfile.DIRTYPE, pax_headers={"mtime": "-inf"}), b"")
    ),
    "headers of headers": stream_of(*[(member("x", tarfile.XHDTYPE), b"")] * 3000, file("f")),
    "long names of long names": b"".join(
        member("x", tarfile.GNUTYPE_LONGNAME).tobuf(tarfile.GNU_FORMAT) for _ in range(3000)
    ),
}


@pytest.mark.parametrize("kind", UNTYPED)
def test_what_no_packer_of_ours_writes_is_an_error_at_once(yard: Yard, kind: str) -> None:
    """An error of ours: and of zeros that are only told of, none are written."""
    with pytest.raises((IoError, FileError)):
        feed(UNTYPED[kind], yard)

    made = [each.stat().st_size for each in yard.destination.rglob("*") if each.is_file()]
    assert sum(made) < MIB
    assert yard.is_untouched()


def test_what_the_caller_s_own_progress_raises_is_the_caller_s(yard: Yard) -> None:
    """No error of the stream's, though it be of the same kind."""

    def progress(_copied: int, _name: str) -> None:
        raise ValueError("mine")

    read, write = os.pipe()
    os.write(write, stream_of(file("f")))
    os.close(write)
    try:
        with pytest.raises(ValueError, match="mine"):
            unpack(read, str(yard.destination), progress)
    finally:
        os.close(read)


# -- hostile trees --------------------------------------------------------------------------------

_PLANT = r"""
import os
os.makedirs("tree/dir")
os.chdir("tree")
for name in (b"new\nline", b"-rf", b"back\\slash", b"\xff\xfe", b" ", b"...", b"\x1b[2J", b"CON",
             "\u202ecod.exe".encode(), b"x" * 255):
    with open(name, "wb") as file: file.write(name)
os.symlink("/etc/passwd", "absolute")
os.symlink("../../../../../../etc", "climbing")
os.symlink("loop", "loop")
os.symlink(".", "dir/again")
os.link("-rf", "dir/second name")
with open("tool", "w") as file: file.write("#!/bin/sh\n")
os.chmod("tool", 0o755)
with open("secret", "w") as file: file.write("s")
os.chmod("secret", 0o600)
"""


def test_strange_names_and_links_arrive_as_they_are(sandbox: Sandbox, yard: Yard) -> None:
    assert sandbox.exec(["python3", "-c", _PLANT]).ok

    sandbox.files.download("tree", str(yard.destination))

    here = os.fsencode(yard.destination)
    for name in (b"new\nline", b"-rf", b"back\\slash", b"\xff\xfe", b"...", b"\x1b[2J", b"x" * 255):
        with open(os.path.join(here, name), "rb") as file:
            assert name == file.read()
    assert "/etc/passwd" == os.readlink(yard.destination / "absolute")
    assert "loop" == os.readlink(yard.destination / "loop")
    second = yard.destination / "dir" / "second name"
    assert second.samefile(yard.destination / "-rf")
    assert 0o755 == stat.S_IMODE((yard.destination / "tool").stat().st_mode)
    assert 0o600 == stat.S_IMODE((yard.destination / "secret").stat().st_mode)
    assert yard.is_untouched()


@pytest.mark.parametrize(
    "plant",
    [
        "mkfifo tree/odd",
        "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"tree/odd\")'",
        "ln -s /dev/zero tree/odd; mkfifo tree/odder",
    ],
)
def test_what_is_neither_file_nor_link_is_named_and_refused(
    sandbox: Sandbox, yard: Yard, plant: str
) -> None:
    """Never waited for: nobody will write into that FIFO."""
    assert sandbox.shell(f"mkdir tree; {plant}").ok

    with pytest.raises(FileError, match="tree/odd"):
        sandbox.files.download("tree", str(yard.destination))


@pytest.mark.parametrize("target", ["/dev/zero", "/dev/tty", "/proc/self/mem", "/proc/self/maps"])
def test_a_symlink_to_something_endless_or_alien_is_not_read(sandbox: Sandbox, target: str) -> None:
    """Also nothing of PID 1, which does the opening."""
    assert sandbox.shell(f"ln -s {target} innocent; mkfifo fifo").ok

    for name in ("innocent", "fifo"):
        with pytest.raises(RingfenceError):
            sandbox.files.read(name)


def test_a_sparse_file_costs_the_host_nothing(sandbox: Sandbox, yard: Yard) -> None:
    script = (
        "mkdir tree; echo head > tree/sparse; truncate -s 1G tree/sparse; echo tail >> tree/sparse"
    )
    assert sandbox.shell(script).ok

    sandbox.files.download("tree", str(yard.destination))
    sandbox.files.download("tree/sparse", str(yard.directory / "single"))

    for copy in (yard.destination / "sparse", yard.directory / "single"):
        info = copy.stat()
        assert (1 << 30) + 5 == info.st_size
        assert info.st_blocks * 512 < 8 * MIB
        with open(copy, "rb") as file:
            assert b"head\n\0" == file.read(6)
            file.seek(-6, os.SEEK_END)
            assert b"\0tail\n" == file.read()
        copy.unlink()


def test_files_that_claim_more_than_there_is_are_refused(sandbox: Sandbox, yard: Yard) -> None:
    assert sandbox.shell("mkdir tree; truncate -s 100G tree/1 tree/2").ok

    with pytest.raises(FileError, match="sparse"):
        sandbox.files.download("tree", str(yard.destination))


_SWAP = """
import os
os.makedirs("tree/dir"); os.mkdir("aside")
for where in ("tree/dir", "aside"):
    open(where + "/file", "w").write("inside")
os.symlink("/etc", "link")
print("ready", flush=True)
while True:
    try:
        os.rename("tree/dir", "aside/dir"); os.rename("link", "tree/dir")
        os.rename("tree/dir", "link"); os.rename("aside/dir", "tree/dir")
    except OSError: pass
"""


def test_a_directory_that_becomes_a_symlink_while_it_is_copied(
    sandbox: Sandbox, yard: Yard
) -> None:
    """What arrives is one of the two, and a link is only a link."""
    swapper = sandbox.start(["python3", "-c", _SWAP])
    assert b"ready\n" == swapper.stdout.read(PATIENCE_S)
    seen: set[str] = set()
    numbers, enough = itertools.count(), time.monotonic() + PATIENCE_S

    # Which of the two is met is chance: go on until both were.
    while not {"link", "directory"} <= seen and time.monotonic() < enough:
        destination = yard.destination / str(next(numbers))
        try:
            sandbox.files.download("tree", str(destination))
        except RingfenceError as exc:
            seen.add(type(exc).__name__)
            continue
        arrived = destination / "dir"
        seen.add("link" if arrived.is_symlink() else "directory")
        if arrived.is_symlink():
            assert "/etc" == os.readlink(arrived)
        elif arrived.exists():
            assert [] == [p.name for p in arrived.iterdir() if p.name != "file"]
    swapper.kill()

    assert {"link", "directory"} <= seen, seen
    assert yard.is_untouched()


def test_who_packs_a_directory_of_the_host_is_not_led_out_of_it(tmp_path: Path) -> None:
    """A guest that it is mounted for makes a link of a directory while its files are read."""
    tree, secret = tmp_path / "tree", tmp_path / "host"
    for place, words in ((tree / "dir", "as it was"), (secret, "of the host's")):
        place.mkdir(parents=True)
        for name in ("first", "second"):
            (place / name).write_text(words)

    def swap(_copied: int, path: str) -> None:
        if path.endswith("first"):
            (tree / "dir").rename(tmp_path / "aside")
            (tree / "dir").symlink_to(secret)

    with (tmp_path / "packed").open("wb") as file:
        pack(file.fileno(), str(tree), one_file_system=False, progress=swap)

    found = (tmp_path / "packed").read_bytes()
    assert (tree / "dir/second").read_text() == "of the host's"  # it was swapped
    assert b"of the host's" not in found
    assert found.count(b"as it was") == 2


@pytest.mark.parametrize("below", ["out", "out/deeper"])
def test_a_link_left_in_a_mounted_directory_leads_nobody(tmp_path: Path, below: str) -> None:
    shared, outside = tmp_path / "shared", tmp_path / "outside"
    for place in (tmp_path, shared, outside):
        place.mkdir(exist_ok=True)
        place.chmod(0o755)
    (outside / "secret").write_text("of the host's")
    with Sandbox.create(mounts=(Mount("/srv/shared", str(shared), READ_WRITE),)) as sandbox:
        assert sandbox.shell(f"ln -s {outside} /srv/shared/out; mkdir t; echo x > t/x").ok

        for source in ("t", "t/x"):
            with pytest.raises(FileError, match="symlink"):
                sandbox.files.download(source, str(shared / below), overwrite=True)
            with pytest.raises(FileError):
                sandbox.files.download(source, str(shared / below))
        with pytest.raises(FileError, match="symlink"):
            sandbox.files.upload(str(shared / "out" / "secret"), "copy")

        assert ["secret"] == os.listdir(outside)
        # One that lies where nobody inside can have put it is the caller's own.
        (tmp_path / "link").symlink_to(outside)
        sandbox.files.download("t", str(tmp_path / "link" / "deeper"))
        sandbox.files.upload(str(tmp_path / "link" / "secret"), "copy")
        assert "of the host's" == sandbox.files.read_text("copy")
    assert (outside / "deeper" / "x").exists()


def test_a_mounted_directory_is_copied_to_and_from(tmp_path: Path) -> None:
    told: list[str] = []
    with Sandbox.create(mounts=(Mount("/srv/shared", str(tmp_path), READ_WRITE),)) as sandbox:
        assert sandbox.shell("mkdir -p t/deep; echo x > t/deep/x").ok
        sandbox.files.download("t", str(tmp_path / "a" / "b"))
        sandbox.files.download("t/deep/x", str(tmp_path / "a" / "y"))
        with pytest.raises(FileExists):
            sandbox.files.download("t/deep/x", str(tmp_path / "a" / "y"))
        sandbox.files.upload(
            str(tmp_path / "a"), "back", progress=lambda _count, name: told.append(name)
        )

        assert "x\nx\n" == sandbox.shell("cat back/b/deep/x back/y").text
    assert sorted(told) == [str(tmp_path / "a" / "b" / "deep" / "x"), str(tmp_path / "a" / "y")]


_CHANGE = """
import os
os.mkdir("changing")
print("ready", flush=True)
while True:
    for n in range(30):
        os.symlink("x", f"changing/{n}")
    for n in range(30):
        os.unlink(f"changing/{n}"); open(f"changing/{n}", "w").close()
    for n in range(30):
        os.unlink(f"changing/{n}")
"""


def test_what_changes_meanwhile_is_listed_as_far_as_it_is_there(sandbox: Sandbox) -> None:
    """What went away between two looks is no error of the caller's."""
    changing = sandbox.start(["python3", "-c", _CHANGE])
    assert b"ready\n" == changing.stdout.read(PATIENCE_S)

    counts = set[int]()

    def has_changed() -> bool:
        counts.add(len(sandbox.files.list("changing")))
        return len(counts) > 1

    seen = [has_changed() for _ in range(300)]
    assert seen[-1] or until(has_changed), "nothing changed"

    changing.kill()


_KILL_NEWCOMERS = """
import os, signal
me = os.getpid()
print("ready", flush=True)
while True:
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (1, me):
            try: os.kill(int(name), signal.SIGKILL)
            except OSError: pass
"""


def is_done(copy: Callable[[str, str], None], source: str, target: str) -> bool:
    """Whether `copy` went through; if not, it says that one may try again."""
    try:
        copy(source, target)
    except IoError as exc:
        if not exc.retryable:
            raise
        return False
    return True


def test_a_guest_that_kills_whoever_copies(with_controls: NativeBackend, yard: Yard) -> None:
    """Never half a tree as if it were whole. (Landlock keeps it from killing; hence without.)"""
    (yard.directory / "local").mkdir()
    (yard.directory / "local" / "file").write_text("x" * 100_000)
    with Sandbox.create(profile="no-landlock", backend=with_controls) as sandbox:
        assert sandbox.shell("mkdir tree; for n in $(seq 200); do echo $n > tree/$n; done").ok
        killer = sandbox.start(["python3", "-c", _KILL_NEWCOMERS])
        assert b"ready\n" == killer.stdout.read(PATIENCE_S)

        for number in range(5):
            there = yard.destination / str(number)
            if is_done(sandbox.files.download, "tree", str(there)):
                assert 200 == len(os.listdir(there))
            local, to = str(yard.directory / "local"), f"up{number}"
            if is_done(sandbox.files.upload, local, to):
                assert 100_000 == sandbox.files.stat(f"{to}/file").size_bytes


_MANY_FILES = """
sandbox = Sandbox.create(limits={"inodes": 10_000})
code = "import os\\nos.mkdir('tree')\\nfor n in range(8_000): os.close(os.open(f'tree/{n}', 65))"
assert sandbox.exec(["python3", "-c", code], timeout_s=60).ok

def kib(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field + ":"))

sandbox.files.make_dir("first")
sandbox.files.download("first", sys.argv[1] + "/first")
open("/proc/self/clear_refs", "w").write("5")
before = kib("VmRSS")
sandbox.files.download("tree", sys.argv[1] + "/tree")
grown = kib("VmHWM") - before
say([len(os.listdir(sys.argv[1] + "/tree")), grown])
sandbox.terminate()
"""


@pytest.mark.full
def test_very_many_files_do_not_fill_the_callers_memory(yard: Yard) -> None:
    with Caller(_MANY_FILES, yard.directory) as caller:
        count, grown_kib = caller.hear(60)

    assert 8_000 == count
    assert grown_kib < 8_000, "it keeps a KiB or more of every file"
