"""The resolver inside: it answers names that a rule allows, and nothing of what is asked ever leaves."""

from __future__ import annotations

import ipaddress

import pytest

from ringfence import Sandbox
from tests.egress.inside.attempts import RESOLVER
from tests.egress.inside.conftest import attempt
from tests.egress.world import World, places

pytestmark = [pytest.mark.in_world, pytest.mark.anyone]

POLICY = ("a.test", "*.wild.test:443", "v4.test:80,443", "!no.wild.test", "slow.test", "nx.test")
NO_ERROR, FORMAT_ERROR, NO_SUCH_NAME = 0, 1, 3
A, NS, CNAME, MX, TXT, AAAA, SRV, SVCB, HTTPS, ANY = 1, 2, 5, 15, 16, 28, 33, 64, 65, 255
SYNTHETIC = [ipaddress.ip_network(net) for net in ("198.18.0.0/15", "2001:2::/48")]

REFUSED = {
    "another name": "evil.test",
    "a longer name": "nota.test",
    "a prefix": "a.test.evil.test",
    "below an exact rule": "www.a.test",
    "the parent of a wildcard": "wild.test",
    "a denied name below a wildcard": "no.wild.test",
    "a tunnel": "6d79207365637265742074657874.tunnel.test",
    "below an allowed name": "6d79207365637265742074657874.a.test",
    "a search suffix": "a.test.localdomain",
    "a top-level domain": "test",
    "the root": ".",
    "a service": "_http._tcp.a.test",
    "reverse": "10.113.0.203.in-addr.arpa",
}


@pytest.mark.parametrize("over", ["udp", "tcp"])
@pytest.mark.parametrize("type", [A, AAAA, TXT, MX, SRV, HTTPS, ANY])
@pytest.mark.parametrize("kind", REFUSED)
def test_a_name_that_no_rule_allows_does_not_exist(
    limited: Sandbox, world: World, kind: str, type: int, over: str
) -> None:
    mark = world.mark()

    found = attempt(limited, "dns", name=REFUSED[kind], type=type, over=over)

    assert (NO_SUCH_NAME, 0) == (found["rcode"], found["answers"])
    assert [] == world.left(mark)


@pytest.mark.parametrize("over", ["udp", "tcp"])
@pytest.mark.parametrize("kind", ["another name", "a tunnel", "a prefix"])
def test_the_control_asks_the_world(
    unrestricted: Sandbox, world: World, kind: str, over: str
) -> None:
    mark = world.mark()

    name = REFUSED[kind]
    found = attempt(unrestricted, "dns", name=name, server=places.DNS_V4, over=over)

    assert NO_ERROR == found["rcode"]
    assert world.left(mark, kind="dns", name=name, over=over)


@pytest.mark.parametrize("over", ["udp", "tcp"])
@pytest.mark.parametrize(
    "name", ["a.test", "A.TeSt", "a.test.", "x.wild.test", "secret.x.wild.test"]
)
def test_an_allowed_name_has_an_address_of_ours(
    limited: Sandbox, world: World, name: str, over: str
) -> None:
    """Also where the name would be looked up outside, nothing is sent for a question alone."""
    mark = world.mark()

    for type, family in ((A, 4), (AAAA, 6)):
        found = attempt(limited, "dns", name=name, type=type, over=over)
        assert (NO_ERROR, 1) == (found["rcode"], found["answers"]), found
        size = {4: 4, 6: 16}[family]
        packed = found["heard"].encode("latin-1")[-size:]
        if found["heard"].encode("latin-1").rfind(packed) + size == len(found["heard"]):
            address = ipaddress.ip_address(packed)
            assert any(address in net for net in SYNTHETIC if net.version == family), address
    assert [] == world.left(mark)


@pytest.mark.parametrize("type", [NS, CNAME, MX, TXT, SRV, SVCB, HTTPS])
def test_other_records_of_an_allowed_name_are_empty(
    limited: Sandbox, world: World, type: int
) -> None:
    """An HTTPS record would announce ECH and HTTP/3; TXT would carry data."""
    mark = world.mark()

    found = attempt(limited, "dns", name="a.test", type=type)

    assert (NO_ERROR, 0) == (found["rcode"], found["answers"])
    assert [] == world.left(mark)


def test_the_question_comes_back_as_it_was_spelled(limited: Sandbox) -> None:
    """Resolvers that vary the case of letters take nothing else for an answer."""
    found = attempt(limited, "dns", name="A.tEsT")

    assert "\x01A\x04tEsT\x00" in found["heard"]


def test_programs_resolve_only_what_is_allowed(limited: Sandbox) -> None:
    assert attempt(limited, "resolve", name="a.test")["addresses"]
    assert attempt(limited, "resolve", name="x.wild.test")["addresses"]
    for name in ("evil.test", "wild.test", "evil.test\0a.test", "filed.test"):
        assert [] == attempt(limited, "resolve", name=name)["addresses"], name


