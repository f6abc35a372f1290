"""Plain HTTP by name: the request must be for the name that was connected to, one at a time, read one way."""

from __future__ import annotations

import pytest

from ringfence import NetworkLimits, NetworkPolicy, NetworkRule, Sandbox
from tests.egress.inside.attempts import PROXY
from tests.egress.inside.conftest import MakeSandbox, attempt
from tests.egress.world import World

pytestmark = [pytest.mark.in_world, pytest.mark.anyone]

# What never ends is cut sooner than the tests lose their patience.
LIMITS = NetworkLimits(header_s=1.0)
POLICY = NetworkPolicy(allowed_hosts=("a.test", "b.test:80"), limits=LIMITS)
GET = "GET / HTTP/1.1\r\nHost: a.test\r\n"
POST = "POST / HTTP/1.1\r\nHost: a.test\r\n"
SMUGGLED = "GET /smuggled HTTP/1.1\r\nHost: evil.test\r\n\r\n"
_CHUNKED = "Transfer-Encoding: chunked\r\n"
_LENGTH = f"Content-Length: {len(SMUGGLED)}\r\n"

# Every one of them makes a lenient server see a request for /smuggled, or for evil.test.
SMUGGLING: dict[str, list[str]] = {
    "another host": ["GET /smuggled HTTP/1.1\r\nHost: evil.test\r\n\r\n"],
    "another host, another case": ["GET /smuggled HTTP/1.1\r\nhOST:evil.test\r\n\r\n"],
    "another allowed host": ["GET /smuggled HTTP/1.1\r\nHost: b.test\r\n\r\n"],
    "another port": ["GET /smuggled HTTP/1.1\r\nHost: a.test:8080\r\n\r\n"],
    "two hosts": ["GET /smuggled HTTP/1.1\r\nHost: a.test\r\nHost: evil.test\r\n\r\n"],
    "two hosts, the other way": [
        "GET /smuggled HTTP/1.1\r\nHost: evil.test\r\nHost: a.test\r\n\r\n"
    ],
    "two hosts, one folded": [
        "GET /smuggled HTTP/1.1\r\nX: y\r\n Host: a.test\r\nHost: evil.test\r\n\r\n"
    ],
    "two hosts, one with a space": [
        "GET /smuggled HTTP/1.1\r\nHost: a.test\r\nHost : evil.test\r\n\r\n"
    ],
    "no host": ["GET /smuggled HTTP/1.1\r\n\r\n"],
    "empty host": ["GET /smuggled HTTP/1.1\r\nHost:\r\n\r\n"],
    "user information": ["GET /smuggled HTTP/1.1\r\nHost: a.test@evil.test\r\n\r\n"],
    "a list of hosts": ["GET /smuggled HTTP/1.1\r\nHost: a.test, evil.test\r\n\r\n"],
    "host with a NUL": ["GET /smuggled HTTP/1.1\r\nHost: a.test\0.evil.test\r\n\r\n"],
    "absolute form": ["GET http://evil.test/smuggled HTTP/1.1\r\nHost: a.test\r\n\r\n"],
    "absolute form, user information": [
        "GET http://a.test@evil.test/smuggled HTTP/1.1\r\nHost: a.test\r\n\r\n"
    ],
    "absolute form, another scheme": ["GET ftp://a.test/smuggled HTTP/1.1\r\nHost: a.test\r\n\r\n"],
    "CONNECT to a server": ["CONNECT evil.test:443 HTTP/1.1\r\nHost: a.test\r\n\r\n"],
    "pipelined": [GET + "\r\n" + SMUGGLED],
    "pipelined, in pieces": [GET + "\r\n", SMUGGLED],
    "pipelined behind a body": [POST + "Content-Length: 5\r\n\r\nhello" + SMUGGLED],
    "pipelined behind chunks": [POST + _CHUNKED + "\r\n5\r\nhello\r\n0\r\n\r\n" + SMUGGLED],
    "both lengths": [POST + _LENGTH + _CHUNKED + "\r\n0\r\n\r\n" + SMUGGLED],
    "both lengths, the other way": [POST + _CHUNKED + _LENGTH + "\r\n0\r\n\r\n" + SMUGGLED],
    "two lengths": [POST + _LENGTH + "Content-Length: 0\r\n\r\n" + SMUGGLED],
    "two lengths, the other way": [POST + "Content-Length: 0\r\n" + _LENGTH + "\r\n" + SMUGGLED],
    "two encodings": [
        POST + "Transfer-Encoding: identity\r\n" + _CHUNKED + _LENGTH + "\r\n0\r\n\r\n" + SMUGGLED
    ],
    "a list of encodings": [
        POST + "Transfer-Encoding: identity, chunked\r\n" + _LENGTH + "\r\n0\r\n\r\n" + SMUGGLED
    ],
    "encoding with a space": [
        POST + "Transfer-Encoding : chunked\r\n" + _LENGTH + "\r\n0\r\n\r\n" + SMUGGLED
    ],
    "encoding with a tab": [
        POST + "Transfer-Encoding:\tchunked\r\n" + _LENGTH + "\r\n0\r\n\r\n" + SMUGGLED
    ],
    "encoding in capitals": [
        POST + "TRANSFER-ENCODING: CHUNKED\r\n" + _LENGTH + "\r\n0\r\n\r\n" + SMUGGLED
    ],
    "encoding with a letter in front": [
        POST + "Transfer-Encoding: xchunked\r\n" + _LENGTH + "\r\n0\r\n\r\n" + SMUGGLED
    ],
    "encoding, folded": [
        POST + "Transfer-Encoding:\r\n chunked\r\n" + _LENGTH + "\r\n0\r\n\r\n" + SMUGGLED
    ],
    "encoding behind a bare line feed": [
        POST + "X: y\nTransfer-Encoding: chunked\r\n" + _LENGTH + "\r\n0\r\n\r\n" + SMUGGLED
    ],
    "bare line feeds": [GET.replace("\r\n", "\n") + "\n" + SMUGGLED],
    "one bare line feed": [GET + "X: y\n\r\n" + SMUGGLED],
    "length with a sign": [POST + "Content-Length: +0\r\n\r\n" + SMUGGLED],
    "length of nothing": [POST + "Content-Length: \r\n\r\n" + SMUGGLED],
    "length with a point": [POST + "Content-Length: 0_0\r\n\r\n" + SMUGGLED],
    "chunk with an extension": [POST + _CHUNKED + "\r\n0;x=y\r\n\r\n" + SMUGGLED],
    "chunk with a bare line feed": [POST + _CHUNKED + "\r\n5\nhello\n0\n\n" + SMUGGLED],
    "chunk size with a sign": [POST + _CHUNKED + "\r\n+0\r\n\r\n" + SMUGGLED],
    "chunk size with 0x": [POST + _CHUNKED + "\r\n0x0\r\n\r\n" + SMUGGLED],
    "chunk without its end": [POST + _CHUNKED + "\r\n5\r\nhelloxx0\r\n\r\n" + SMUGGLED],
    "trailers": [POST + _CHUNKED + "\r\n0\r\nHost: evil.test\r\n\r\n" + SMUGGLED],
    "empty lines first": ["\r\n\r\n" + GET + "\r\n" + SMUGGLED],
    "a space first": [" " + GET + "\r\n" + SMUGGLED],
    "tabs in the first line": ["GET\t/smuggled\tHTTP/1.1\r\nHost: evil.test\r\n\r\n"],
    "two spaces in the first line": ["GET  /smuggled  HTTP/1.1\r\nHost: evil.test\r\n\r\n"],
    "HTTP/1.0 with keep-alive": [
        "GET / HTTP/1.0\r\nHost: a.test\r\nConnection: keep-alive\r\n\r\n" + SMUGGLED
    ],
    "HTTP/0.9": ["GET /smuggled\r\n"],
    "another version": ["GET /smuggled HTTP/3.1\r\nHost: evil.test\r\n\r\n"],
    "hop by hop": [GET + "Connection: host\r\n\r\n" + SMUGGLED],
    "an upgrade that is none": [
        GET + "Connection: upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: AAAA\r\n\r\n" + SMUGGLED
    ],
    "expecting 100": [
        POST + "Expect: 100-continue\r\n" + _CHUNKED + _LENGTH + "\r\n0\r\n\r\n" + SMUGGLED
    ],
}
# Real servers of the stricter kind, ours among them, take these for no request at all.
NOT_EVEN_LENIENT = {
    "two lengths, the other way",
    "HTTP/0.9",
    "chunk without its end",
    "an upgrade that is none",
    "HTTP/1.0 with keep-alive",
}


