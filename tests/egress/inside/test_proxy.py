"""Programs that know of the proxy get no further by it than others."""

from __future__ import annotations

import pytest

from ringfence import Sandbox
from tests.egress.inside.attempts import PROXY
from tests.egress.inside.conftest import MakeSandbox, attempt
from tests.egress.world import World, places

pytestmark = [pytest.mark.anyone, pytest.mark.in_world]

POLICY = ("a.test", "b.test:443", "loopback.test", "metadata.test", f"{places.OTHER_V4}:80")
CONNECTS = {
    "an address of an allowed name": f"{places.WEB_V4}:443",
    "an address, v6": f"[{places.WEB_V6}]:443",
    "an address, mapped": f"[::ffff:{places.WEB_V4}]:443",
    "an address, decimal": f"{0xCB00710A}:443",
    "an address, hexadecimal": "0xcb00710a:443",
    "an address, short": "203.28938:443",
    "metadata": "169.254.169.254:80",
    "loopback": f"127.0.0.1:{places.HOST_PORT}",
    "loopback, v6": f"[::1]:{places.HOST_PORT}",
    "loopback, unspecified": f"0.0.0.0:{places.HOST_PORT}",
    "localhost": f"localhost:{places.HOST_PORT}",
    "a name for loopback": f"loopback.test:{places.HOST_PORT}",
    "a name for metadata": "metadata.test:80",
    "the host": f"{places.HOST_V4}:{places.HOST_PORT_EVERYWHERE}",
    "another name": "evil.test:443",
    "a longer name": "www.a.test:443",
    "a port that no rule names": "b.test:8080",
    "the proxy itself": "198.18.0.1:3128",
    "no port": "a.test",
    "port 0": "a.test:0",
    "a port too large": "a.test:65979",
    "a port with a sign": "a.test:+443",
    "user information": "a.test@evil.test:443",
    "NUL": "a.test\0.evil.test:443",
    "NUL, encoded": "a.test%00.evil.test:443",
    "a path": "a.test:443/",
    "a space": "a.test :443",
    "a line": "a.test:443 HTTP/1.1\r\nHost: evil.test\r\nX:",
    "a URL": "https://a.test:443",
    "letters of another script": "\xe0\xb0.test:443",
    "an address in a rule, another port": f"{places.OTHER_V4}:443",
}


