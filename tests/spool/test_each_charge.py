"""What the output of an exec takes on disk, is charged for, and gives back."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest

from ringfence.spool import order as order_module
from ringfence.spool import segments as segments_module
from ringfence.spool import track as track_module
from ringfence.spool.order import ERR, OUT, Order
from ringfence.spool.reader import Piece, Reader
from ringfence.spool.segments import Segments
from ringfence.spool.spool import Spool
from ringfence.spool.track import EXHAUSTED, Budget, Track

pytestmark = pytest.mark.anyone

Give = Callable[[Track, bytes], None]
LIMIT = 16


@pytest.fixture(autouse=True)
def small_files() -> Iterator[None]:
    with mock.patch.object(track_module, "_SMALLEST", 4):
        yield


def on_disk(place: Path, name: str = "o") -> int:
    return sum(each.stat().st_size for each in place.glob(f"{name}-*"))


def feed(track: Track, data: bytes) -> None:
    track.feed(data)


def pipe(track: Track, data: bytes) -> None:
    read, write = os.pipe()
    try:
        os.set_blocking(read, False)
        os.write(write, data)
        with suppress(BlockingIOError):
            while True:
                track.take(read)
    finally:
        os.close(read)
        os.close(write)


@pytest.mark.parametrize("give", [feed, pipe])
def test_what_is_on_disk_is_charged_and_nothing_else(tmp_path: Path, give: Give) -> None:
    """The head, the tail, files of the tail that are dropped, and what an earlier process left."""
    budget = Budget(1000)
    place = tmp_path / "x"
    track = Track(str(place), "o", LIMIT, budget=budget)
    for size in (3, 8, 1, 30, 200, 2):
        give(track, b"x" * size)
        assert on_disk(place) == track.kept_bytes == 1000 - budget.left
        assert track.total - track.kept_bytes == track.dropped_bytes
        assert track.kept_bytes <= LIMIT + 4
    assert 244 == track.total
    kept = track.kept_bytes

    again = Track(str(place), "o", LIMIT, track.total, budget)
    assert 1000 - 2 * kept == budget.left
    again.settle()
    assert 1000 - kept == budget.left
    track.settle()
    assert 1000 == budget.left
    fresh = Track(str(tmp_path / "y"), "o", LIMIT, budget=budget)
    fresh.settle()
    give(fresh, b"y" * 8)
    assert 1000 == budget.left, "what is settled is counted elsewhere"
    for each in (track, again, fresh):
        each.close()


@pytest.mark.parametrize("give", [feed, pipe])
def test_no_more_is_kept_than_the_budget_has_left(tmp_path: Path, give: Give) -> None:
    budget = Budget(10)
    tracks = [Track(str(tmp_path / name), "o", 100, budget=budget) for name in "ab"]
    give(tracks[0], b"x" * 7)
    assert "" == tracks[0].fault
    give(tracks[1], b"y" * 7)

    assert [7, 3] == [each.kept_bytes for each in tracks]
    assert [7, 7] == [each.total for each in tracks]
    assert (0, EXHAUSTED, 4) == (budget.left, tracks[1].fault, tracks[1].unwritten_bytes)
    tracks[0].settle()
    give(tracks[1], b"z" * 3)
    assert 6 == tracks[1].kept_bytes
    for each in tracks:
        each.close()


def test_a_file_of_the_tail_goes_as_soon_as_the_tail_begins_after_it(tmp_path: Path) -> None:
    """And each file is closed when the next one begins."""
    before = len(os.listdir("/proc/self/fd"))
    track = Track(str(tmp_path / "x"), "o", LIMIT)
    track.feed(b"x" * 19)
    assert [(0, 8), (8, 12), (12, 16), (16, 19)] == track.segments.spans
    track.feed(b"x")
    assert [(0, 8), (12, 16), (16, 20)] == track.segments.spans
    assert 4 == track.dropped_bytes
    assert before + 1 == len(os.listdir("/proc/self/fd"))
    track.close()
    assert before == len(os.listdir("/proc/self/fd"))


def test_an_overdrawn_budget_has_nothing_left_rather_than_less() -> None:
    budget = Budget(5)
    budget.spend(7)
    assert 0 == budget.left
    budget.spend(-3)
    assert 1 == budget.left


def test_where_nothing_is_kept_nothing_is_made_and_nothing_counts_as_unwritten(
    tmp_path: Path,
) -> None:
    track = Track(str(tmp_path / "x"), "o", 0)
    track.feed(b"abc")
    assert (3, 3, 0, "") == (track.total, track.dropped_bytes, track.unwritten_bytes, track.fault)
    assert not (tmp_path / "x").exists()
    head_alone = Track(str(tmp_path / "y"), "o", 1)
    head_alone.feed(b"abc")
    assert (b"a", 2, 0) == (*head_alone.ends(1), head_alone.unwritten_bytes)
    head_alone.close()


def test_a_full_disk_is_not_tried_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    now = [100.0]
    monkeypatch.setattr("ringfence.spool.track.time.monotonic", lambda: now[0])
    track = Track(str(tmp_path / "x"), "o", 100)
    track.feed(b"abc")

    def full(self: Segments, data: memoryview) -> int:
        tried.append(len(data))
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(Segments, "write", full)
        track.feed(b"de")
        track.feed(b"fg")
    assert [2] == tried
    track.feed(b"hi")
    assert (6, 3) == (track.unwritten_bytes, track.kept_bytes)
    now[0] += track_module._AGAIN_S
    track.feed(b"jk")
    assert [(0, 3), (9, 11)] == track.kept
    assert os.strerror(errno.ENOSPC) == track.fault
    track.close()


def test_so_many_files_a_stream_has_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each break of the disk begins a new file."""
    monkeypatch.setattr(track_module, "_MOST_FILES", 5)
    budget = Budget(10_000)
    track = Track(str(tmp_path / "x"), "o", 4000, budget=budget)
    for _ in range(12):
        track.feed(b"abcd")
        track._advance(1)  # one that was dropped
    assert 5 == len(track.segments.spans) == len([*(tmp_path / "x").glob("o-*")])
    assert on_disk(tmp_path / "x") == 10_000 - budget.left == 20
    assert 0 == track.segments.spans[0][0]
    track.close()


