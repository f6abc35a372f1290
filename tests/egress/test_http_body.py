"""Bodies: cut where they end, whatever pieces they come in."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.egress.http.body import LAST_CHUNK, Body, chunk
from ringfence.egress.http.fields import CHUNKED, UNTIL_CLOSE
from ringfence.egress.refused import Refused
from tests.egress.readers import by_h11, by_the_standard_library
from tests.egress.smuggling import CHUNKS, TE, post

pytestmark = pytest.mark.anyone

PIECES = st.lists(st.binary(max_size=40), max_size=8)
CUTS = st.lists(st.integers(0, 400), max_size=8)


def fed(body: Body, data: bytes, cuts: list[int]) -> bytes:
    """Feed `data` in pieces; what came out."""
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return b"".join(body.feed(data[start:end]) for start, end in itertools.pairwise(places))


def in_chunks(pieces: list[bytes]) -> bytes:
    return b"".join(chunk(piece) for piece in pieces) + LAST_CHUNK


@given(st.binary(max_size=100), st.binary(max_size=50), CUTS)
def test_a_length_is_kept_to(data: bytes, behind: bytes, cuts: list[int]) -> None:
    body = Body(len(data))

    assert data == fed(body, data + behind, cuts)
    assert body.done
    assert behind == body.rest


@given(PIECES, st.binary(max_size=50), CUTS, st.booleans())
def test_chunks_are_put_together(
    pieces: list[bytes], behind: bytes, cuts: list[int], lenient: bool
) -> None:
    body = Body(CHUNKED, lenient=lenient)

    assert b"".join(pieces) == fed(body, in_chunks(pieces) + behind, cuts)
    assert body.done
    assert behind == body.rest
    body.close()


@given(PIECES)
def test_chunks_of_ours_are_read_by_others(pieces: list[bytes]) -> None:
    data = post(TE) + in_chunks(pieces) + b"REST"

    for read in (by_h11, by_the_standard_library):
        assert (b"".join(pieces), b"REST") == (read(data).body, read(data).rest)


@pytest.mark.parametrize("data", [d for _, d in CHUNKS], ids=[name for name, _ in CHUNKS])
def test_odd_chunks_are_refused(data: bytes) -> None:
    with pytest.raises(Refused):
        fed(Body(CHUNKED), data, [])
    with pytest.raises(Refused):  # in whatever pieces
        fed(Body(CHUNKED), data, list(range(len(data))))


@given(st.sampled_from(CHUNKS), CUTS)
def test_nothing_that_was_not_data_comes_out(odd: tuple[str, bytes], cuts: list[int]) -> None:
    body, out = Body(CHUNKED), bytearray()
    places = sorted({min(cut, len(odd[1])) for cut in cuts} | {0, len(odd[1])})

    def feed_all() -> None:
        for start, end in itertools.pairwise(places):
            out.extend(body.feed(odd[1][start:end]))

    with pytest.raises(Refused):
        feed_all()
    # What was said to be five bytes is, until more is known.
    assert any(data.startswith(bytes(out)) for data in (b"hello", b"hell\r"))
    assert not body.done


@given(st.binary(max_size=100), CUTS)
def test_arbitrary_bytes_are_refused_or_read_as_others_do(data: bytes, cuts: list[int]) -> None:
    body = Body(CHUNKED)
    try:
        out = fed(body, data, cuts)
    except Refused:
        return
    if body.done:
        assert (out, body.rest) == (by_h11(post(TE) + data).body, by_h11(post(TE) + data).rest)


@given(st.text("0123456789aAfF;=x \t\r\nh", max_size=30), CUTS)
def test_what_looks_like_chunks_too(text: str, cuts: list[int]) -> None:
    test_arbitrary_bytes_are_refused_or_read_as_others_do.hypothesis.inner_test(  # type: ignore[attr-defined]
        text.encode(), cuts
    )


@pytest.mark.parametrize(
    "data",
    [
        b"5;a=b\r\nhello\r\n0;c\r\n\r\n",
        b"5 \r\nhello\r\n0\r\nA: b\r\nC: d\r\n\r\n",
        b"005\r\nhello\r\n00\r\n\r\n",
    ],
)
def test_a_server_may_add_to_its_chunks(data: bytes) -> None:
    """They are dropped: they are not what the client is told of."""
    body = Body(CHUNKED, lenient=True)

    assert b"hello" == fed(body, data, list(range(len(data))))
    assert body.done


def test_a_line_of_a_chunk_has_a_longest_length() -> None:
    """Of a server a kilobyte with its extension, of a client its digits: no end is waited for."""
    known = b"5;" + b"a" * 1020 + b"\r\n"
    assert 1024 == len(known)
    assert b"hello" == Body(CHUNKED, lenient=True).feed(known + b"hello")
    for data, lenient in ((b"5;" + b"a" * 1021, True), (b"0" * 16, False)):
        body = Body(CHUNKED, lenient=lenient)
        body.feed(data[:-1])
        with pytest.raises(Refused):
            body.feed(data[-1:])


@pytest.mark.parametrize(
    ("length", "data"), [(5, b"hell"), (CHUNKED, b"5\r\nhello\r\n"), (CHUNKED, b"")]
)
def test_an_end_in_the_middle_is_told(length: int, data: bytes) -> None:
    body = Body(length)
    body.feed(data)

    with pytest.raises(Refused):
        body.close()


def test_a_body_may_last_as_long_as_its_connection() -> None:
    body = Body(UNTIL_CLOSE)

    assert b"hello" == body.feed(b"hello")
    assert not body.done
    body.close()
    assert body.done


def test_a_chunk_without_end_is_not_kept() -> None:
    """Data flows through; only what may be part of a line waits."""
    body = Body(CHUNKED)
    body.feed(b"fffffff\r\n")

    for _ in range(100):
        assert 10_000 == len(body.feed(b"x" * 10_000))
    assert b"" == bytes(body._chunks.buffer if body._chunks else b"")


def test_trailers_that_came_together_are_passed_over_at_once() -> None:
    """Nothing more would come to look at them again for."""
    body = Body(CHUNKED, lenient=True)

    assert b"abc" == body.feed(b"3\r\nabc\r\n0\r\nA: b\r\nC: d\r\n\r\nbehind")
    assert body.done
    assert b"behind" == body.rest


@pytest.mark.parametrize(
    "data",
    [
        b"0" * 15 + b"5\r\nhello\r\n0\r\n\r\n",
        b";a\r\n",
        b"5;a\rb\r\nhello\r\n0\r\n\r\n",
        b"5;a\nb\r\nhello\r\n0\r\n\r\n",
        b"5\r\nhello\r\n0\r\nA: b\nC: d\r\n\r\n",
        b"5\r\nhello\r\n0\r\nA: b\rC: d\r\n\r\n",
    ],
)
def test_what_no_server_may_add_either(data: bytes) -> None:
    with pytest.raises(Refused):
        Body(CHUNKED, lenient=True).feed(data)


def test_what_comes_after_the_body_is_kept_however_it_comes() -> None:
    body = Body(2)

    assert [b"ab", b"", b""] == [body.feed(piece) for piece in (b"abc", b"d", b"ef")]
    assert b"cdef" == body.rest
