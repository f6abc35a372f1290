"""What gets through the egress process, and what does not: each refusal beside what is let through."""

from __future__ import annotations

import pytest

from ringfence.egress.host.client import Egress
from tests.egress.inside.attempts import AT_ONCE_S
from tests.egress.inside.conftest import attempt
from tests.egress.inside.process.clients import Client
from tests.egress.inside.process.conftest import MakeBox
from tests.egress.world import World, places

pytestmark = [pytest.mark.in_world, pytest.mark.anyone, pytest.mark.full]


def request(host: str, path: str = "/", method: str = "GET") -> str:
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"


def test_a_name_is_reached_and_another_is_not(world: World, box: MakeBox) -> None:
    sandbox = box("a.test")
    mark = world.internet.mark()

    assert (
        '"host": "a.test"'
        in attempt(sandbox, "tcp", host="a.test", port=80, say=[request("a.test")])["heard"]
    )
    refused = attempt(sandbox, "tcp", host="b.test", port=80, say=[request("b.test")])

    assert "NONAME" == refused["error"]
    assert {"a.test"} == {event["name"] for event in world.internet.seen(mark, kind="dns")}


@pytest.mark.parametrize("version", ["v4", "v6"])
def test_servers_of_either_version_through_addresses_of_either(box: MakeBox, version: str) -> None:
    sandbox = box(f"{version}.test")
    for address in attempt(sandbox, "resolve", name=f"{version}.test")["addresses"]:
        found = attempt(sandbox, "tcp", host=address, port=80, say=[request(f"{version}.test")])
        assert " 200 " in found["heard"], address


def test_who_speaks_first_does_not_matter(box: MakeBox) -> None:
    sandbox = box("ssh.test:22", "echo.test:7")

    banner = attempt(
        sandbox, "tcp", host="ssh.test", port=places.BANNER, say=["SSH-2.0-x\r\n"], until="SSH-2.0-"
    )
    echo = attempt(sandbox, "tcp", host="echo.test", port=places.ECHO, say=["hello"], until="hello")

    assert banner["heard"].startswith("SSH-2.0-")
    assert "hello" == echo["heard"]


@pytest.mark.parametrize("port", [80, 443])
def test_a_server_may_speak_first_where_tls_or_http_is_usual(box: MakeBox, port: int) -> None:
    """Nobody mistakes it for either. A client may wait for it; on a port for TLS it need not."""
    sandbox = box("early.test")

    for say in [["", "hello\r\n"]] if port == 80 else [["", "hello\r\n"], ["SSH-2.0-x\r\n"]]:
        found = attempt(sandbox, "tcp", host="early.test", port=port, say=say, pause_s=1.0)
        assert found["heard"].startswith("SSH-2.0-")
        assert found["heard"].endswith(f"you said {say[-1]}")


@pytest.mark.parametrize(("port", "scheme"), [(80, "http"), (443, "tls")])
def test_after_it_has_spoken_there_is_neither(box: MakeBox, port: int, scheme: str) -> None:
    """Nor does a client that was slow lose anything where the server does not speak first."""
    early, usual = box("early.test"), box("a.test")
    say = {"http": request("a.test"), "tls": "\x16\x03\x01\0\x05"}[scheme]

    cut = attempt(early, "tcp", host="early.test", port=port, say=["", say], pause_s=1.0)
    assert cut["heard"].startswith("SSH-2.0-")
    assert "ECONNRESET" == cut["error"]
    if scheme == "http":
        slow = attempt(usual, "tcp", host="a.test", port=port, say=["", say], pause_s=1.0)
        assert " 200 " in slow["heard"]


@pytest.mark.parametrize(
    "say", [["G", "o on"], ["hel", "lo\n", "GET / HTTP/1.1\r\n"], ["\r\n", "\x16\x03"]]
)
def test_text_that_is_not_http_goes_through_however_it_comes(box: MakeBox, say: list[str]) -> None:
    sandbox = box("echo.test:7")

    found = attempt(
        sandbox, "tcp", host="echo.test", port=7, say=say, pause_s=0.05, until="".join(say)
    )

    assert "".join(say) == found["heard"]


@pytest.mark.parametrize(
    "say",
    [
        ["get / HTTP/1.1\r\nHost: evil.test\r\n\r\n"],
        ["\r\nGET / HTTP/1.1\r\nHost: evil.test\r\n\r\n"],
        ["BREW", " / HTTP/1.1\r\n", "Host: evil.test\r\n\r\n"],
        ["PROXY TCP4 192.0.2.1 192.0.2.2 1 80\r\n", "GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n"],
    ],
)
def test_what_a_lenient_server_takes_for_http_does_not_get_there(
    world: World, box: MakeBox, say: list[str]
) -> None:
    sandbox = box("a.test:7", "a.test:8080")
    mark = world.internet.mark()

    found = attempt(sandbox, "tcp", host="a.test", port=8080, say=say, pause_s=0.05)

    assert "ECONNRESET" == found["error"]
    assert [] == world.internet.seen(mark, kind="request")


