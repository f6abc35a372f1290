"""The spool against a plain model: whatever comes, whoever reads from wherever, and after a crash."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.spool import order as order_module
from ringfence.spool import track as track_module
from ringfence.spool.order import ERR, OUT
from ringfence.spool.reader import Piece, Reader
from ringfence.spool.spool import Spool

pytestmark = pytest.mark.anyone

Steps = list[tuple[str, int, bytes]]
Came = list[tuple[int, bytes]]
BLOBS = st.binary(min_size=1, max_size=40)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("feed"), st.sampled_from((OUT, ERR)), BLOBS),
        st.tuples(st.just("pipe"), st.sampled_from((OUT, ERR)), BLOBS),
        st.tuples(st.just("crash"), st.just(0), st.just(b"")),
    ),
    max_size=30,
)


@pytest.fixture(autouse=True)
def small_files() -> Iterator[None]:
    """Files and paths so small that every rule about them is met."""
    with (
        mock.patch.object(track_module, "_SMALLEST", 4),
        mock.patch.object(order_module, "_MOST_CORNERS", 8),
    ):
        yield
    close_all()


_made: list[Spool] = []


def new(directory: str, limit: int, totals: tuple[int, int] = (0, 0)) -> Spool:
    """A spool that is closed when its test is over."""
    _made.append(Spool(directory, limit, totals))
    return _made[-1]


def close_all() -> None:
    while _made:
        _made.pop().close()


def play(directory: str, limit: int, steps: Steps) -> tuple[Spool, Came]:
    """The spool after `steps`, and what came: `(stream, bytes)` in order."""
    close_all()  # of the example before
    spool, came = new(directory, limit), list[tuple[int, bytes]]()
    for what, stream, data in steps:
        if what == "crash":  # nothing is closed, nothing is told
            spool = new(directory, limit, spool.totals)
            continue
        if what == "pipe":
            take_all(spool, stream, data)
        else:
            spool.feed(stream, data)
        came.append((stream, data))
    return spool, came


def take_all(spool: Spool, stream: int, data: bytes) -> None:
    read, write = os.pipe()
    try:
        os.set_blocking(read, False)
        os.write(write, data)
        with suppress(BlockingIOError):
            while True:
                spool.take(stream, read)
    finally:
        os.close(read)
        os.close(write)


def whole(came: Came, stream: int) -> bytes:
    return b"".join(data for which, data in came if which == stream)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.integers(0, 120), st.integers(0, 500), st.integers(1, 50))
def test_a_reader_gets_every_byte_that_is_kept_once(
    steps: Steps, limit: int, start: int, most: int
) -> None:
    with tempfile.TemporaryDirectory() as root:
        spool, came = play(f"{root}/x", limit, steps)
        for stream in (OUT, ERR):
            truth, track = whole(came, stream), spool.tracks[stream]
            assert len(truth) == track.total
            at = min(start, len(truth))
            with Reader(track, at) as reader:
                while piece := reader.next(most):
                    assert at + piece.dropped_bytes == piece.offset
                    assert truth[piece.offset : piece.end] == piece.data
                    at = piece.end
            assert len(truth) == at


@settings(max_examples=150, deadline=None)
@given(STEPS, st.integers(0, 120))
def test_head_and_tail_are_kept_and_little_more(steps: Steps, limit: int) -> None:
    with tempfile.TemporaryDirectory() as root:
        spool, came = play(f"{root}/x", limit, steps)
        for stream in (OUT, ERR):
            truth, track = whole(came, stream), spool.tracks[stream]
            kept, dropped = track.ends(limit)
            if len(truth) <= limit:
                assert (truth, 0) == (kept, dropped)
            else:
                tail = limit // 2
                expected = truth[: limit - tail] + (truth[-tail:] if tail else b"")
                assert (expected, len(truth) - limit) == (kept, dropped)
            assert sum(end - start for start, end in track.kept) <= limit + track._file_bytes


@settings(max_examples=150, deadline=None)
@given(STEPS, st.lists(st.integers(1, 30), max_size=40))
def test_a_follower_that_comes_back_anywhere_misses_nothing(steps: Steps, cuts: list[int]) -> None:
    """Both streams, by a client that drops after every few events and goes on from its place."""
    with tempfile.TemporaryDirectory() as root:
        spool, came = play(f"{root}/x", 10_000, steps)
        got, place, seq = {OUT: b"", ERR: b""}, (0, 0), 0
        for most in [*cuts, *[10_000] * 100]:
            with spool.follow(place) as follower:
                event = follower.next(most)
            if event is None:
                break
            assert event.seq == seq
            assert event.dropped_bytes == 0
            assert event.offset == len(got[event.stream])
            got[event.stream] += event.data
            seq, place = seq + len(event.data), event.place
        assert got == {OUT: whole(came, OUT), ERR: whole(came, ERR)}


@given(st.lists(st.tuples(st.sampled_from((OUT, ERR)), BLOBS), max_size=8))
def test_the_order_of_two_streams_is_the_order_in_which_they_came(pieces: Came) -> None:
    with tempfile.TemporaryDirectory() as root:
        spool, came = play(f"{root}/x", 10_000, [("feed", *piece) for piece in pieces])
        again = new(f"{root}/x", 10_000)  # in another process, later
        for each in (spool, again):
            got = []
            with each.follow() as follower:
                while event := follower.next(10_000):
                    got.append((event.stream, event.data))
            assert joined(came) == got


def joined(came: Came) -> Came:
    runs: Came = []
    for stream, data in came:
        if runs and runs[-1][0] == stream:
            runs[-1] = (stream, runs[-1][1] + data)
        else:
            runs.append((stream, data))
    return runs


def test_what_a_slow_reader_has_open_is_read_to_the_end_of_that_file(tmp_path: Path) -> None:
    spool = new(str(tmp_path / "x"), 16)
    spool.feed(OUT, b"headheadTAIL")
    with Reader(spool.tracks[OUT], 8) as reader:
        assert Piece(8, b"TA") == reader.next(2)
        spool.feed(OUT, bytes(100))
        assert Piece(10, b"IL") == reader.next(2)
        pieces = list(iter(lambda: reader.next(100), None))
        assert pieces[0].dropped_bytes > 0
        assert 112 == reader.offset


def test_a_directory_that_somebody_clears_is_told_as_dropped(tmp_path: Path) -> None:
    spool = new(str(tmp_path / "x"), 1000)
    spool.feed(OUT, b"gone")
    for path in (tmp_path / "x").iterdir():
        path.unlink()
    with Reader(spool.tracks[OUT], 0) as reader:
        assert Piece(4, b"", 4) == reader.next(10)


def test_listeners_hear_of_bytes_and_of_the_end(tmp_path: Path) -> None:
    spool, heard = new(str(tmp_path / "x"), 10), list[tuple[int, int]]()
    stop = spool.listen(lambda: heard.append(spool.totals))
    spool.feed(ERR, b"abc")
    spool.close()
    stop()
    spool.feed(OUT, b"d")

    assert [(0, 3), (0, 3)] == heard
    assert spool.closed
