"""Whole exchanges, seen by readers that are not ours: what passes means the same on both sides."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.egress.http.body import LAST_CHUNK, chunk
from ringfence.egress.refused import Refused
from tests.egress.readers import by_h11, by_the_standard_library
from tests.egress.scene import (
    ANSWER,
    Outcome,
    Script,
    a_site,
    all_of,
    answering,
    play,
    saying,
    until,
)
from tests.egress.smuggling import head, post

if TYPE_CHECKING:
    from ringfence.egress.io.streams import Stream

pytestmark = pytest.mark.anyone

PIECES = st.lists(st.binary(min_size=1, max_size=60), max_size=5)
CUTS = st.lists(st.integers(0, 400), max_size=4)
JUNK = st.sampled_from(
    ["", "\r\n", "\n", ",", " ", "\0", "chunked", "0", "5\r\n", "HTTP/1.1 ", ":"]
)


def read(data: bytes, method: str = "GET") -> tuple[int, bytes, list[tuple[bytes, bytes]]] | None:
    """An answer as h11 reads it; None: it does not."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method=method, target="/", headers=[("Host", "a.test")]))
    client.send(h11.EndOfMessage())
    client.receive_data(data)
    client.receive_data(b"")
    try:
        answer, body = client.next_event(), b""
        while isinstance(answer, h11.InformationalResponse):
            answer = client.next_event()
        while isinstance(event := client.next_event(), h11.Data):
            body += event.data
    except h11.RemoteProtocolError:
        return None
    if not isinstance(answer, h11.Response) or not isinstance(event, h11.EndOfMessage):
        return None
    of_connection = (
        b"connection",
        b"transfer-encoding",
        b"content-length",
        b"keep-alive",
        b"trailer",
    )
    return (
        answer.status_code,
        body,
        [each for each in answer.headers if each[0] not in of_connection],
    )


def in_pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[start:end] for start, end in itertools.pairwise(places)]


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    """Answers of servers that mean well, with all ways to say a length."""
    pieces, status = draw(PIECES), draw(st.sampled_from([200, 204, 304, 404, 500]))
    body = b"".join(pieces)
    fields = draw(st.lists(st.sampled_from([b"A: b", b"Set-Cookie: c", b"X: \xe4 y"]), max_size=3))
    # Without a body a coding says nothing.
    how = draw(st.sampled_from(["length", "close"] + ["chunks"] * (status not in (204, 304))))
    if "length" == how:
        fields.append(b"Content-Length: %d" % len(body))
    elif "chunks" == how:
        fields.append(b"Transfer-Encoding: chunked")
        body = b"".join(chunk(piece) for piece in pieces) + LAST_CHUNK
    if status in (204, 304):
        body = b""
    return b"\r\n".join([b"HTTP/1.1 %d Said" % status, *fields]) + b"\r\n\r\n" + body


def served_in_pieces(pieces: list[bytes]) -> object:
    def make(outcome: Outcome) -> Script:
        async def serve(stream: Stream) -> None:
            outcome.served = await until(stream, b"\r\n\r\n")
            try:
                for piece in pieces:
                    await stream.write(piece)
                await stream.end()
                await all_of(stream)
            except OSError:
                pass  # enough was heard
            stream.close()

        return serve

    return make


@settings(max_examples=60, deadline=None)
@given(answers(), CUTS, st.sampled_from(["GET", "HEAD"]))
def test_a_client_reads_what_the_server_said(data: bytes, cuts: list[int], method: str) -> None:
    request = head(start=f"{method} / HTTP/1.1".encode())
    outcome = play(saying(request), served_in_pieces(in_pieces(data, cuts)), a_site())  # type: ignore[arg-type]

    assert outcome.error is None
    assert read(data, method) == read(outcome.received, method)
    assert read(outcome.received, method) is not None


@settings(max_examples=100, deadline=None)
@given(answers(), st.lists(st.tuples(st.integers(0, 300), JUNK), max_size=2), CUTS)
def test_a_client_never_reads_something_else(
    data: bytes, junk: list[tuple[int, str]], cuts: list[int]
) -> None:
    """Whatever a server says: it passes and means the same, or it breaks, and the client sees that."""
    for at, text in junk:
        place = at % (len(data) + 1)
        data = data[:place] + text.encode() + data[place:]
    outcome = play(saying(head()), served_in_pieces(in_pieces(data, cuts)), a_site())  # type: ignore[arg-type]

    if outcome.error is None:
        assert read(data) in (read(outcome.received), None)
    else:
        assert isinstance(outcome.error, Refused)
        assert b" 502 " in outcome.received or outcome.received.endswith(b"<reset>")


@settings(max_examples=60, deadline=None)
@given(PIECES, st.booleans(), CUTS, st.binary(max_size=60))
def test_a_server_reads_what_the_client_said(
    pieces: list[bytes], chunked: bool, cuts: list[int], behind: bytes
) -> None:
    body = b"".join(pieces)
    if chunked:
        sent = post(b"Transfer-Encoding: chunked") + b"".join(map(chunk, pieces)) + LAST_CHUNK
    else:
        sent = post(b"Content-Length: %d" % len(body)) + body

    def client(outcome: Outcome) -> Script:
        async def talk(stream: Stream) -> None:
            for piece in in_pieces(sent + behind, cuts):
                await stream.write(piece)
            outcome.received = await all_of(stream)
            stream.close()

        return talk

    end = LAST_CHUNK if chunked else b"\r\n\r\n" + body
    outcome = play(client, answering(ANSWER, after=end), a_site())

    assert outcome.error is None
    assert outcome.served is not None
    for reader in (by_h11, by_the_standard_library):
        seen = reader(outcome.served)
        assert (body, b"") == (seen.body, seen.rest)
