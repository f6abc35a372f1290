"""Answers: what the client gets to see of what a server said."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.egress.http import onward as http_onward
from ringfence.egress.http.answer import answer_length, parse_answer, switches
from ringfence.egress.http.fields import CHUNKED, UNTIL_CLOSE, Fields, check_connection
from ringfence.egress.http.head import parse_request
from ringfence.egress.refused import Refused
from tests.egress.smuggling import head, post

pytestmark = pytest.mark.anyone


def said(*lines: bytes, start: bytes = b"HTTP/1.1 200 OK") -> bytes:
    return b"\r\n".join([start, *lines]) + b"\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "method", "length"),
    [
        (said(b"Content-Length: 5"), "GET", 5),
        (said(b"Content-Length: 5", b"Content-Length: 5"), "GET", 5),
        (said(b"Content-Length: 5"), "HEAD", 0),
        (said(b"Transfer-Encoding: chunked"), "GET", CHUNKED),
        (said(b"Transfer-Encoding: Chunked", b"Content-Length: 5"), "GET", CHUNKED),
        (said(), "GET", UNTIL_CLOSE),
        (said(start=b"HTTP/1.0 200"), "GET", UNTIL_CLOSE),
        (said(b"Content-Length: 5", start=b"HTTP/1.1 204 No Content"), "GET", 0),
        (said(b"Content-Length: 5", start=b"HTTP/1.1 304 Not Modified"), "GET", 0),
        (said(start=b"HTTP/1.1 100 Continue"), "POST", 0),
    ],
)
def test_the_length_of_the_body(data: bytes, method: str, length: int) -> None:
    assert length == answer_length(parse_answer(data), method)


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n",
        b"hello\r\n\r\n",
        said(start=b"HTTP/2 200"),
        said(start=b"HTTP/1.1  200 OK"),
        said(start=b"HTTP/1.1 2000 OK"),
        said(start=b"HTTP/1.1 099 OK"),
        said(start=b"HTTP/1.1 0200 OK"),
        said(start=b"HTTP/1.1 2\xb20 OK"),
        said(start=b"HTTP/1.1 200 O\0K"),
        said(start=b"HTTP/1.1 200 O\rK"),
        said(start=b"HTTP/1.1 200 O\x7fK"),
        said(b"A : b"),
        said(b"A: b\nC: d"),
        said(b"A: b", b" c"),
    ],
)
def test_what_is_no_answer(data: bytes) -> None:
    with pytest.raises(Refused) as refusal:
        parse_answer(data)

    assert 502 == refusal.value.status


@pytest.mark.parametrize(
    "data",
    [
        said(b"Content-Length: 5", b"Content-Length: 6"),
        said(b"Content-Length: 5, 6"),
        said(b"Content-Length: -1"),
        said(b"Transfer-Encoding: gzip, chunked"),
        said(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
        said(b"Transfer-Encoding: chunked", start=b"HTTP/1.0 200 OK"),
    ],
)
def test_a_length_that_is_not_clear(data: bytes) -> None:
    with pytest.raises(Refused) as refusal:
        answer_length(parse_answer(data), "GET")

    assert 502 == refusal.value.status


def test_the_client_is_told_that_the_connection_ends() -> None:
    given_ = parse_answer(
        said(b"Connection: keep-alive", b"Keep-Alive: timeout=5", b"Content-Length: 5", b"X: y")
    )

    assert said(b"X: y", b"Content-Length: 5", b"Connection: close") == http_onward.answer(
        given_, 5
    )


@pytest.mark.parametrize(
    "name",
    ["Connection", "Keep-Alive", "Proxy-Connection", "Upgrade", "Trailer", "proxy_connection"],
)
def test_what_a_server_says_of_its_connection_is_not_told(name: str) -> None:
    given_ = parse_answer(said(f"{name}: theirs".encode(), b"Content-Length: 5", b"X: y"))

    assert said(b"X: y", b"Content-Length: 5", b"Connection: close") == http_onward.answer(
        given_, 5
    )


@pytest.mark.parametrize(
    ("method", "has_length"),
    [("POST", True), ("PUT", True), ("PATCH", True), ("GET", False), ("DELETE", False)],
)
def test_where_a_body_is_expected_none_is_told_as_none(method: str, has_length: bool) -> None:
    """Servers wait for it otherwise, or answer that a length is required."""
    request = parse_request(head(start=f"{method} / HTTP/1.1".encode()))

    assert has_length == (b"\r\nContent-Length: 0\r\n" in http_onward.request(request))


def test_a_length_without_a_body_stays() -> None:
    given_ = parse_answer(said(b"Content-Length: 5"))

    assert b"Content-Length: 5" in http_onward.answer(given_, 0)


def test_an_interim_answer_has_no_end_of_connection() -> None:
    given_ = parse_answer(said(b"Link: </a>", start=b"HTTP/1.1 103 Early Hints"))

    assert given_.is_interim
    assert said(b"Link: </a>", start=b"HTTP/1.1 103 Early Hints") == http_onward.answer(given_, 0)


WEBSOCKET = parse_request(
    head(
        b"Connection: Upgrade",
        b"Upgrade: websocket",
        b"Sec-WebSocket-Version: 13",
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        b"Sec-WebSocket-Extensions: permessage-deflate",
    )
)
PROOF = b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo="  # RFC 6455, section 1.3


def test_a_websocket_switches() -> None:
    switched = parse_answer(said(PROOF, start=b"HTTP/1.1 101 Switching Protocols"))

    assert switches(WEBSOCKET, switched)
    assert b"Upgrade: websocket\r\n" in http_onward.answer(switched, 0, switched=True)


@pytest.mark.parametrize(
    "data",
    [
        said(PROOF),
        said(start=b"HTTP/1.1 101 Switching Protocols"),
        said(PROOF.lower(), start=b"HTTP/1.1 101 Switching Protocols"),
        said(PROOF, PROOF, start=b"HTTP/1.1 101 Switching Protocols"),
    ],
)
def test_no_switch_without_the_proof(data: bytes) -> None:
    assert not switches(WEBSOCKET, parse_answer(data))


def test_no_switch_that_nobody_asked_for() -> None:
    answered = parse_answer(said(PROOF, start=b"HTTP/1.1 101 Switching Protocols"))

    assert not switches(parse_request(head()), answered)
    key = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
    assert not switches(parse_request(head(key)), answered)


class TestWithACredential:
    CREDENTIAL = http_onward.Header("X-Api-Key", "hunter2")

    def test_it_is_added_and_everything_else_stays(self) -> None:
        request = parse_request(post(b"A: b", b"Cookie: c=d", b"a: e", b"Content-Length: 0"))
        onward = http_onward.request(request, [self.CREDENTIAL], scrubbed=True)

        assert (
            b"POST / HTTP/1.1\r\nHost: a.test\r\nA: b\r\nCookie: c=d\r\na: e\r\n"
            b"X-Api-Key: hunter2\r\nAccept-Encoding: identity\r\nContent-Length: 0\r\n"
            b"Connection: close\r\n\r\n"
        ) == onward

    @pytest.mark.parametrize("name", [b"X-Api-Key", b"x-api-key", b"X_API_KEY", b"x-Api_Key"])
    def test_the_clients_own_is_taken_out(self, name: bytes) -> None:
        request = parse_request(head(name + b": mine", name + b": mine again"))
        onward = http_onward.request(request, [self.CREDENTIAL], scrubbed=True)

        assert b"mine" not in onward
        assert 1 == onward.lower().count(b"api")

    @pytest.mark.parametrize(
        "line", [b"Accept-Encoding: gzip", b"Range: bytes=0-3", b"If-Range: x"]
    )
    def test_what_could_hide_it_is_not_asked_for(self, line: bytes) -> None:
        request = parse_request(head(line))

        assert line in http_onward.request(request)  # the control
        assert line not in http_onward.request(request, [self.CREDENTIAL], scrubbed=True)

    def test_nor_compressed_messages(self) -> None:
        assert b"permessage-deflate" in http_onward.request(WEBSOCKET)
        assert b"permessage-deflate" not in http_onward.request(WEBSOCKET, scrubbed=True)

    def test_the_client_cannot_have_it_dropped(self) -> None:
        """Connection names headers of this connection; ours is none of the client's."""
        request = parse_request(head(b"Connection: close, X-Api-Key"))

        assert b"X-Api-Key: hunter2" in http_onward.request(
            request, [self.CREDENTIAL], scrubbed=True
        )
        assert b"Connection: close\r\n" in http_onward.request(
            request, [self.CREDENTIAL], scrubbed=True
        )

    def test_it_is_not_shown(self) -> None:
        assert "hunter2" not in repr(self.CREDENTIAL)


