"""Heads off a stream: however they come in pieces, up to a bound, and not one read too many."""

from __future__ import annotations

from typing import Any

import pytest

from ringfence.egress.http.reader import Reader
from ringfence.egress.io.loop import Loop
from ringfence.egress.refused import Refused

pytestmark = pytest.mark.anyone


class Pieces:
    """A stream that comes in these pieces, and must not be read after them."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = list(pieces)

    async def read(self, most: int) -> bytes:
        assert self.pieces, "nobody waits for more"
        assert len(self.pieces[0]) <= most
        return self.pieces.pop(0)

    async def write(self, data: bytes) -> None:
        raise NotImplementedError

    async def end(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    abort = close


def run(coroutine: Any) -> Any:
    loop = Loop()
    try:
        return loop.run_until_done(coroutine)
    finally:
        loop.close()


HEAD = b"GET / HTTP/1.1\r\nA: b\r\n\r\n"


@pytest.mark.parametrize("size", range(1, len(HEAD) + 1))
def test_a_head_comes_in_any_pieces_and_what_follows_stays(size: int) -> None:
    data = HEAD + b"body"
    reader = Reader(Pieces(*(data[at : at + size] for at in range(0, len(HEAD), size))))

    assert HEAD == run(reader.head(len(HEAD), status=431))
    assert b"body".startswith(reader.left)


def test_what_was_read_before_comes_first() -> None:
    reader = Reader(Pieces(b"more", b""), HEAD + HEAD + b"rest")

    assert [HEAD, HEAD] == [run(reader.head(1000, status=431)) for _ in range(2)]
    assert [b"re", b"st", b"more"] == [run(reader.read(most)) for most in (2, 1000, 1000)]
    assert b"" == run(reader.head(1000, status=431))


@pytest.mark.parametrize("status", [431, 502])
def test_one_that_fills_its_bound_is_refused_without_waiting(status: int) -> None:
    data = HEAD[:-1]
    for reader in (
        Reader(Pieces(data)),
        Reader(Pieces(data[:5], data[5:])),
        Reader(Pieces(), data),
    ):
        with pytest.raises(Refused) as refused:
            run(reader.head(len(data), status=status))
        assert status == refused.value.status


def test_an_end_inside_a_head_is_none() -> None:
    reader = Reader(Pieces(HEAD[:-1], b""))

    with pytest.raises(Refused) as refused:
        run(reader.head(1000, status=431))
    assert 400 == refused.value.status


def test_what_there_is_of_a_head_is_shown_before_more_is_waited_for() -> None:
    shown: list[bytes] = []

    def check(data: bytearray) -> None:
        shown.append(bytes(data))
        if data.startswith(b"get"):
            raise Refused("not a method", status=400)

    reader = Reader(Pieces(HEAD[:3], HEAD[3:9], HEAD[9:]))
    assert HEAD == run(reader.head(1000, status=431, check=check))
    assert [HEAD[:3], HEAD[:9]] == shown
    with pytest.raises(Refused, match="not a method"):
        run(Reader(Pieces(b"get")).head(1000, status=431, check=check))
