"""What a client's first bytes are taken for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.egress.first import HTTP, MOST_BYTES, RAW, TLS, protocol


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\x16\x03\x01\x02\x00", TLS),
        (b"\x16\x03", TLS),
        (b"\x16", None),
        (b"\x16\x04", RAW),
        (b"\x80\x2e\x01\x03\x01", TLS),  # SSL 2's form of a ClientHello
        (b"\x80\x2e\x01\x00\x02", TLS),
        (b"\x80\x2e", None),
        (b"\x80\x2e\x00", RAW),
        (b"GET / HTTP/1.1\r\n", HTTP),
        (b"GET ", HTTP),
        (b"get ", HTTP),
        (b"GET\t/", HTTP),
        (b"GET", None),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", HTTP),
        (b"\r\nGET / HTTP/1.1\r\n", HTTP),
        (b" GET / HTTP/1.1\r\n", HTTP),
        (b"\n", HTTP),
        (b"PROPFIND / HTTP/1.1\r\n", HTTP),
        (b"BREW pot http/1.0\n", HTTP),
        (b"PROPFIND /", None),
        (b"SSH-2.0-OpenSSH_9.2p1\r\n", RAW),
        (b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n", RAW),
        (b"EHLO client.test\r\n", RAW),
        (b"a001 LOGIN user secret\r\n", RAW),
        (b"*1\r\n$4\r\nPING\r\n", RAW),
        (b"PING\r\n", RAW),
        (b"\x00\x00\x00\x08\x04\xd2\x16\x2f", RAW),  # PostgreSQL's request for TLS
        (b"0032git-upload-pack /lab.git\0host=git.test\0", RAW),
        (b"A" * 25, RAW),
        (b"A" * 24, None),
        (b"WORD " + b"x" * MOST_BYTES, HTTP),
    ],
)
def test_protocols_are_told_apart(data: bytes, expected: str | None) -> None:
    assert expected == protocol(data)


@given(st.binary(min_size=1, max_size=200))
def test_a_decision_never_changes_when_more_arrives(data: bytes) -> None:
    """What counts as HTTP or TLS must not depend on how it was cut into packets."""
    decisions = [protocol(data[:size]) for size in range(1, len(data) + 1)]
    decided = [decision for decision in decisions if decision]

    assert decisions == [None] * (len(decisions) - len(decided)) + decided[:1] * len(decided)


TOKEN = st.text("ABCdef-!0", min_size=1, max_size=10)


@given(TOKEN, st.text("/ab?", min_size=1), st.sampled_from([b" ", b"\t"]), st.integers(1, 60))
def test_no_request_line_passes_as_raw(method: str, path: str, blank: bytes, cut: int) -> None:
    line = b"X" + method.encode() + blank + path.encode() + b" HTTP/1.1\r\n"

    assert protocol(line) == HTTP
    assert protocol(line[:cut]) in (None, HTTP)
