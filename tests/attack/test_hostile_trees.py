"""Tar streams that no honest helper would send: unpacked on the host, they must make nothing outside."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import threading
from pathlib import Path

import pytest

from ringfence.client.unpack import unpack
from ringfence.errors import RingfenceError

pytestmark = pytest.mark.full

Member = tuple[str, bytes, str]  # name, type, link name or content


def stream_of(members: list[Member], mode: int = 0o644) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, text in members:
            info = tarfile.TarInfo(name)
            info.type, info.mode = kind, mode
            if tarfile.REGTYPE == kind:
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text.encode()))
            else:
                info.linkname = text
                info.devmajor, info.devminor = 1, 3
                tar.addfile(info)
    return content.getvalue()


def unpack_bytes(data: bytes, where: Path) -> Exception | None:
    """What went wrong; never anything but one of our own errors."""
    read, write = os.pipe()

    def feed() -> None:
        with open(write, "wb") as pipe:
            try:
                pipe.write(data)
            except BrokenPipeError:
                return

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        unpack(read, str(where))
    except RingfenceError as exc:
        return exc
    finally:
        os.close(read)
        feeder.join()
    return None


ROOT: Member = (".", tarfile.DIRTYPE, "")


def hostile(outside: str) -> dict[str, list[Member]]:
    file, directory, link, hard = (
        tarfile.REGTYPE,
        tarfile.DIRTYPE,
        tarfile.SYMTYPE,
        tarfile.LNKTYPE,
    )
    return {
        "absolute": [ROOT, (f"{outside}/x", file, "x")],
        "dots": [ROOT, ("../outside/x", file, "x")],
        "dots inside": [ROOT, ("a/../../outside/x", file, "x")],
        "through a link": [ROOT, ("a", link, outside), ("a/x", file, "x")],
        "through a relative link": [ROOT, ("a", link, "../outside"), ("a/x", file, "x")],
        "through two links": [ROOT, ("a", link, "b"), ("b", link, outside), ("a/x", file, "x")],
        "directory through a link": [ROOT, ("a", link, outside), ("a/x", directory, "")],
        "directory over a link": [
            ROOT,
            ("a", link, outside),
            ("a", directory, ""),
            ("a/x", file, "x"),
        ],
        "hard link outside": [ROOT, ("a", hard, f"{outside}/secret")],
        "hard link by dots": [ROOT, ("a", hard, "../outside/secret")],
        "hard link through a link": [ROOT, ("a", link, outside), ("b", hard, "a/secret")],
        "hard link to a link": [
            ROOT,
            ("a", link, f"{outside}/secret"),
            ("b", hard, "a"),
            ("b", file, "x"),
        ],
        "hard link to the root": [ROOT, ("a", hard, ".")],
        "root is a link": [(".", link, outside), ("x", file, "x")],
        "root is a file": [(".", file, "x")],
        "no root": [("x/y/z", file, "x")],
        "empty name": [ROOT, ("", file, "x")],
        "device": [ROOT, ("a", tarfile.CHRTYPE, "")],
        "disk": [ROOT, ("a", tarfile.BLKTYPE, "")],
        "fifo": [ROOT, ("a", tarfile.FIFOTYPE, "")],
        "unknown type": [ROOT, ("a", b"Z", "")],
    }


@pytest.mark.parametrize("name", hostile(""))
def test_a_hostile_stream_makes_nothing_outside(tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    inside = tmp_path / "inside"

    unpack_bytes(stream_of(hostile(str(outside))[name]), inside)

    assert ["secret"] == os.listdir(outside)
    assert "secret" == (outside / "secret").read_text()
    assert 1 == (outside / "secret").stat().st_nlink
    for directory, names, files in os.walk(inside):
        for entry in (*names, *files):
            mode = os.lstat(os.path.join(directory, entry)).st_mode
            assert stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode), entry


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.DIRTYPE])
def test_set_id_bits_are_left_out(tmp_path: Path, kind: bytes) -> None:
    unpack_bytes(stream_of([ROOT, ("a", kind, "")], mode=0o7777), tmp_path)

    assert 0o777 == stat.S_IMODE((tmp_path / "a").stat().st_mode)


def test_the_control_a_trusting_program_writes_outside(tmp_path: Path) -> None:
    """The same stream, unpacked by tarfile as it was before it learnt to filter."""
    outside = tmp_path / "outside"
    outside.mkdir()
    data = stream_of(hostile(str(outside))["through a link"])

    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        # As an attribute: Debian's 3.11.2 does not know the argument yet, newer ones default to safe.
        tar.extraction_filter = staticmethod(lambda member, _path: member)
        tar.extractall(tmp_path / "inside")

    assert ["x"] == os.listdir(outside)


# Between two files the stream alone cannot tell: there the helper's own word counts.
@pytest.mark.parametrize("cut", [0, 1, 511, 1024, 1100, 1535])
def test_a_stream_that_ends_within_a_file_is_an_error(tmp_path: Path, cut: int) -> None:
    data = stream_of([ROOT, ("a", tarfile.REGTYPE, "x" * 600)])

    problem = unpack_bytes(data[:cut], tmp_path / "inside")

    assert problem is not None


@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_stream_raises_nothing_but_our_own_errors(tmp_path: Path, seed: int) -> None:
    import random

    chance = random.Random(seed)
    outside = tmp_path / "outside"
    outside.mkdir()
    members = [m for group in hostile(str(outside)).values() for m in chance.sample(group, 1)]
    data = bytearray(stream_of([ROOT, *members]))
    for _ in range(chance.randrange(1, 40)):
        data[chance.randrange(len(data))] = chance.randrange(256)

    unpack_bytes(bytes(data), tmp_path / "inside")

    assert [] == os.listdir(outside)