def test_files_are_their_owners_and_closed_once(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    spool = Spool(str(tmp_path / "x"), 100)
    spool.feed(OUT, b"a")
    spool.feed(ERR, b"b")
    modes = {each.name[0]: each.stat().st_mode & 0o777 for each in (tmp_path / "x").iterdir()}
    assert {"o": 0o600, "e": 0o600} == {name: modes[name] for name in "oe"}
    assert 0o700 == (tmp_path / "x").stat().st_mode & 0o777
    assert before + 2 == len(os.listdir("/proc/self/fd"))
    spool.close(OUT)
    assert not spool.closed
    spool.close()
    spool.close()
    assert spool.closed
    reader = Reader(spool.tracks[OUT], 0)
    assert Piece(0, b"a") == reader.next(9)
    assert before + 1 == len(os.listdir("/proc/self/fd"))
    reader.close()
    with spool.follow() as follower:
        assert follower.next(9)
    assert before == len(os.listdir("/proc/self/fd"))


def test_no_link_is_followed_and_no_file_that_was_removed_is_made_again(tmp_path: Path) -> None:
    place, elsewhere = tmp_path / "x", tmp_path / "elsewhere"
    place.mkdir()
    elsewhere.write_bytes(b"kept")
    (place / f"o-{0:016x}").symlink_to(elsewhere)
    track = Track(str(place), "o", 100, is_new=True)
    track.feed(b"abc")
    assert b"kept" == elsewhere.read_bytes()
    assert (3, os.strerror(errno.ELOOP)) == (track.dropped_bytes, track.fault)
    with pytest.raises(OSError, match="symbolic"):
        track.segments.open(0)

    other = Track(str(tmp_path / "y"), "o", 100)
    other.feed(b"abc")
    other.segments.finish()
    (tmp_path / "y" / f"o-{0:016x}").unlink()
    other.feed(b"def")
    assert os.strerror(errno.ENOENT) == other.fault
    assert [] == [*(tmp_path / "y").iterdir()]


def test_only_files_of_the_stream_are_its_files(tmp_path: Path) -> None:
    digits = segments_module._DIGITS
    for name in (f"o-{0:0{digits}x}", f"e-{5:0{digits}x}", "o-12", "order", f"oo-{1:0{digits}x}"):
        (tmp_path / name).write_bytes(b"abc")
    found = [Segments.found(str(tmp_path), name).spans for name in ("o", "e", "x")]
    assert [[(0, 3)], [(5, 8)], []] == found
    assert [0, 8] == [Segments.found(str(tmp_path), name).end for name in ("x", "e")]


def test_a_descriptor_that_is_closed_is_no_end_of_the_stream(tmp_path: Path) -> None:
    read, write = os.pipe()
    spool = Spool(str(tmp_path / "x"), 100)
    os.close(write)
    assert 0 == spool.take(OUT, read)
    assert [True, False] == [each.closed for each in spool.tracks]
    os.close(read)
    for _ in range(2):
        with pytest.raises(OSError, match="Bad file descriptor"):
            spool.take(ERR, read)
    assert not spool.closed
    assert not (tmp_path / "x").exists()


def test_totals_that_are_known_count_what_has_no_file(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path / "x"), 100, (7, 9))
    assert (7, 9) == spool.totals
    assert (b"", 7) == spool.tracks[OUT].ends(100)
    spool.feed(ERR, b"more")
    assert (b"more", 9) == spool.tracks[ERR].ends(100)
    spool.close()


