"""A disk that is full, and a writer that is killed."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from ringfence.spool.order import OUT
from ringfence.spool.reader import Piece, Reader
from ringfence.spool.spool import Spool
from tests.features import require
from tests.native.callers import Caller

pytestmark = pytest.mark.anyone

_WRITER = """
import select
from ringfence.spool.spool import Spool
spool = Spool(sys.argv[1], 1 << 30)
pipe = os.open(sys.argv[2], os.O_RDWR)
say()
while select.select([pipe], [], []):
    spool.take(0, pipe)
"""


def test_of_a_killed_writer_every_byte_is_in_its_file_or_still_in_the_pipe(tmp_path: Path) -> None:
    """No byte is ever only in the memory of the process that moves it."""
    pipe, place = tmp_path / "pipe", tmp_path / "x"
    os.mkfifo(pipe)
    fd = os.open(pipe, os.O_RDWR)
    number = 0
    for _ in range(4):
        with Caller(_WRITER, place, pipe) as caller:
            caller.hear()
            for _ in range(20_000):
                os.write(fd, number.to_bytes(8, "big"))
                number += 1
            caller.kill(signal.SIGKILL)
    spool = Spool(str(place), 1 << 30)
    os.set_blocking(fd, False)
    with suppress(BlockingIOError):
        while True:
            spool.take(OUT, fd)
    os.close(fd)

    kept, dropped = spool.tracks[OUT].ends(1 << 30)
    assert 0 == dropped
    assert b"".join(each.to_bytes(8, "big") for each in range(number)) == kept


_FULL = """
import ctypes, tempfile
from ringfence.spool.reader import Reader
from ringfence.spool.spool import Spool
from ringfence.spool import track
track._AGAIN_S = 0.0
libc = ctypes.CDLL(None, use_errno=True)
place = tempfile.mkdtemp()
assert 0 == libc.mount(b"none", place.encode(), b"tmpfs", 0, sys.argv[1].encode())
spool = Spool(place + "/x", 1 << 30)
read, write = os.pipe()
os.set_blocking(read, False)
def run(letter, count):
    for _ in range(count):
        os.write(write, letter * 4096)
        while True:
            try:
                spool.take(0, read)
            except BlockingIOError:
                break
with open(place + "/filler", "wb", buffering=0) as fill:
    fill.write(bytes(400_000))
    run(b"a", 200)
os.unlink(place + "/filler")
during = [spool.totals[0], spool.tracks[0].fault, spool.tracks[0].unwritten_bytes]
run(b"b", 10)
pieces = []
with Reader(spool.tracks[0], 0) as reader:
    while piece := reader.next(1 << 20):
        pieces.append([piece.dropped_bytes, len(piece.data), piece.data[:1].decode()])
say([during, spool.totals[0], pieces])
libc.umount2(place.encode(), 2)
os.rmdir(place)
"""


def test_a_full_disk_stops_nothing_and_is_told() -> None:
    require("user namespaces")
    under = ("unshare", "--user", "--map-root-user", "--mount")
    with Caller(_FULL, "size=600k", under=under) as caller:
        (total, fault, unwritten), in_the_end, pieces = caller.hear()

    assert 200 * 4096 == total
    assert os.strerror(28) == fault
    assert 0 < unwritten < total
    assert 210 * 4096 == in_the_end
    assert unwritten == sum(dropped for dropped, _, _ in pieces)
    assert [0, "a", "b"] == [pieces[0][0], pieces[0][2], pieces[-1][2]]
    assert in_the_end - unwritten == sum(length for _, length, _ in pieces)


def test_a_reader_of_a_stream_that_another_process_wrote_needs_no_help(tmp_path: Path) -> None:
    first = Spool(str(tmp_path / "x"), 1000)
    first.feed(OUT, b"abc")
    second = Spool(str(tmp_path / "x"), 1000)
    second.feed(OUT, b"def")
    with Reader(Spool(str(tmp_path / "x"), 1000).tracks[OUT], 1) as reader:
        assert Piece(1, b"bcdef") == reader.next(100)