@pytest.mark.parametrize("port", [80, 8080])
def test_http_for_another_host_is_told_why(world: World, box: MakeBox, port: int) -> None:
    sandbox = box("a.test")
    mark = world.internet.mark()

    found = attempt(sandbox, "tcp", host="a.test", port=port, say=[request("evil.test")])

    assert found["heard"].startswith("HTTP/1.1 403 ")
    assert [] == world.internet.seen(mark, kind="request")


@pytest.mark.parametrize("port", [443, 8443])
def test_tls_is_for_the_name_or_for_nobody(box: MakeBox, port: int) -> None:
    sandbox = box("a.test", "b.test")

    assert attempt(sandbox, "hello", host="a.test", port=port, sni="a.test")["answered"]
    assert attempt(sandbox, "hello", host="a.test", port=port, sni="a.test", pieces=7, records=3)[
        "answered"
    ]
    for sni, change in (("b.test", ""), (None, ""), ("a.test", "ech"), ("a.test", "second-sni")):
        found = attempt(sandbox, "hello", host="a.test", port=port, sni=sni, change=change)
        assert not found["answered"], (sni, change)
        assert "ECONNRESET" == found["error"]


def test_a_port_for_tls_takes_nothing_else(box: MakeBox, world: World) -> None:
    sandbox = box("a.test")
    mark = world.internet.mark()

    for say in (request("a.test"), "hello\n", "\0\0\0\x08"):
        assert "ECONNRESET" == attempt(sandbox, "tcp", host="a.test", port=443, say=[say])["error"]

    assert [] == world.internet.seen(mark, kind="connection")


def test_an_address_is_reached_by_a_rule_about_addresses(box: MakeBox) -> None:
    sandbox = box(f"{places.WEB_V4}:80")

    found = attempt(sandbox, "tcp", host=places.WEB_V4, port=80, say=[request("whatever.test")])
    other_port = attempt(sandbox, "tcp", host=places.WEB_V4, port=8080)
    other = attempt(sandbox, "tcp", host=places.OTHER_V4, port=80)

    assert '"host": "whatever.test"' in found["heard"]
    assert ("ECONNREFUSED", "ENETUNREACH") == (other_port["error"], other["error"])


@pytest.mark.parametrize(
    "name", ["loopback.test", "metadata.test", "host.test", "lan.test", "private.test"]
)
def test_a_name_that_leads_home_is_cut(box: MakeBox, egress: Egress, name: str) -> None:
    sandbox = box(name)

    found = attempt(sandbox, "tcp", host=name, port=places.HOST_PORT_EVERYWHERE, say=["x"])

    assert "ECONNRESET" == found["error"]
    events = [event for event in egress.events(sandbox.id) if "tcp" == event.kind]
    assert events  # a reset during connect() has the client try its other address
    for event in events:
        assert (name, False) == (event.host, event.allowed)
        assert "no rule allows that network" in event.reason


def test_the_judged_address_is_the_dialled_one(world: World, box: MakeBox) -> None:
    """The name leads to a public address when it is judged, and home when asked again."""
    world.internet.zone("rebound.test", [{"A": [places.WEB_V4]}, {"A": ["127.0.0.1"]}])
    sandbox = box("rebound.test")
    mark = world.host.mark()

    for _ in range(6):
        attempt(sandbox, "tcp", host="rebound.test", port=places.HOST_PORT, say=["x"])

    assert [] == world.host.seen(mark)
    world.internet.zone("rebound.test", [{"A": [places.WEB_V4]}, {"A": ["127.0.0.1"]}])
    control = box("rebound.test", "127.0.0.0/8")
    attempt(control, "tcp", host="rebound.test", port=80, say=["x"])
    assert not world.host.seen(mark)


def test_the_first_address_that_answers(box: MakeBox) -> None:
    sandbox = box("half.test")

    found = attempt(sandbox, "tcp", host="half.test", port=80, say=[request("half.test")])

    assert " 200 " in found["heard"]
    assert found["seconds"] < AT_ONCE_S


