"""Output within a bound: head and tail are exact, and so is the count of what lies between."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.sandbox.stream import Stream

pytestmark = pytest.mark.anyone

pieces = st.lists(st.binary(max_size=40), max_size=12)


@given(pieces, st.integers(0, 64))
def test_head_and_tail_are_kept(written: list[bytes], limit: int) -> None:
    stream = Stream(limit)
    for piece in written:
        stream.feed(piece)

    whole = b"".join(written)
    head, tail = limit - limit // 2, limit // 2
    kept = whole if len(whole) <= limit else whole[:head] + whole[len(whole) - tail :]
    assert kept == stream.getvalue()
    assert len(whole) - len(kept) == stream.dropped_bytes


def test_what_is_not_kept_takes_no_memory() -> None:
    """However long it goes on, and in whatever pieces."""
    stream = Stream(100)
    for size in (*([7] * 1000), 10_000, *([1] * 1000)):
        stream.feed(b"x" * size)
        assert len(stream._head) + len(stream._tail) <= 50 + 2 * 50
    assert 100 == len(stream.getvalue())


@given(pieces)
def test_a_reader_that_keeps_up_gets_every_byte_once(written: list[bytes]) -> None:
    stream = Stream(1 << 20)
    got = b""
    for piece in filter(None, written):
        stream.feed(piece)
        got += stream.read()
    stream.close()

    assert b"".join(written) == got + stream.read()


@given(pieces, st.integers(2, 32))
def test_a_reader_that_falls_behind_gets_what_is_kept(written: list[bytes], limit: int) -> None:
    stream = Stream(limit)
    for piece in written:
        stream.feed(piece)
    stream.close()

    assert stream.getvalue() == b"".join(stream)


@given(st.lists(st.tuples(st.binary(max_size=40), st.booleans()), max_size=12), st.integers(0, 32))
def test_what_a_reader_missed_is_counted(written: list[tuple[bytes, bool]], limit: int) -> None:
    """Not what was dropped: that counts what it had read before, too."""
    stream = Stream(limit)
    got = total = 0
    for piece, reads in written:
        stream.feed(piece)
        total += len(piece)
        if reads and total > got + stream.missed_bytes:
            got += len(stream.read())
    stream.close()
    got += sum(map(len, stream))

    assert total == got + stream.missed_bytes


def test_waiting_has_an_end() -> None:
    with pytest.raises(TimeoutError):
        Stream().read(timeout_s=0.01)


def test_lines_are_whole_whatever_the_pieces() -> None:
    stream = Stream()
    for piece in (b"one\ntw", b"o\nthr", b"ee"):
        stream.feed(piece)
    stream.close()

    assert ["one", "two", "three"] == list(stream.lines())
