"""Request heads: what is accepted is read alike by everybody, and the rest is refused."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ringfence.egress.http import onward as http_onward
from ringfence.egress.http.fields import CHUNKED, MOST_FIELDS, parse_fields
from ringfence.egress.http.head import (
    Authority,
    RequestHead,
    check_beginning,
    head_end,
    parse_request,
)
from ringfence.egress.refused import Refused
from tests.egress.readers import by_h11, by_the_standard_library
from tests.egress.smuggling import CL, EVERY_HEAD, TE, head, post

pytestmark = pytest.mark.anyone

NAMES = st.from_regex(r"\A[a-z0-9]([a-z0-9-]{0,10}[a-z0-9])?(\.[a-z]{2,8}){1,3}\Z")
TOKENS = st.from_regex(r"\A[!#$%&'*+.^_`|~0-9A-Za-z-]{1,20}\Z")
VALUES = st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f"))
PATHS = st.from_regex(r"\A/[!\"$-\[\]-~]{0,40}\Z")
JUNK = [
    *"\r\n \t\v\f\0\x7f\x85\xa0:;,@#%\\/?*+-_.[]()\"'0aAxX",
    *("\r\n", " \r\n", "\r\n ", "\r\n\t", "\r\n\r\n", "chunked", "\r\nHost: b.test"),
    *("\r\nContent-Length: 1", "\r\nTransfer-Encoding: chunked", "\nTransfer-Encoding: chunked"),
]


def smuggled(pieces: list[tuple[int, str]], data: bytes) -> bytes:
    """`data` with junk put in at some places of it."""
    for at, junk in pieces:
        place = at % (len(data) + 1)
        data = data[:place] + junk.encode("latin-1") + data[place:]
    return data


@st.composite
def plain_heads(draw: st.DrawFn) -> bytes:
    """Heads with nothing wrong."""
    method = draw(st.sampled_from(["GET", "POST", "PUT", "DELETE", "M-SEARCH", "OPTIONS"]))
    name, path = draw(NAMES), draw(PATHS)
    target = draw(st.sampled_from([path, f"http://{name}{path}"]))
    lines = [f"Host: {name}"]
    own = {"host", "connection", "content-length", "transfer-encoding", "expect", "upgrade"}
    for key, value in draw(st.lists(st.tuples(TOKENS, VALUES), max_size=6)):
        if key.lower().replace("_", "-") not in own:
            lines.append(f"{key}:{value}")
    lines += draw(st.sampled_from([[], ["Content-Length: 5"], ["Transfer-Encoding: chunked"]]))
    text = "\r\n".join([f"{method} {target} HTTP/1.1", *draw(st.permutations(lines))])
    return text.encode("latin-1") + b"\r\n\r\n"


def parsed(data: bytes) -> RequestHead | None:
    """What the strict parser makes of a stream's beginning; None: refused, or not whole."""
    try:
        end = head_end(data, 16384)
        return parse_request(data[:end]) if end else None
    except Refused:
        return None


def check_readers_agree(request: RequestHead) -> None:
    """What is passed on means the same to readers that are not ours."""
    body = b"5\r\nhello\r\n0\r\n\r\n" if request.length == CHUNKED else b"x" * request.length
    payload = b"hello" if request.length == CHUNKED else body
    onward = http_onward.request(request)
    again = parse_request(onward, port=request.authority.port)

    assert (request.method, request.target) == (again.method, again.target)
    assert request.authority == again.authority
    assert request.length == again.length
    for read in (by_h11, by_the_standard_library):
        seen = read(onward + body + b"REST")

        assert (request.method, _one_slash(request.target)) == (
            seen.method,
            _one_slash(seen.target),
        )
        assert [str(v) for n, v in again.fields] == [v for _, v in seen.fields]
        assert [n.lower() for n, _ in again.fields] == [n for n, _ in seen.fields]
        assert (payload, b"REST") == (seen.body, seen.rest)


def _one_slash(target: str) -> str:
    """http.server makes `//` at the start `/`, for redirects of its own."""
    return "/" + target.lstrip("/") if target.startswith("/") else target