@pytest.mark.parametrize("what", CONNECTS)
def test_connect_goes_nowhere_else(limited: Sandbox, world: World, what: str) -> None:
    target, mark = CONNECTS[what], world.mark()
    say = [f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n"]

    found = attempt(limited, "tcp", host=PROXY[0], port=PROXY[1], say=say)

    assert "timeout" != found["error"]
    assert " 200" not in found["heard"].partition("\r\n")[0], found
    assert found["heard"].startswith("HTTP/1.1 4") or found["heard"].startswith("HTTP/1.1 5")
    assert [] == [event for event in world.left(mark) if "dns" != event["kind"]]


def test_a_refusal_says_why_in_words(limited: Sandbox) -> None:
    say = ["CONNECT evil.test:443 HTTP/1.1\r\nHost: evil.test:443\r\n\r\n"]

    heard = attempt(limited, "tcp", host=PROXY[0], port=PROXY[1], say=say)["heard"]

    assert heard.startswith("HTTP/1.1 403 ")
    assert "evil.test" in heard.partition("\r\n\r\n")[2]


@pytest.mark.parametrize("target", ["a.test:443", "A.Test:443", "a.test.:443", "b.test:443"])
def test_connect_goes_to_an_allowed_name(limited: Sandbox, target: str) -> None:
    name = target.lower().partition(":")[0].removesuffix(".")

    found = attempt(limited, "tls", host=name, sni=name, connect=target)

    assert "200" in found["heard"][:20], found


@pytest.mark.parametrize("first", ["GET / HTTP/1.1\r\nHost: a.test\r\n\r\n", "SSH-2.0-x\r\n"])
def test_connect_to_a_tls_port_carries_nothing_but_tls(
    limited: Sandbox, world: World, first: str
) -> None:
    mark = world.mark()
    say = ["CONNECT a.test:443 HTTP/1.1\r\nHost: a.test:443\r\n\r\n", first]

    found = attempt(limited, "tcp", host=PROXY[0], port=PROXY[1], say=say, pause_s=0.1)

    assert "timeout" != found["error"]
    assert [] == world.left(mark, kind="request")
    assert "Said" not in found["heard"]


def test_what_is_said_behind_connect_is_read_like_any_other(limited: Sandbox, world: World) -> None:
    """In one piece with the request, before any answer."""
    mark = world.mark()
    behind = "GET /smuggled HTTP/1.1\r\nHost: evil.test\r\n\r\n"
    say = ["CONNECT a.test:80 HTTP/1.1\r\nHost: a.test:80\r\n\r\n" + behind]

    attempt(limited, "tcp", host=PROXY[0], port=PROXY[1], say=say)

    assert [] == world.left(mark, kind="request")


URLS = {
    "another host": "http://evil.test/",
    "an address": f"http://{places.WEB_V4}/",
    "metadata": f"http://{places.METADATA_V4}/",
    "loopback": f"http://127.0.0.1:{places.HOST_PORT}/",
    "the port of TLS, plainly": "http://b.test:443/",
    "a port that no rule names": "http://b.test:8080/",
    "user information": "http://a.test@evil.test/",
    "another scheme": "https://a.test/",
    "a file": "file:///etc/passwd",
    "no host": "http:///",
    "only a path": "/",
}


@pytest.mark.parametrize("what", URLS)
def test_a_url_goes_nowhere_else(limited: Sandbox, world: World, what: str) -> None:
    mark = world.mark()
    say = [f"GET {URLS[what]} HTTP/1.1\r\nHost: a.test\r\n\r\n"]

    found = attempt(limited, "tcp", host=PROXY[0], port=PROXY[1], say=say)

    assert "timeout" != found["error"]
    assert " 200 " not in found["heard"][:20]
    assert [] == [event for event in world.left(mark) if "dns" != event["kind"]]


@pytest.mark.parametrize(
    "url", ["http://a.test/", "http://A.Test:8080/x", f"http://{places.OTHER_V4}/"]
)
def test_a_url_of_an_allowed_host_is_fetched(limited: Sandbox, world: World, url: str) -> None:
    mark = world.mark()
    say = [
        f"GET {url} HTTP/1.1\r\nHost: {url.split('/')[2]}\r\nProxy-Connection: keep-alive\r\n\r\n"
    ]

    found = attempt(limited, "tcp", host=PROXY[0], port=PROXY[1], say=say)

    assert " 200 " in found["heard"][:20], found
    (seen,) = world.left(mark, kind="request")
    assert seen["target"].startswith("/")
    assert not [name for name, _ in seen["headers"] if name.lower().startswith("proxy-")]


# -- SOCKS ----------------------------------------------------------------------------------------

NOT_ALLOWED, REFUSED_KINDS = 2, (1, 2, 4, 5, 7, 8)
V4, NAME, V6 = 1, 3, 4
SOCKS = {
    "an address": (places.WEB_V4, 80, V4, 1),
    "an address, v6": (places.WEB_V6, 80, V6, 1),
    "an address, mapped": (f"::ffff:{places.WEB_V4}", 80, V6, 1),
    "an address as a name": (places.WEB_V4, 80, NAME, 1),
    "an address as a decimal name": (str(0xCB00710A), 80, NAME, 1),
    "an address, v6, as a name": (f"[{places.WEB_V6}]", 80, NAME, 1),
    "loopback": ("127.0.0.1", places.HOST_PORT, V4, 1),
    "loopback, v6": ("::1", places.HOST_PORT, V6, 1),
    "loopback by name": ("loopback.test", places.HOST_PORT, NAME, 1),
    "metadata": (places.METADATA_V4, 80, V4, 1),
    "metadata by name": ("metadata.test", 80, NAME, 1),
    "another name": ("evil.test", 80, NAME, 1),
    "a longer name": ("www.a.test", 80, NAME, 1),
    "NUL, allowed name first": ("a.test\0.evil.test", 80, NAME, 1),
    "NUL, allowed name last": ("evil.test\0a.test", 80, NAME, 1),
    "a space": ("a.test ", 80, NAME, 1),
    "an empty name": ("", 80, NAME, 1),
    "a port that no rule names": ("b.test", 80, NAME, 1),
    "bind": ("a.test", 80, NAME, 2),
    "datagrams": ("a.test", 443, NAME, 3),
    "another command": ("a.test", 80, NAME, 9),
    "an address in a rule, another port": (places.OTHER_V4, 443, V4, 1),
}


@pytest.mark.parametrize("what", SOCKS)
def test_socks_goes_nowhere_else(limited: Sandbox, world: World, what: str) -> None:
    address, port, kind, command = SOCKS[what]
    mark = world.mark()

    found = attempt(limited, "socks", address=address, port=port, kind=kind, command=command)

    assert "timeout" != found["error"]
    assert not found["reply"] or found["reply"][1] in REFUSED_KINDS, found
    assert [] == [event for event in world.left(mark) if "dns" != event["kind"]]


@pytest.mark.parametrize(
    ("address", "kind"), [("a.test", NAME), ("A.tEST", NAME), (places.OTHER_V4, V4)]
)
def test_socks_goes_where_a_rule_allows(limited: Sandbox, address: str, kind: int) -> None:
    say = f"GET / HTTP/1.1\r\nHost: {address}\r\n\r\n"

    found = attempt(limited, "socks", address=address, port=80, kind=kind, say=say, until=" 200 ")

    assert [5, 0] == found["reply"][:2], found
    assert " 200 " in found["heard"][:20]


@pytest.mark.full
@pytest.mark.parametrize(
    "say",
    [
        ["\x05\x00"],  # no method at all
        ["\x05\x01\x02"],  # only with a password
        ["\x04\x01\x00\x50\x00\x00\x00\x01x\x00a.test\x00"],  # SOCKS 4a
        ["\x05\x01\x00", "\x05\x01\x00\x03\xffshort"],
        ["\x05\x01\x00", "\x04\x01\x00\x03\x06a.test\x00\x50"],
        ["\x05\x01\x00", "\x05\x01\x00\x07\x06a.test\x00\x50"],
        ["\x05\xff" + "\x00" * 300],
    ],
)
def test_socks_that_is_none_is_cut(make: MakeSandbox, world: World, say: list[str]) -> None:
    from ringfence import NetworkLimits, NetworkPolicy

    policy = NetworkPolicy(allowed_hosts=("a.test",), limits=NetworkLimits(header_s=0.5))
    mark = world.mark()

    sandbox = make(network=policy)
    found = attempt(sandbox, "tcp", host=PROXY[0], port=PROXY[1], say=say, pause_s=0.1)

    assert "timeout" != found["error"]
    assert [] == world.left(mark)


def test_the_proxy_is_nowhere_without_a_policy(make: MakeSandbox) -> None:
    """The control of the address: where nothing is allowed, nobody is there."""
    found = attempt(make(network="none"), "tcp", host=PROXY[0], port=PROXY[1])

    assert not found["connected"]