@given(st.binary(max_size=100))
def test_arbitrary_bytes_are_refused_or_read(data: bytes) -> None:
    with contextlib.suppress(Refused):  # and nothing else
        answer_length(parse_answer(b"HTTP/1.1 200 OK\r\n" + data + b"\r\n\r\n"), "GET")


HOP_BY_HOP = (
    *("connection", "http2-settings", "keep-alive", "proxy-authenticate", "proxy-authorization"),
    *("proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"),
)


@pytest.mark.parametrize("name", [*HOP_BY_HOP, "proxy_authorization", "TE", "x-named"])
def test_what_is_of_one_connection_goes_no_further(name: str) -> None:
    fields = Fields([("Connection", "close, X-Named"), (name, "secret"), ("X-Other", "stays")])

    assert [("X-Other", "stays")] == [*fields.end_to_end()]


@pytest.mark.parametrize(
    "name", ["authorization", "content-length", "cookie", "expect", "host", "transfer-encoding"]
)
def test_what_others_decide_by_is_not_dropped_on_the_way(name: str) -> None:
    check_connection(Fields([("Connection", "close, x-named")]))
    for value in (name, f"close, {name.title()}", f"{name},close"):
        with pytest.raises(Refused) as refused:
            check_connection(Fields([("Connection", value)]))
        assert 400 == refused.value.status
