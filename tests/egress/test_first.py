"""What a client's first bytes are taken for."""

from __future__ import annotations

import time

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ringfence.egress.first import HOLD, HTTP, PASS, RAW, TLS, Opening

pytestmark = pytest.mark.anyone


def verdict(data: bytes) -> str:
    opening = Opening()
    opening.feed(data)
    return "cut" if opening.objection else opening.verdict


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\x16\x03\x01\x02\x00", TLS),
        (b"\x16\x03", TLS),
        (b"\x16", HOLD),
        (b"\x16\x04", RAW),
        (b"\x80\x2e\x01\x03\x01", TLS),  # SSL 2's form of a ClientHello
        (b"\x80\x2e\x01\x00\x02", TLS),
        (b"\x80\x2e", HOLD),
        (b"\x80\x2e\x00", RAW),
        (b"GET / HTTP/1.1\r\n", HTTP),
        (b"GET /\r\n", HTTP),  # as 0.9 had it; the parser refuses it
        (b"GET\t/\n", HTTP),
        (b"GET ", HOLD),
        (b"G", HOLD),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", HTTP),
        (b"PROPFIND / HTTP/1.1\r\n", HTTP),
        (b"PROPFIND /", HOLD),
        (b"UPDATE players set\n", RAW),
        (b"get / HTTP/1.1\r\n", "cut"),
        (b"BREW pot http/1.0\n", "cut"),
        (b"\r\nGET / HTTP/1.1\r\n", "cut"),
        (b" \tGET / HTTP/1.1\r\n", "cut"),
        (b"!x / HTTP/1.1\r\n", "cut"),
        (b"PROXY TCP4 192.0.2.1 192.0.2.2 1 80\r\nGET / HTTP/1.1\r\n", "cut"),
        (b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c", "cut"),
        (b"\r\n", PASS),
        (b"\r\n\r\n\0", PASS),
        (b"\r\n\r\n\0x", RAW),
        (b"\r\nhello", PASS),
        (b"hello", PASS),
        (b"hello\n", RAW),
        (b"SSH-2.0-OpenSSH_9.2p1\r\n", RAW),
        (b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n", RAW),
        (b"EHLO client.test\r\n", RAW),
        (b"a001 LOGIN user secret\r\n", RAW),
        (b"*1\r\n$4\r\nPING\r\n", RAW),
        (b"PING\r\n", RAW),
        (b"\x00\x00\x00\x08\x04\xd2\x16\x2f", RAW),  # PostgreSQL's request for TLS
        (b"0032git-upload-pack /lab.git\0host=git.test\0", PASS),
        (b"x" * (1 << 20) + b"x", RAW),
    ],
)
def test_protocols_are_told_apart(data: bytes, expected: str) -> None:
    assert expected == verdict(data)


def fed(data: bytes, cuts: list[int]) -> tuple[str, bytes]:
    """The last verdict, and what was let through before it was final; as the passage does."""
    opening, passed, start = Opening(), b"", 0
    for end in (*sorted(cut for cut in cuts if cut < len(data)), len(data)):
        piece, start = data[start:end], end
        before = opening.verdict
        now = opening.feed(piece)
        if opening.objection:
            return "cut", passed
        if now in (TLS, HTTP):
            return now, passed
        if now != HOLD:
            passed += opening.data if before == HOLD else piece
        if now == RAW:
            return RAW, passed + data[end:]
    return opening.verdict, passed


CUTS = st.lists(st.integers(1, 80), max_size=8)


@given(st.binary(min_size=1, max_size=120), CUTS)
def test_how_it_was_cut_into_packets_does_not_matter(data: bytes, cuts: list[int]) -> None:
    whole, _ = fed(data, [])
    pieces, passed = fed(data, cuts)

    assert data.startswith(passed)
    if RAW == whole:
        assert (RAW, data) == (pieces, passed)
    # More than one verdict may fit the same beginning only where all of them let nothing through.
    assert whole == pieces or {whole, pieces} <= {"cut", HTTP}


TOKEN = st.text("ABCdef-!0GETPOS", min_size=1, max_size=10)
PATH = st.text("/ab?%=", min_size=1, max_size=20)
START = st.sampled_from([b"", b"\r\n", b"\n\n", b" ", b"\r\n\t"])


@given(START, TOKEN, PATH, st.sampled_from([b" ", b"\t"]), CUTS)
def test_no_request_gets_through_as_something_else(
    start: bytes, method: str, path: str, blank: bytes, cuts: list[int]
) -> None:
    """Not one server gets the line's end, however it was spelled and cut."""
    line = start + method.encode() + blank + path.encode() + b" HTTP/1.1"
    request = line + b"\r\nHost: evil.test\r\n\r\n"

    kind, passed = fed(request, cuts)

    assert kind in ("cut", HTTP)
    assert b"HTTP/" not in passed


@given(st.text("abcxyz0189 .:/\r\0", min_size=1, max_size=60), CUTS)
def test_text_is_never_kept_waiting(text: str, cuts: list[int]) -> None:
    """Only what may become a method or a hello is held."""
    data = text.encode()
    assume(data.strip(b"\r\n \t\0"))

    kind, passed = fed(data, cuts)

    assert kind in (PASS, RAW)
    assert passed == data


def test_a_line_without_end_costs_no_more_for_every_byte() -> None:
    opening = Opening()
    opening.feed(b"x" * (1 << 19))
    started = time.process_time()
    for _ in range(10_000):
        assert PASS == opening.feed(b"y")

    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    "data",
    [b"get / HTTP/1.1\r\n", b"\r\nGET / http/1.1\r\n", b"!x / HTTP/1.1\r\n", b"PROXY TCP4 x\r\n"],
)
def test_byte_by_byte_it_is_cut_as_in_one_piece(data: bytes) -> None:
    assert "cut" == fed(data, [])[0] == fed(data, list(range(1, len(data))))[0]


def test_a_line_of_a_request_is_held_so_long_and_no_longer() -> None:
    for size, expected in ((16383, HOLD), (16384, HTTP)):
        assert expected == verdict(b"GET /".ljust(size, b"a"))
        assert expected.replace(HTTP, PASS) == verdict(b"COPY /".ljust(size, b"a"))
