"""Anything a client may say, however it is cut into pieces: what gets to a server is for the name, or nothing.

A real sandbox's end and a real server's, in one process: see `one_sandbox`.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence import NetworkLimits, NetworkPolicy
from ringfence.egress.dns.names import PROXY_V4
from ringfence.egress.tls.hello import client_hello
from tests.egress import smuggling
from tests.egress.hellos import alpn, message, of_this_library, records, sni
from tests.egress.one_sandbox import Scene

pytestmark = pytest.mark.anyone

RESOLVER = bytes([127, 0, 0, 53])
POLICY = NetworkPolicy(
    allowed_hosts=("a.test", "127.0.0.0/8"), limits=NetworkLimits(header_s=0.2, idle_s=5.0)
)


def said(port: int, pieces: list[bytes], *, to: bytes = b"") -> tuple[bytes, Scene]:
    scene = Scene(POLICY)
    try:
        return scene.say(port, pieces, to=to), scene
    finally:
        scene.close()


def cut(data: bytes, at: list[int]) -> list[bytes]:
    ends = sorted({end for end in at if end < len(data)} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def looks_like_http(heard: bytes) -> bool:
    """As the most lenient of servers reads it: blank lines first, any visible word as a method."""
    line = heard.lstrip(b"\r\n \t").partition(b"\n")[0]
    return bool(re.match(rb"[!-~]+[ \t]+.*HTTP/", line, re.DOTALL | re.IGNORECASE))


def is_for_the_name(heard: bytes) -> bool:
    hosts = re.findall(rb"(?im)^host[ \t]*:[ \t]*(.*?)[ \t]*\r?$", heard.partition(b"\r\n\r\n")[0])
    return len(hosts) == 1 and hosts[0].partition(b":")[0].lower() == b"a.test"


REQUESTS = [head for _, head, _ in smuggling.LENGTHS] + [
    b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n",
    b"GET http://evil.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a.test\r\nHost: evil.test\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 3\r\n\r\nabcGET / HTTP/1.1\r\nHost: evil.test\r\n\r\n",
    b"get / HTTP/1.1\r\nHost: evil.test\r\n\r\n",
    b"\r\n\r\nFOO / HTTP/1.1\r\nHost: evil.test\r\n\r\n",
    b"PROXY TCP4 192.0.2.1 192.0.2.2 1 80\r\nGET / HTTP/1.1\r\nHost: evil.test\r\n\r\n",
    b"CONNECT evil.test:443 HTTP/1.1\r\nHost: evil.test\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]
HELLOS = [
    of_this_library("a.test"),
    of_this_library("evil.test"),
    of_this_library(None),
    records(message(sni(b"a.test"), alpn(b"h2"))),
    records(message(sni(b"a.test", b"evil.test"))),
    records(message(sni(b"a.test"), (0xFE0D, b"x"))),
    records(message(sni(b"a.test")), 7),
    records(message(sni(b"A.TEST"))),
    records(message(sni(b"a.test\0.evil.test"))),
]


@st.composite
def talks(draw: st.DrawFn) -> bytes:
    """Something known, with a byte changed, something in front or behind; or just anything."""
    data = bytearray(
        draw(st.sampled_from([*REQUESTS, *HELLOS]) | st.binary(min_size=1, max_size=300))
    )
    if draw(st.booleans()):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    before = draw(st.sampled_from([b"", b"", b"", b"\r\n", b" ", b"\0", b"X", b"\x16", b"GET"]))
    return before + bytes(data)


CUTS = st.lists(st.integers(1, 400), max_size=6)
PORTS = st.sampled_from([80, 443, 8080, 8443, 22, 7])


@pytest.mark.full
@settings(deadline=None, max_examples=150)
@given(talks(), CUTS, PORTS)
def test_what_gets_to_the_server_is_for_the_name(data: bytes, cuts: list[int], port: int) -> None:
    heard, _ = said(port, cut(data, cuts))

    if 80 == port and heard:
        assert is_for_the_name(heard)
    if port in (443, 8443) and heard:
        hello = client_hello(heard)
        assert hello is not None
        assert "a.test" == hello.server_name
    if looks_like_http(heard):
        assert is_for_the_name(heard)
        assert b"evil.test" not in heard.partition(b"\r\n\r\n")[2]
    if heard[:2] == b"\x16\x03":
        hello = client_hello(heard)
        assert hello is not None
        assert ("a.test", False) == (hello.server_name, hello.is_encrypted)


TARGETS = st.sampled_from(
    [
        "a.test:80",
        "evil.test:80",
        "127.0.0.1:80",
        "2130706433:80",
        "127.1:80",
        "A.TEST.:80",
        "a.test@evil.test:80",
        "[::1]:80",
        "[::ffff:10.0.0.1]:80",
        "10.0.0.1:80",
        "a.test:0",
        "a.test:99999",
        "a.test",
        ":80",
    ]
)


@st.composite
def asked_of_a_proxy(draw: st.DrawFn) -> bytes:
    target = draw(TARGETS)
    host = target.rpartition(":")[0]
    name = host.encode()
    wishes = [
        f"CONNECT {target} HTTP/1.1\r\n\r\n".encode(),
        f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode(),
        f"GET http://{target}/ HTTP/1.1\r\nHost: {target}\r\n\r\n".encode(),
        b"\5\1\0\5\1\0\3" + bytes([len(name)]) + name + b"\0\x50",
        b"\5\1\0\5\1\0\1\x7f\0\0\1\0\x50",
        b"\5\1\0\5\1\0\1\x0a\0\0\1\0\x50",
    ]
    data = bytearray(draw(st.sampled_from(wishes)))
    if draw(st.booleans()):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data) + draw(talks())


@settings(deadline=None, max_examples=150)
@given(asked_of_a_proxy(), CUTS)
def test_a_proxy_s_client_gets_where_it_may(data: bytes, cuts: list[int]) -> None:
    heard, scene = said(3128, cut(data, cuts), to=PROXY_V4)

    assert all(address.startswith("127.") for address, _ in scene.dialled)
    events = [event for told in scene.told for event in told.get("events", ())]
    let_through = {event["host"] for event in events if event["allowed"]}
    assert let_through <= {"a.test", ""}
    if looks_like_http(heard) and let_through == {"a.test"}:
        assert is_for_the_name(heard)


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=200), CUTS)
def test_names_over_tcp_survive_anything(data: bytes, cuts: list[int]) -> None:
    heard, scene = said(53, cut(data, cuts) if data else [], to=RESOLVER)

    assert (b"", []) == (heard, scene.dialled)


@pytest.mark.parametrize(
    ("port", "data", "to"),
    [
        (80, b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n", b""),
        (8080, b"GET / HTTP/1.1\r\nHost: a.test:8080\r\n\r\n", b""),
        (443, HELLOS[0], b""),
        (8443, HELLOS[6], b""),
        (22, b"SSH-2.0-x\r\n", b""),
        (7, b"\0anything\xff", b""),
        (3128, b"CONNECT a.test:7 HTTP/1.1\r\n\r\nhello", PROXY_V4),
        (3128, b"GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n", PROXY_V4),
        (3128, b"\5\1\0\5\1\0\3\6a.test\0\7hello", PROXY_V4),
        (3128, b"\5\1\0\5\1\0\1\x7f\0\0\1\0\7hello", PROXY_V4),
    ],
)
def test_what_may_get_there_does(port: int, data: bytes, to: bytes) -> None:
    """The control of all of these."""
    for pieces in ([data], cut(data, list(range(1, len(data))))):
        heard, scene = said(port, pieces, to=to)
        assert heard
        assert 1 == len(scene.dialled)
        if not to and port in (443, 8443, 22, 7):
            assert data == heard
