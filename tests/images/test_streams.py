"""Streams of layers by themselves: members of gzip in any pieces, and what is read and hashed ahead."""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ringfence.errors import InvalidRequest
from ringfence.images import ahead
from ringfence.images.ahead import Ahead, TooLargeError
from ringfence.images.decompress import GZIP, NONE, ZSTD, _Gzip, _Zstd, compression_of

pytestmark = pytest.mark.anyone

PATIENCE_S = 60.0


class Pieces:
    """A file that is read in just these pieces."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = [each for each in pieces if each]

    def read(self, _size: int) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""


def plain(*pieces: bytes, size: int = 5) -> bytes:
    raw: Any = Pieces(*pieces)
    stream, found = _Gzip(raw), b""
    while data := stream.read(size):
        assert len(data) <= size
        found += data
    assert b"" == stream.read(size)
    return found


ONE, TWO = gzip.compress(b"first member"), gzip.compress(b"second")
ZEROS = bytes(20)


@pytest.mark.parametrize(
    ("pieces", "wanted"),
    [
        ((), b""),
        ((ONE,), b"first member"),
        ((ONE + TWO,), b"first membersecond"),
        ((ONE, TWO), b"first membersecond"),
        ((ONE + ZEROS + TWO + ZEROS,), b"first membersecond"),
        ((ONE, ZEROS, TWO, ZEROS), b"first membersecond"),
        ((ONE + ZEROS, ZEROS + TWO, ZEROS, ZEROS), b"first membersecond"),
        ((ONE[:5], ONE[5:-1], ONE[-1:] + TWO[:3], TWO[3:]), b"first membersecond"),
        (tuple(bytes([each]) for each in ONE + ZEROS + TWO), b"first membersecond"),
        ((gzip.compress(b""), ONE), b"first member"),
    ],
)
def test_members_follow_one_another_in_any_pieces(pieces: tuple[bytes, ...], wanted: bytes) -> None:
    assert wanted == plain(*pieces)
    assert wanted == plain(*pieces, size=1)


@pytest.mark.parametrize("cut", [1, 8, len(ONE) - 11])
def test_a_member_that_is_cut_off_or_damaged_is_an_error(cut: int) -> None:
    for pieces in ((ONE[:-cut],), (TWO, ONE[:-cut])):
        with pytest.raises(EOFError):
            plain(*pieces)
    for wrong in (ONE[:-5] + b"#" + ONE[-4:], ONE + b"garbage"):
        with pytest.raises(zlib.error):
            plain(wrong)


def frame(data: bytes, window: int) -> bytes:
    """A frame of zstd that needs a window of 2**`window` bytes: RFC 8878, 3.1.1."""
    last_raw_block = (len(data) << 3 | 1).to_bytes(3, "little")
    return b"\x28\xb5\x2f\xfd\0" + bytes([window - 10 << 3]) + last_raw_block + data


def of_zstd(data: bytes) -> bytes:
    stream, found = _Zstd(io.BytesIO(data)), b""
    while piece := stream.read(5):
        assert len(piece) <= 5
        found += piece
    return found


def test_frames_of_zstd_follow_one_another_and_need_no_more_memory_than_they_may() -> None:
    assert b"first second" == of_zstd(frame(b"first", 10) + frame(b" second", 27))
    for wrong in (
        frame(b"x", 28),
        frame(b"first", 10) + b"garbage!",
        frame(b"x", 10)[:5] + b"\xff",
    ):
        with pytest.raises(ValueError, match="zstd"):
            of_zstd(wrong)


def test_compressions_are_told_by_the_first_bytes(tmp_path: Path) -> None:
    path = tmp_path / "layer"
    for data, kind in (
        (gzip.compress(b"x"), GZIP),
        (frame(b"x", 10), ZSTD),
        (b"\x1f", NONE),
        (b"\x28\xb5\x2f", NONE),
        (b"", NONE),
        (b"x\x1f\x8b", NONE),
    ):
        path.write_bytes(data)
        assert kind == compression_of(str(path))


def test_a_layer_of_zstd_names_the_extra_that_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "layer"
    monkeypatch.setitem(sys.modules, "zstandard", None)
    path.write_bytes(gzip.compress(b"x"))
    assert GZIP == compression_of(str(path))
    path.write_bytes(frame(b"x", 10))
    with pytest.raises(InvalidRequest, match="zstd") as refused:
        compression_of(str(path))
    assert ("image", True) == (refused.value.field, "ringfence[images]" in refused.value.hint)


def test_so_much_is_read_ahead_and_no_more() -> None:
    class Endless:
        pieces = 0

        def read(self, size: int) -> bytes:
            self.pieces += 1
            return b"x" if self.pieces < 1000 else b""

    stream: Any = Endless()
    source = Ahead(stream, 1 << 20)
    while not source._pieces.full() and stream.pieces < 1000:
        time.sleep(0.0001)
    assert stream.pieces <= 34, "one more is in its hand"
    assert b"x" * 999 == read_all(source)


def read_all(source: Ahead) -> bytes:
    found = b""
    while piece := source.read():
        found += piece
    assert b"" == source.read()
    return found


@pytest.mark.parametrize("size", [0, 1, 700_000])
def test_a_stream_may_have_so_many_bytes_and_no_more(size: int) -> None:
    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    source = Ahead(io.BytesIO(data), size)
    assert data == read_all(source)
    assert f"sha256:{hashlib.sha256(data).hexdigest()}" == source.digest()
    with pytest.raises(TooLargeError):
        read_all(Ahead(io.BytesIO(data + b"x"), size))


def test_an_error_of_the_stream_is_the_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    raw: Any = Pieces(ONE[:-2])
    stream: Any = _Gzip(raw)
    with pytest.raises(EOFError):
        read_all(Ahead(stream, 1000))


def test_the_digest_is_that_of_all_bytes_however_slow_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on, real = threading.Event(), hashlib.sha256()

    class Slow:
        def update(self, data: bytes) -> None:
            assert goes_on.wait(PATIENCE_S)
            real.update(data)

        def hexdigest(self) -> str:
            return real.hexdigest()

    class Hashes:
        sha256 = Slow

    monkeypatch.setattr(ahead, "hashlib", Hashes)
    source = Ahead(io.BytesIO(b"x" * 1000), 1000)
    assert b"x" * 1000 == read_all(source)
    with ThreadPoolExecutor() as pool:
        digest = pool.submit(source.digest)
        with pytest.raises(TimeoutError):
            digest.result(0.05)
        goes_on.set()
        assert f"sha256:{hashlib.sha256(b'x' * 1000).hexdigest()}" == digest.result(PATIENCE_S)