def smuggled(world: World, mark: tuple[int, int]) -> list[str]:
    """Requests that went where, or were what, no rule allows."""
    return [
        f"{event['method']} {event['target']} for {event['host']!r}"
        for event in world.left(mark, kind="request")
        if "smuggled" in event["target"]
        or "a.test" != event["host"]
        or "CONNECT" == event["method"]
    ]


@pytest.mark.parametrize("what", SMUGGLING)
def test_nothing_is_smuggled(limited: Sandbox, world: World, what: str) -> None:
    mark = world.mark()

    found = attempt(limited, "tcp", host="a.test", port=80, say=SMUGGLING[what], pause_s=0.05)

    assert "timeout" != found["error"], found
    assert [] == smuggled(world, mark)


@pytest.mark.full
@pytest.mark.parametrize("what", sorted(set(SMUGGLING) - NOT_EVEN_LENIENT))
def test_the_control_smuggles(unrestricted: Sandbox, world: World, what: str) -> None:
    mark = world.mark()

    # The server waits for more: so is only waited for what comes at once.
    say = SMUGGLING[what]
    attempt(unrestricted, "tcp", host="a.test", port=80, say=say, pause_s=0.05, patience_s=0.3)

    assert smuggled(world, mark)


@pytest.mark.parametrize("what", SMUGGLING)
def test_nothing_is_smuggled_through_the_proxy(limited: Sandbox, world: World, what: str) -> None:
    """The same, in the form that programs with a proxy variable send it."""
    first, *rest = SMUGGLING[what]
    mark = world.mark()

    absolute = first.replace(" /", " http://a.test/", 1)
    found = attempt(
        limited, "tcp", host=PROXY[0], port=PROXY[1], say=[absolute, *rest], pause_s=0.05
    )

    assert "timeout" != found["error"], found
    assert [] == smuggled(world, mark)