@pytest.mark.parametrize("stream", [OUT, ERR])
def test_one_stream_alone_is_followed_by_its_own_offsets(tmp_path: Path, stream: int) -> None:
    spool = Spool(str(tmp_path / "x"), 100)
    for number, data in ((OUT, b"a"), (ERR, b"bcd"), (OUT, b"ef"), (ERR, b"g")):
        spool.feed(number, data)
    with spool.follow(wanted=(stream,)) as follower:
        events = [*iter(lambda: follower.next(100), None)]
    assert [b"aef", b"bcdg"][stream] == b"".join(each.data for each in events)
    assert {stream} == {each.stream for each in events}
    assert [each.offset for each in events] == [each.seq for each in events]
    with spool.follow((1, 1), (stream,)) as follower:
        event = follower.next(100)
    assert event is not None
    assert (stream, 1, 1) == (event.stream, event.offset, event.seq)
    with spool.follow((1, 1)) as follower:
        event = follower.next(100)
    assert event is not None
    assert (ERR, 1, 2) == (event.stream, event.offset, event.seq)
    spool.close()


def test_an_order_with_many_turns_is_thinned_in_memory_and_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order_module, "_MOST_CORNERS", 8)
    before = len(os.listdir("/proc/self/fd"))
    place, order = (0, 0), Order(str(tmp_path / "order"), (0, 0), is_new=True)
    for number in range(100):
        order.came(number % 2, place)
        place = (place[0] + 1, place[1]) if number % 2 == OUT else (place[0], place[1] + 1)
        assert len(order.corners) <= 8
        assert order.corners == Order(str(tmp_path / "order"), place).corners
    assert ["order"] == os.listdir(tmp_path)
    assert before == len(os.listdir("/proc/self/fd"))