def test_a_proxy_by_every_way(box: MakeBox) -> None:
    sandbox = box("a.test")
    curl = ["curl", "-sS", "-m", "8"]

    for way in (
        [*curl, "http://a.test/"],
        [*curl, "https://a.test/"],
        [*curl, "-p", "-x", "http://198.18.0.1:3128", "http://a.test:8080/"],
        [*curl, "-x", "socks5h://198.18.0.1:3128", "https://a.test/"],
        [*curl, "-x", "http://127.0.0.1:1021", "https://a.test/"],
        [*curl, "--noproxy", "*", "https://a.test/"],
    ):
        result = sandbox.exec(way, timeout_s=10)
        assert '"host": "a.test' in result.stdout_text, (way, result.stderr_text)


def test_a_proxy_says_why_not(box: MakeBox, world: World) -> None:
    sandbox = box("a.test", "loopback.test")
    mark = world.internet.mark()
    curl = ["curl", "-sS", "-m", "8", "-x", "http://198.18.0.1:3128"]

    refused = sandbox.exec([*curl, "http://evil.test/"], timeout_s=10).stdout_text
    home = sandbox.exec([*curl, "http://loopback.test:8000/"], timeout_s=10).stdout_text
    tunnel = sandbox.exec([*curl, "https://evil.test/"], timeout_s=10).stderr_text

    assert "ringfence: no rule allows evil.test:80\n" == refused
    assert "127.0.0.1 is loopback" in home
    assert "403" in tunnel
    assert [] == [seen for seen in world.internet.seen(mark, kind="dns") if "evil" in seen["name"]]


@pytest.mark.parametrize(
    "target",
    [
        "127.0.0.1:80",
        "2130706433:80",
        "0x7f.1:80",
        "[::1]:80",
        "[::ffff:127.0.0.1]:80",
        "a.test\0.evil.test:80",
    ],
)
def test_a_tunnel_to_an_address_no_rule_names(box: MakeBox, world: World, target: str) -> None:
    sandbox = box("a.test")
    mark = world.host.mark()

    found = attempt(
        sandbox, "tcp", host="198.18.0.1", port=3128, say=[f"CONNECT {target} HTTP/1.1\r\n\r\n"]
    )

    assert found["heard"].startswith(("HTTP/1.1 403 ", "HTTP/1.1 400 "))
    assert [] == world.host.seen(mark)


def test_names_over_tcp(box: MakeBox) -> None:
    sandbox = box("a.test")

    assert 1 == attempt(sandbox, "dns", name="A.test", over="tcp")["answers"]
    assert 3 == attempt(sandbox, "dns", name="evil.test", over="tcp")["rcode"]


def test_everything_is_on_record(box: MakeBox, egress: Egress) -> None:
    sandbox = box("a.test", "echo.test:7")
    attempt(sandbox, "tcp", host="a.test", port=80, say=[request("a.test", "/here?x")])
    attempt(sandbox, "tcp", host="echo.test", port=7, say=["12345"], until="12345")
    attempt(sandbox, "resolve", name="evil\n.test")

    events = egress.events(sandbox.id)

    by_kind = {event.kind: event for event in events if event.allowed}
    assert ("a.test", "GET", "/here?x", 80) == (
        by_kind["http"].host,
        by_kind["http"].method,
        by_kind["http"].path,
        by_kind["http"].port,
    )
    assert by_kind["http"].bytes_in > 100
    assert ("echo.test", 5, 5, "echo.test:7") == (
        by_kind["tcp"].host,
        by_kind["tcp"].bytes_in,
        by_kind["tcp"].bytes_out,
        by_kind["tcp"].rule,
    )
    assert by_kind["tcp"].duration_s > 0
    assert all(event.host.isprintable() for event in events)
    totals = egress.totals(sandbox.id)
    assert totals["allowed"] == sum(event.allowed for event in events)
    assert totals["refused"] == sum(not event.allowed for event in events)


def test_what_goes_on_is_on_record_too(box: MakeBox, egress: Egress) -> None:
    sandbox = box("echo.test:7")
    with Client(sandbox) as client:
        for number in range(100):
            client.do("connect", key=str(number), host="echo.test", port=7)
            client.do("send", key=str(number), text="x" * number)
            assert not number or client.do("receive", key=str(number))
        live = [event for event in egress.events(sandbox.id) if "tcp" == event.kind]
        assert 100 == len(live)
        assert set(range(100)) == {event.bytes_out for event in live}
        assert 100 == len([event for event in egress.events(sandbox.id) if "tcp" == event.kind])
    ended = [event for event in egress.events(sandbox.id) if "tcp" == event.kind]
    assert {event.bytes_in for event in live} == {event.bytes_in for event in ended}