@pytest.mark.parametrize("what", SMUGGLING)
def test_nothing_is_smuggled_past_rules_of_method_and_path(
    make: MakeSandbox, world: World, what: str
) -> None:
    rule = NetworkRule("a.test", ports="80", methods=("GET", "POST"), paths=("/", "/public/*"))
    sandbox = make(network=NetworkPolicy(rules=(rule,), limits=LIMITS))
    mark = world.mark()

    attempt(sandbox, "tcp", host="a.test", port=80, say=SMUGGLING[what], pause_s=0.05)

    assert [] == smuggled(world, mark)


# -- methods and paths ------------------------------------------------------------------------------

PATHS = {
    "/public/x": True,
    "/public/": True,
    "/public/x?q=/../secret": True,
    "/exact": True,
    "/exact?q=1": True,
    "/": False,
    "/secret": False,
    "/exact/": False,
    "/exactly": False,
    "/public": False,
    "/public/../secret": False,
    "/public/./../secret": False,
    "/public/%2e%2e/secret": False,
    "/public/%2E./secret": False,
    "/public/..%2fsecret": False,
    "/public%2f..%2fsecret": False,
    "/public/%252e%252e/secret": False,
    "/public/..\\secret": False,
    "/public/%5c..%5csecret": False,
    "/public/..;/secret": False,
    "//secret": False,
    "/public//../secret": False,
    "/public/\0/secret": False,
    "/public/%00": False,
    "/public/%zz": False,
    "*": False,
}


@pytest.fixture(scope="module")
def by_path(world: World) -> object:
    from tests.egress.inside.conftest import new_sandbox

    rule = NetworkRule("a.test", ports="80", methods=("GET", "HEAD"), paths=("/public/*", "/exact"))
    with new_sandbox(world, network=NetworkPolicy(rules=(rule,), limits=LIMITS)) as sandbox:
        yield sandbox