@pytest.mark.parametrize(
    ("data", "status"), [(d, s) for _, d, s in EVERY_HEAD], ids=[name for name, _, _ in EVERY_HEAD]
)
def test_smuggling_forms_are_refused(data: bytes, status: int) -> None:
    with pytest.raises(Refused) as refusal:
        parse_request(data)

    assert status == refusal.value.status


# The same without what is odd: it is that, and nothing else, that was refused.
CONTROLS = [
    head(),
    head(start=b"GET / HTTP/1.0"),
    head(start=b"A" * 24 + b" / HTTP/1.1"),
    head(start=b"M-SEARCH / HTTP/1.1"),
    head(host=b"host:a.test"),
    head(host=b"HOST: \t A.Test. \t"),
    head(host=b"Host: a.test:80"),
    head(start=b"GET http://a.test/ HTTP/1.1"),
    head(start=b"GET HTTP://A.TEST:80?q HTTP/1.1"),
    head(start=b"GET http://a.test HTTP/1.1"),
    head(start=b"OPTIONS * HTTP/1.1"),
    head(host=b"Host: [::1]"),
    head(host=b"Host: 192.0.2.1"),
    head(host=b"Host: xn--bcher-kva.test"),
    head(host=b"Host: _dmarc.a_b.test"),
    head(b"A:", b"A: b\tc", b"B: \xe4", b"Content-Lengthy: 1", b"X_Y: z"),
    head(b"Expect: 100-Continue"),
    head(b"Connection: keep-alive, Foo", b"Foo: bar", b"TE: trailers"),
    post(CL),
    post(TE),
    post(b"Content-Length: 0"),
    post(b"transfer-encoding: CHUNKED"),
    head(CL),
    head(start=b"CONNECT a.test:443 HTTP/1.1", host=b"Host: a.test:443"),
    head(start=b"CONNECT a.test:443 HTTP/1.1"),
    head(start=b"CONNECT a.test:443 HTTP/1.0", host=b""),
    head(start=b"CONNECT [::1]:443 HTTP/1.1", host=b"Host: [::1]:443"),
]


@pytest.mark.parametrize("data", CONTROLS, ids=range(len(CONTROLS)))
def test_plain_forms_are_read(data: bytes) -> None:
    request = parse_request(data)

    if request.method != "CONNECT":
        check_readers_agree(request)


@given(plain_heads())
def test_any_plain_head_is_read_alike(data: bytes) -> None:
    check_readers_agree(parse_request(data))


@given(plain_heads(), st.lists(st.tuples(st.integers(0, 500), st.sampled_from(JUNK)), max_size=3))
@example(head(), [(16, "\n")])
def test_junk_is_refused_or_read_alike(data: bytes, pieces: list[tuple[int, str]]) -> None:
    """Whatever is put in, wherever: no reader sees another request than the one that was judged."""
    request = parsed(smuggled(pieces, data))

    if request is not None and request.method != "CONNECT":
        check_readers_agree(request)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_or_read(data: bytes) -> None:
    parsed(data + b"\r\n\r\n")  # and raise nothing but Refused


@given(st.sampled_from(EVERY_HEAD), plain_heads())
def test_a_request_behind_another_is_never_part_of_it(
    odd: tuple[str, bytes, int], data: bytes
) -> None:
    request = parsed(data + odd[1])
    alone = parsed(data)

    assert alone is not None
    assert request is not None
    assert alone.fields.pairs == request.fields.pairs


@pytest.mark.parametrize(
    "data",
    [
        *(b"get", b"GET\t/", b"\r", b"\x16\x03\x01", b"A" * 25, b"-", b" ", b"G{", b"GET /\r\n"),
        *(b"GET / HTTP/1.2\n", b"GET a#b HTTP/1.1\r\n", b"TRACE / HTTP/1.1\r\n"),
    ],
)
def test_what_can_be_no_request_any_more_is_refused_before_its_head_ends(data: bytes) -> None:
    """Who speaks another protocol would wait for an answer until its time is up."""
    with pytest.raises(Refused):
        check_beginning(data)


@pytest.mark.parametrize("data", CONTROLS, ids=range(len(CONTROLS)))
def test_a_request_is_waited_for(data: bytes) -> None:
    for end in range(1, len(data) + 1):
        check_beginning(data[:end])