@pytest.mark.parametrize("name", ["localhost", "x.localhost"])
def test_localhost_is_the_sandboxs_own(limited: Sandbox, name: str) -> None:
    found = attempt(limited, "resolve", name=name)["addresses"]

    assert set(found) <= {"127.0.0.1", "::1"}


OTHER_SERVERS = {
    "the host's": places.DNS_V4,
    "a public one": "8.8.8.8",
    "a public one, v6": places.OTHER_V6,
    "the loopback's": "127.0.0.1",
    "at an allowed address": places.WEB_V4,
}


@pytest.mark.parametrize("over", ["udp", "tcp"])
@pytest.mark.parametrize("server", OTHER_SERVERS)
def test_no_other_server_is_asked(limited: Sandbox, world: World, server: str, over: str) -> None:
    mark = world.mark()

    found = attempt(limited, "dns", name="a.test", server=OTHER_SERVERS[server], over=over)

    assert found["rcode"] is None
    assert "timeout" != found["error"]
    assert [] == world.left(mark)


@pytest.mark.parametrize("over", ["udp", "tcp"])
@pytest.mark.parametrize("server", ["the host's", "a public one", "a public one, v6"])
def test_the_control_asks_another_server(
    unrestricted: Sandbox, world: World, server: str, over: str
) -> None:
    found = attempt(unrestricted, "dns", name="a.test", server=OTHER_SERVERS[server], over=over)

    assert NO_ERROR == found["rcode"], found


HEADER = "\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00"
BROKEN = {
    "empty": "\0",
    "half a header": HEADER[:7],
    "no question": HEADER[:5] + "\x00" + HEADER[6:],
    "two questions": HEADER[:5] + "\x02" + HEADER[6:] + "\1a\4test\0\0\1\0\1" * 2,
    "label too long": HEADER + "\x3f" + "a" * 20,
    "name without end": HEADER + "\1a\4test",
    "pointer to itself": HEADER + "\xc0\x0c\0\1\0\1",
    "pointer loop": HEADER + "\1a\xc0\x0c\0\1\0\1",
    "pointer forward": HEADER + "\xc0\xff\0\1\0\1",
    "reserved label": HEADER + "\x80a\0\0\1\0\1",
    "NUL within a label": HEADER + "\x07a\0evil.\4test\0\0\1\0\1",
    "dot within a label": HEADER + "\x06a.test\0\0\1\0\1",
    "NUL at the end": HEADER + "\1a\5test\0\0\0\1\0\1",
    "space": HEADER + "\2a \4test\0\0\1\0\1",
    "another class": HEADER + "\1a\4test\0\0\1\0\3",
    "an answer": HEADER[:2] + "\x81\x80" + HEADER[4:] + "\1a\4test\0\0\1\0\1",
    "an update": HEADER[:2] + "\x28\0" + HEADER[4:] + "\1a\4test\0\0\6\0\1",
    "a zone transfer": HEADER + "\1a\4test\0\0\xfc\0\1",
    "bytes behind": HEADER + "\1a\4test\0\0\1\0\1" + "x" * 300,
}


@pytest.mark.full
@pytest.mark.parametrize("over", ["udp", "tcp"])
@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_question_gets_no_address(
    limited: Sandbox, world: World, broken: str, over: str
) -> None:
    mark = world.mark()

    # Silence is an answer to what is no question: not waited for as long as for a real one.
    found = attempt(limited, "dns", name="", raw=BROKEN[broken], over=over, patience_s=2.0)

    if broken not in ("bytes behind", "NUL at the end"):
        assert 0 == found["answers"], found
    assert [] == world.left(mark)
    # And whoever asks rightly is answered as before.
    assert 1 == attempt(limited, "dns", name="a.test", server=RESOLVER, over=over)["answers"]


def test_a_name_that_does_not_exist_outside_is_refused_when_it_is_used(
    limited: Sandbox, world: World
) -> None:
    say = ["GET / HTTP/1.1\r\nHost: nx.test\r\n\r\n"]
    found = attempt(limited, "tcp", host="nx.test", port=80, say=say)

    assert " 200 " not in found["heard"]
    assert "timeout" != found["error"]


def test_a_slow_resolver_holds_up_nobody_else(limited: Sandbox, world: World) -> None:
    slow = limited.start(["curl", "-s", "-m", "10", "http://slow.test/"])
    assert world.internet.wait(kind="dns", name="slow.test")

    quick = limited.exec(["curl", "-sS", "-f", "http://a.test/"], timeout_s=10)

    assert quick.ok
    assert slow.running
    assert slow.wait(timeout_s=10).ok