@pytest.mark.parametrize("proxied", [False, True], ids=["transparent", "proxy"])
@pytest.mark.parametrize("path", PATHS)
def test_paths(by_path: Sandbox, world: World, path: str, proxied: bool) -> None:
    mark = world.mark()
    target = f"http://a.test{path}" if proxied else path
    say = [f"GET {target} HTTP/1.1\r\nHost: a.test\r\n\r\n"]
    host, port = PROXY if proxied else ("a.test", 80)

    found = attempt(by_path, "tcp", host=host, port=port, say=say)

    assert PATHS[path] == bool(world.left(mark, kind="request")), found
    assert PATHS[path] == (" 200 " in found["heard"][:20]), found


@pytest.mark.parametrize(
    ("method", "allowed"),
    [("GET", True), ("HEAD", True), ("POST", False), ("get", False), ("GETX", False)],
)
def test_methods(by_path: Sandbox, world: World, method: str, allowed: bool) -> None:
    mark = world.mark()
    say = [f"{method} /exact HTTP/1.1\r\nHost: a.test\r\n\r\n"]

    attempt(by_path, "tcp", host="a.test", port=80, say=say)

    assert allowed == bool(world.left(mark, kind="request"))


@pytest.mark.parametrize(
    "header",
    ["X-HTTP-Method-Override: DELETE", "X-Original-URL: /secret", "X-Rewrite-URL: /secret"],
)
def test_no_header_changes_what_was_judged(by_path: Sandbox, world: World, header: str) -> None:
    """Some servers take such a header for the method or the path."""
    mark = world.mark()
    say = [f"GET /exact HTTP/1.1\r\nHost: a.test\r\n{header}\r\n\r\n"]

    attempt(by_path, "tcp", host="a.test", port=80, say=say)

    name = header.partition(":")[0].lower()
    for event in world.left(mark, kind="request"):
        assert name not in [each.lower() for each, _ in event["headers"]]


# -- what must work ---------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["a.test", "A.TEST", "a.test:80"])
def test_a_request_for_the_name_goes_through(limited: Sandbox, host: str) -> None:
    say = [f"GET /x HTTP/1.1\r\nHost: {host}\r\n\r\n"]

    found = attempt(limited, "tcp", host="a.test", port=80, say=say)

    assert " 200 " in found["heard"][:20], found


@pytest.mark.parametrize("size", [0, 1, 70_000, 3_000_000])
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
def test_bodies_arrive_whole(limited: Sandbox, world: World, size: int, chunked: bool) -> None:
    mark = world.mark()
    limited.files.write("/tmp/body", b"x" * size)
    coding = ["-H", "Transfer-Encoding: chunked"] if chunked else []

    argv = ["curl", "-sS", "-f", "--data-binary", "@/tmp/body", *coding, "http://a.test/up"]
    result = limited.exec(argv, timeout_s=20)

    assert result.ok, result.stderr_text
    (seen,) = world.left(mark, kind="request")
    assert (size, "POST") == (seen["body_bytes"], seen["method"])


def test_answers_arrive_whole(limited: Sandbox) -> None:
    size = 20_000_000
    argv = ["sh", "-c", f"curl -sS http://a.test/bytes/{size} | wc -c"]

    assert str(size) == limited.exec(argv, timeout_s=20).stdout_text.strip()


def test_several_requests_each_on_a_connection_of_its_own(limited: Sandbox, world: World) -> None:
    mark = world.mark()
    argv = ["curl", "-sS", "-f", *(f"http://a.test/{n}" for n in range(3))]

    assert limited.exec(argv, timeout_s=20).ok

    requests = world.left(mark, kind="request")
    assert ["/0", "/1", "/2"] == [event["target"] for event in requests]
    assert 3 == len({event["connection"] for event in requests})


def test_a_web_socket_carries_bytes_both_ways(limited: Sandbox) -> None:
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    script = f"""
import socket
with socket.create_connection(("a.test", 80), 5) as sock:
    stream = sock.makefile("rb")
    sock.sendall({(GET + upgrade + key).encode()!r})
    print(stream.readline().decode().strip())
    while stream.readline().strip():
        pass
    for word in (b"one\\n", b"\\x81\\x03two\\n"):
        sock.sendall(word)
        print(stream.readline() == word)
"""
    result = limited.exec(["python3", "-c", script], timeout_s=10)

    assert "HTTP/1.1 101 Switching Protocols\nTrue\nTrue\n" == result.stdout_text, (
        result.stderr_text
    )