def test_a_reader_has_one_file_open_at_most(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    track = Track(str(tmp_path / "x"), "o", LIMIT)
    track.feed(b"x" * 19)
    track.close()
    with Reader(track, 0) as reader:
        while reader.next(2):
            assert before + 1 == len(os.listdir("/proc/self/fd"))
    assert before == len(os.listdir("/proc/self/fd"))


def test_an_exec_that_is_over_gives_back_what_both_streams_have(tmp_path: Path) -> None:
    budget = Budget(100)
    spool = Spool(str(tmp_path / "x"), 100, budget=budget)
    spool.feed(OUT, b"abc")
    spool.feed(ERR, b"de")
    assert 95 == budget.left
    spool.close()
    spool.settle()
    assert 100 == budget.left


def test_an_order_that_is_no_path_is_read_as_far_as_it_is_one(tmp_path: Path) -> None:
    path = str(tmp_path / "order")
    pack = order_module._CORNER.pack

    def read(*corners: tuple[int, int], rest: bytes = b"") -> list[tuple[int, int]]:
        with open(path, "wb") as file:
            file.write(b"".join(pack(*each) for each in corners) + rest)
        return Order(path, (5, 5)).corners

    assert [(1, 0), (1, 5)] == read((1, 0), (1, 5), rest=b"half")
    assert [(5, 5)] == read((5, 5), (6, 5))
    assert [(4, 4)] == read((4, 4), (4, 6))
    assert [(2, 2)] == read((2, 2), (1, 3), (4, 4))
    assert [(2, 2)] == read((2, 2), (3, 1), (4, 4))
    assert [] == Order(path, (5, 5), is_new=True).corners


def test_one_that_stops_listening_is_alone_in_that(tmp_path: Path) -> None:
    spool, heard = Spool(str(tmp_path / "x"), 10), list[str]()
    stops = [spool.listen(lambda name=name: heard.append(name)) for name in "ab"]  # type: ignore[misc]
    spool.feed(OUT, b"")
    assert [] == heard
    stops[0]()
    stops[0]()
    spool.feed(OUT, b"x")
    spool.close(OUT)
    assert ["b", "b"] == heard
    spool.close()


def test_what_a_full_disk_costs_is_counted_where_it_would_have_been_kept(tmp_path: Path) -> None:
    """In the head and in the tail; beyond a head without a tail nothing would have been."""
    for limit, before, lost in ((LIMIT, 0, 5), (LIMIT, 8, 5), (1, 1, 0)):
        track = Track(str(tmp_path / f"{limit}-{before}"), "o", limit)
        track.feed(b"x" * before)
        full = OSError(errno.ENOSPC, "full")
        with mock.patch.object(track.segments, "begin", side_effect=full):
            track.feed(b"y" * 5)
        assert (lost, before + 5) == (track.unwritten_bytes, track.total)
        assert bool(lost) == bool(track.fault)
        track.close()


def test_a_closed_descriptor_is_no_fault_of_the_disk(tmp_path: Path) -> None:
    track = Track(str(tmp_path / "x"), "o", LIMIT)
    track.feed(b"x")
    read, write = os.pipe()
    os.close(write)
    os.close(read)
    with pytest.raises(OSError) as closed:
        track.take(read)
    assert (errno.EBADF, "", 0) == (closed.value.errno, track.fault, track.unwritten_bytes)
    track.feed(b"y")
    assert 2 == track.kept_bytes
    track.close()


@pytest.mark.parametrize("count", [7, 8, 9, 16, 20, 21, 24, 30, 60])
@pytest.mark.parametrize("most", [1, 2, 9, 16, 20, 24, 100])
def test_both_ends_are_bytes_that_are_kept_each_once(tmp_path: Path, count: int, most: int) -> None:
    data = bytes(range(count))
    track = Track(str(tmp_path / "x"), "o", LIMIT)
    track.feed(data)
    track.close()
    wanted = range(count)
    if count > most:
        wanted_ends = {*range(most - most // 2), *range(count - most // 2, count)}
        wanted = [each for each in wanted if each in wanted_ends]  # type: ignore[assignment]
    kept = [at for at in wanted if any(start <= at < end for start, end in track.kept)]

    assert (bytes(kept), count - len(kept)) == track.ends(most)


def test_a_file_that_is_begun_twice_is_one(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    segments = Segments(str(tmp_path / "x"), "o", [])
    for _ in range(2):
        segments.begin(0)
    assert [(0, 0)] == segments.spans
    segments.write(memoryview(b"xy"))
    segments.begin(2)
    assert [(0, 2), (2, 2)] == segments.spans
    assert before + 1 == len(os.listdir("/proc/self/fd"))
    segments.finish()


def test_a_file_that_is_gone_is_skipped_and_counted_and_the_next_is_read(tmp_path: Path) -> None:
    track = Track(str(tmp_path / "x"), "o", 100)
    segments = track.segments
    for at, data in ((0, b"abc"), (3, b"de"), (5, b"fgh")):
        segments.begin(at)
        segments.write(memoryview(data))
    track.total = 8
    os.unlink(segments._path(3))
    with Reader(track, 1) as reader:
        assert [Piece(1, b"bc"), Piece(5, b"fgh", 2), None] == [reader.next(9) for _ in range(3)]
    os.unlink(segments._path(5))
    with Reader(track, 0) as reader:
        assert [Piece(0, b"abc"), Piece(8, b"", 5), None] == [reader.next(9) for _ in range(3)]
    track.close()


def test_a_process_that_goes_on_where_another_turned_turns_once(tmp_path: Path) -> None:
    path = str(tmp_path / "order")
    first = Order(path, (0, 0), is_new=True)
    first.came(OUT, (0, 0))
    first.came(ERR, (5, 0))
    second = Order(path, (5, 0))
    second.came(ERR, (5, 0))
    assert [(5, 0)] == second.corners
    second.came(OUT, (5, 3))
    assert [(5, 0), (5, 3)] == second.corners == Order(path, (9, 3)).corners


@pytest.mark.parametrize(
    ("place", "totals", "run"),
    [
        ((0, 0), (3, 0), (OUT, 3)),
        ((3, 0), (3, 0), None),
        ((0, 0), (9, 4), (OUT, 5)),
        ((5, 0), (9, 4), (ERR, 4)),
        ((5, 0), (9, 2), (ERR, 2)),
        ((5, 4), (9, 4), (OUT, 9)),
    ],
)
def test_a_reader_that_knows_fewer_bytes_is_led_no_further(
    tmp_path: Path, place: tuple[int, int], totals: tuple[int, int], run: tuple[int, int] | None
) -> None:
    """The writer may have noted a turn since it looked at the totals."""
    order = Order(str(tmp_path / "order"), (0, 0), is_new=True)
    order.corners = [(5, 0), (5, 4)]
    assert run == order.next_run(place, totals)