class TestTheEndOfAHead:
    def test_it_comes_with_the_blank_line(self) -> None:
        data = head(b"A: b")

        assert [0] * len(data) == [head_end(data[:n], 1000) for n in range(len(data))]
        assert len(data) == head_end(data + b"more\r\n\r\n", 1000)

    def test_a_long_head_is_refused_before_it_is_whole(self) -> None:
        data = b"GET / HTTP/1.1\r\nA: " + b"b" * 16384

        assert 0 == head_end(data[:16383], 16384)
        with pytest.raises(Refused) as refusal:
            head_end(data[:16384], 16384)
        assert 431 == refusal.value.status

    def test_a_head_of_just_the_limit_is_read(self) -> None:
        data = head(b"A: " + b"b" * 100)

        assert len(data) == head_end(data, len(data))
        with pytest.raises(Refused):
            head_end(data, len(data) - 1)


class TestWhatItSays:
    @pytest.mark.parametrize(
        ("host", "port", "authority"),
        [
            (b"Host: a.test", None, Authority("a.test", 80)),
            (b"Host: a.test", 8080, Authority("a.test", 8080)),
            (b"Host: A.TEST.:8080", 8080, Authority("a.test", 8080)),
            (b"Host: [2001:DB8::0:1]:8080", 8080, Authority("2001:db8::1", 8080)),
        ],
    )
    def test_the_authority(self, host: bytes, port: int | None, authority: Authority) -> None:
        assert authority == parse_request(head(host=host), port=port).authority

    def test_inside_tls_the_default_port_is_another(self) -> None:
        assert Authority("a.test", 443) == parse_request(head(), "https").authority

    def test_the_path_has_no_query(self) -> None:
        request = parse_request(head(start=b"GET /a/b?c=/d HTTP/1.1"))

        assert ("/a/b", "/a/b?c=/d") == (request.path, request.target)

    def test_an_absolute_target_becomes_a_path(self) -> None:
        request = parse_request(head(start=b"GET http://a.test?q HTTP/1.1"))

        assert request.is_absolute
        assert "/?q" == request.target

    def test_values_are_not_shown(self) -> None:
        request = parse_request(head(b"Authorization: Bearer hunter2"))

        assert "hunter2" not in repr(request)
        assert "Authorization" in repr(request)

    WEBSOCKET = (
        b"Connection: keep-alive, Upgrade",
        b"Upgrade: websocket",
        b"Sec-WebSocket-Version: 13",
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    )

    def test_a_websocket(self) -> None:
        assert parse_request(head(*self.WEBSOCKET)).upgrades

    @pytest.mark.parametrize("left_out", range(4))
    def test_no_websocket_with_something_left_out(self, left_out: int) -> None:
        lines = [line for i, line in enumerate(self.WEBSOCKET) if i != left_out]

        assert not parse_request(head(*lines)).upgrades

    @pytest.mark.parametrize("start", [b"POST / HTTP/1.1", b"GET / HTTP/1.0"])
    def test_no_websocket_of_another_request(self, start: bytes) -> None:
        assert not parse_request(head(*self.WEBSOCKET, start=start)).upgrades

    def test_no_websocket_with_a_body_or_twice_the_same(self) -> None:
        assert not parse_request(head(*self.WEBSOCKET, CL)).upgrades
        for twice in self.WEBSOCKET[1:]:
            assert not parse_request(head(*self.WEBSOCKET, twice)).upgrades

    def test_no_other_protocol(self) -> None:
        data = head(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAM")
        onward = http_onward.request(parse_request(data))

        assert not parse_request(data).upgrades
        assert b"h2c" not in onward
        assert b"HTTP2-Settings" not in onward


def test_header_lines_are_whole_and_only_so_many() -> None:
    assert 1 == len(parse_fields(b"a: 1\r\n").pairs)
    for cut in (b"a: 1", b"a: 1\r", b"a: 1\r\nb"):
        with pytest.raises(Refused) as refused:
            parse_fields(cut)
        assert 400 == refused.value.status
    assert MOST_FIELDS == len(parse_fields(b"a: 1\r\n" * MOST_FIELDS).pairs)
    with pytest.raises(Refused) as refused:
        parse_fields(b"a: 1\r\n" * (MOST_FIELDS + 1))
    assert 431 == refused.value.status