# -- heads that are too large, too many or too slow ---------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        GET + f"X: {'y' * 20_000}\r\n\r\n",
        GET + "X: y\r\n" * 4000 + "\r\n",
        f"GET /{'y' * 20_000} HTTP/1.1\r\nHost: a.test\r\n\r\n",
        f"{'G' * 20_000} / HTTP/1.1\r\nHost: a.test\r\n\r\n",
    ],
    ids=["one header", "many headers", "target", "method"],
)
def test_a_head_that_is_too_large_is_cut(limited: Sandbox, world: World, head: str) -> None:
    mark = world.mark()

    found = attempt(limited, "tcp", host="a.test", port=80, say=[head])

    assert "timeout" != found["error"]
    assert [] == world.left(mark, kind="request")


def test_the_control_has_more_room_and_more_time(make: MakeSandbox) -> None:
    """It is the limits that cut those above and below."""
    limits = NetworkLimits(header_bytes=65_536, header_s=30.0)
    sandbox = make(network=NetworkPolicy(allowed_hosts=("a.test",), limits=limits))
    large = GET + f"Connection: close\r\nX: {'y' * 20_000}\r\n\r\n"
    dribble = list(GET + "Connection: close\r\n\r\n")

    for say, pause_s in (([large], 0.0), (dribble, 0.02)):
        found = attempt(sandbox, "tcp", host="a.test", port=80, say=say, pause_s=pause_s)
        assert " 200 " in found["heard"][:20], found


@pytest.mark.parametrize("host", ["a.test", PROXY[0]], ids=["transparent", "proxy"])
def test_a_head_that_dribbles_is_cut(make: MakeSandbox, world: World, host: str) -> None:
    policy = NetworkPolicy(allowed_hosts=("a.test",), limits=NetworkLimits(header_s=0.5))
    sandbox = make(network=policy)
    mark = world.mark()
    port = 80 if "a.test" == host else PROXY[1]
    dribble = list(f"GET http://a.test/ HTTP/1.1\r\nX: {'y' * 40}")

    found = attempt(sandbox, "tcp", host=host, port=port, say=dribble, pause_s=0.05)

    assert "timeout" != found["error"]
    assert [] == world.left(mark, kind="request")


@pytest.mark.parametrize("port", [80, 443])
def test_silence_is_cut(make: MakeSandbox, port: int) -> None:
    policy = NetworkPolicy(allowed_hosts=("a.test",), limits=NetworkLimits(header_s=0.5))

    found = attempt(make(network=policy), "tcp", host="a.test", port=port)

    assert "timeout" != found["error"]


@pytest.mark.parametrize("port", [80, 8080])
def test_http_2_without_tls_is_cut(limited: Sandbox, world: World, port: int) -> None:
    mark = world.mark()
    say = ["PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + "\0\0\0\4\0\0\0\0\0"]

    found = attempt(limited, "tcp", host="a.test", port=port, say=say)

    assert "timeout" != found["error"]
    assert [] == world.left(mark, kind="request")


@pytest.mark.parametrize(
    "say", ["SSH-2.0-x\r\n", "EHLO me\r\n", "quit", "\x16\x03\x01\0\5\1\0\0\1x", "\0\0\0\0"]
)
def test_port_80_takes_nothing_but_http(limited: Sandbox, world: World, say: str) -> None:
    mark = world.mark()

    found = attempt(limited, "tcp", host="a.test", port=80, say=[say])

    assert "timeout" != found["error"]
    assert [] == world.left(mark, kind="request")


def test_requests_on_any_other_port_are_read_too(limited: Sandbox, world: World) -> None:
    """What begins as HTTP is HTTP, wherever it goes."""
    mark = world.mark()

    say = ["GET /smuggled HTTP/1.1\r\nHost: evil.test\r\n\r\n"]
    attempt(limited, "tcp", host="a.test", port=8080, say=say)
    allowed = attempt(
        limited,
        "tcp",
        host="a.test",
        port=8080,
        say=[GET.replace("a.test", "a.test:8080") + "\r\n"],
    )

    assert [] == [e for e in world.left(mark, kind="request") if "a.test:8080" != e["host"]]
    assert " 200 " in allowed["heard"][:20], allowed
