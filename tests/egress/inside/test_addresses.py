"""Ways around a list of names by address: none leads anywhere, each works without the list."""

from __future__ import annotations

import pytest

from ringfence import Sandbox
from tests.egress.inside.attempts import AT_ONCE_S
from tests.egress.inside.conftest import MakeSandbox, attempt
from tests.egress.world import World, places

pytestmark = [pytest.mark.in_world, pytest.mark.anyone]

POLICY = ("a.test", "v4.test", "v6.test", *places.SPECIAL, "rebind.test", "mixed.test", "half.test")
SAY = ["GET /bypass HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n"]

LITERALS = {
    "of an allowed name": places.WEB_V4,
    "of an allowed name, v6": places.WEB_V6,
    "of another host": places.OTHER_V4,
    "mapped into v6": f"::ffff:{places.WEB_V4}",
    "mapped, hexadecimal": "::ffff:cb00:710a",
    "translated by NAT64": f"64:ff9b::{places.WEB_V4}",
    "decimal": str(0xCB00710A),
    "hexadecimal": "0xcb00710a",
    "octal": "0313.0.0161.012",
    "shortened": "203.28938",
    "private": "10.0.0.5",
    "private, shortened": "10.5",
    "metadata": places.METADATA_V4,
    "metadata, decimal": str(0xA9FEA9FE),
    "metadata, v6": places.METADATA_V6,
    "metadata, mapped": f"::ffff:{places.METADATA_V4}",
    "metadata, NAT64": f"64:ff9b::{places.METADATA_V4}",
    "the gateway": places.GATEWAY_V4,
    "the host's resolver": places.DNS_V4,
}
# Read by the kernel or by this machine's own library as something else than an address out there.
UNROUTED = ("NAT64", "mapped")


@pytest.mark.parametrize("spelling", LITERALS)
def test_an_address_is_no_way_around(limited: Sandbox, world: World, spelling: str) -> None:
    mark = world.mark()

    found = attempt(limited, "tcp", host=LITERALS[spelling], port=80, say=SAY)

    assert not found["connected"]
    assert "timeout" != found["error"]
    assert found["seconds"] < AT_ONCE_S
    assert [] == world.left(mark)


@pytest.mark.parametrize("spelling", LITERALS)
def test_the_control_goes_to_the_address(
    unrestricted: Sandbox, world: World, spelling: str
) -> None:
    mark = world.mark()

    found = attempt(unrestricted, "tcp", host=LITERALS[spelling], port=80, say=SAY)

    assert found["connected"], found
    assert world.left(mark, kind="request", target="/bypass")


@pytest.mark.parametrize("port", [1, 22, 8000, 8080, 65535])
def test_a_port_that_no_rule_names_is_refused(make: MakeSandbox, world: World, port: int) -> None:
    sandbox = make(network="a.test:80,a.test:443,b.test:8081-8090")
    mark = world.mark()

    found = attempt(sandbox, "tcp", host="a.test", port=port, say=SAY)

    assert (False, "ECONNREFUSED") == (found["connected"], found["error"])
    assert found["seconds"] < AT_ONCE_S
    assert [] == world.left(mark, kind="connection")


def test_the_control_allows_the_port(make: MakeSandbox, world: World) -> None:
    sandbox = make(network="a.test:8080,a.test:22")

    assert attempt(sandbox, "tcp", host="a.test", port=8080, say=SAY)["heard"]
    assert attempt(sandbox, "tcp", host="a.test", port=22, say=["x\r\n"])["heard"]


# -- names that lead to special addresses ---------------------------------------------------------


@pytest.mark.parametrize("port", [80, places.HOST_PORT, places.HOST_PORT_EVERYWHERE])
@pytest.mark.parametrize("name", places.SPECIAL)
def test_a_name_does_not_lead_to_a_special_address(
    limited: Sandbox, world: World, name: str, port: int
) -> None:
    mark = world.mark()

    found = attempt(limited, "tcp", host=name, port=port, say=_request(f"{name}:{port}"))

    assert '"server"' not in found["heard"]
    assert "timeout" != found["error"]
    assert [] == [event for event in world.left(mark) if event["kind"] != "dns"]


REACHABLE = {
    "loopback.test": places.HOST_PORT,
    "loopback6.test": places.HOST_PORT,
    "zero.test": places.HOST_PORT,
    "mapped.test": places.HOST_PORT,
    "host.test": places.HOST_PORT_EVERYWHERE,
    "host6.test": places.HOST_PORT_EVERYWHERE,
    "lan.test": places.HOST_PORT_EVERYWHERE,
    **dict.fromkeys(("private.test", "private172.test", "private192.test", "cgnat.test"), 80),
    **dict.fromkeys(("linklocal.test", "metadata.test", "metadata6.test", "ula.test"), 80),
    **dict.fromkeys(("mapped-private.test", "nat64.test", "sixtofour.test", "teredo.test"), 80),
    **dict.fromkeys(("cname-private.test", "benchmark.test", "nat64-local.test"), 80),
}


@pytest.mark.parametrize("name", REACHABLE)
def test_the_control_follows_the_name(unrestricted: Sandbox, world: World, name: str) -> None:
    mark = world.mark()

    found = attempt(unrestricted, "tcp", host=name, port=REACHABLE[name], say=SAY)

    assert found["heard"], found
    assert world.left(mark, kind="request", target="/bypass")


@pytest.mark.parametrize(
    ("name", "rule", "port"),
    [
        ("private.test", "10.0.0.0/8", 80),
        ("metadata.test", places.METADATA_V4, 80),
        ("ula.test", "fc00::/7", 80),
        ("loopback.test", "127.0.0.0/8", places.HOST_PORT),
        ("host.test", places.HOST_V4, places.HOST_PORT_EVERYWHERE),
    ],
)
def test_a_rule_with_the_address_allows_it(
    make: MakeSandbox, world: World, name: str, rule: str, port: int
) -> None:
    sandbox = make(network=[name, rule])
    mark = world.mark()

    found = attempt(sandbox, "tcp", host=name, port=port, say=_request(f"{name}:{port}"))

    assert found["heard"], found
    assert world.left(mark, kind="request", target="/bypass")


def _request(host: str) -> list[str]:
    host = host.removesuffix(":80")
    return [f"GET /bypass HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"]


# -- rebinding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["A", "AAAA"])
def test_rebinding_reaches_only_what_was_checked(
    make: MakeSandbox, world: World, kind: str
) -> None:
    """The first answer is public, all later ones are the host's own loopback."""
    public, own = {"A": (places.WEB_V4, "127.0.0.1"), "AAAA": (places.WEB_V6, "::1")}[kind]
    world.internet.zone("turn.test", [{kind: [public]}, {kind: [own]}])
    sandbox = make(network="turn.test")
    mark = world.mark()

    found = [
        attempt(sandbox, "tcp", host="turn.test", port=80, say=_request("turn.test"))
        for _ in range(4)
    ]
    for port in (places.HOST_PORT, places.HOST_PORT_EVERYWHERE):
        attempt(sandbox, "tcp", host="turn.test", port=port, say=_request(f"turn.test:{port}"))

    assert found[0]["heard"]
    events = world.left(mark)
    assert {public} == {event["address"] for event in events if "connection" == event["kind"]}
    assert {"internet"} == {event["server"] for event in events if "server" in event}


def test_the_control_is_rebound(unrestricted: Sandbox, world: World) -> None:
    world.internet.zone("turned.test", [{"A": [places.WEB_V4]}, {"A": ["127.0.0.1"]}])
    port = places.HOST_PORT

    attempt(unrestricted, "resolve", name="turned.test")
    found = attempt(unrestricted, "tcp", host="turned.test", port=port, say=SAY)

    assert '"server": "host"' in found["heard"]


def test_of_several_addresses_only_the_public_one_is_dialled(
    limited: Sandbox, world: World
) -> None:
    mark = world.mark()

    for _ in range(4):
        attempt(limited, "tcp", host="mixed.test", port=80, say=_request("mixed.test"))
        port = places.HOST_PORT
        attempt(limited, "tcp", host="mixed.test", port=port, say=_request(f"mixed.test:{port}"))

    assert [] == world.host.seen(mark[1])
    reached = {event["address"] for event in world.left(mark, kind="connection")}
    assert reached <= {places.WEB_V4}


def test_an_address_that_is_dead_does_not_hide_the_next(limited: Sandbox) -> None:
    found = attempt(limited, "tcp", host="half.test", port=80, say=_request("half.test"))

    assert "200" in found["heard"][:20], found


@pytest.mark.parametrize(
    "target", ["169.254.169.254", "metadata.test", "127.0.0.1:8000", "[::1]:8000"]
)
def test_a_redirect_leads_nowhere_else(limited: Sandbox, world: World, target: str) -> None:
    mark = world.mark()
    command = [
        "curl",
        "-sSf",
        "-L",
        "-m",
        "10",
        f"http://a.test/redirect?to=http://{target}/stolen",
    ]

    result = limited.exec(command, timeout_s=15)

    assert not result.ok
    assert world.left(mark, kind="request")
    assert [] == world.left(mark, kind="request", target="/stolen")


@pytest.mark.parametrize("target", ["169.254.169.254", "metadata.test", "127.0.0.1:8000"])
def test_the_control_is_redirected(unrestricted: Sandbox, world: World, target: str) -> None:
    mark = world.mark()
    command = [
        "curl",
        "-sSf",
        "-L",
        "-m",
        "10",
        f"http://a.test/redirect?to=http://{target}/stolen",
    ]

    assert unrestricted.exec(command, timeout_s=15).ok
    assert world.left(mark, kind="request", target="/stolen")


# -- the host itself ------------------------------------------------------------------------------

HOST_ITSELF = {
    "loopback": ("127.0.0.1", places.HOST_PORT),
    "loopback, v6": ("::1", places.HOST_PORT),
    "loopback, another": ("127.1.2.3", places.HOST_PORT_EVERYWHERE),
    "loopback, mapped": ("::ffff:127.0.0.1", places.HOST_PORT),
    "unspecified": ("0.0.0.0", places.HOST_PORT),
    "unspecified, v6": ("::", places.HOST_PORT),
    "own address": (places.HOST_V4, places.HOST_PORT_EVERYWHERE),
    "own address, v6": (places.HOST_V6, places.HOST_PORT_EVERYWHERE),
    "own private address": (places.LAN_V4, places.HOST_PORT_EVERYWHERE),
    "localhost": ("localhost", places.HOST_PORT),
}


@pytest.mark.parametrize("way", HOST_ITSELF)
def test_the_host_is_out_of_reach(limited: Sandbox, world: World, way: str) -> None:
    host, port = HOST_ITSELF[way]
    mark = world.mark()

    found = attempt(limited, "tcp", host=host, port=port, say=SAY)

    assert not found["connected"]
    assert found["seconds"] < AT_ONCE_S
    assert [] == world.left(mark)


@pytest.mark.parametrize("way", HOST_ITSELF)
def test_the_control_reaches_the_host(unrestricted: Sandbox, way: str) -> None:
    host, port = HOST_ITSELF[way]

    found = attempt(unrestricted, "tcp", host=host, port=port, say=SAY)

    assert '"server": "host"' in found["heard"], found


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_one_service_of_the_host_by_its_own_rule(
    make: MakeSandbox, world: World, host: str
) -> None:
    """A rule with exactly one loopback address and port means the host's."""
    address = f"[{host}]" if ":" in host else host
    sandbox = make(network=f"{address}:{places.HOST_PORT}")
    say = _request(f"{address}:{places.HOST_PORT}")

    found = attempt(sandbox, "tcp", host=host, port=places.HOST_PORT, say=say)

    assert '"server": "host"' in found["heard"], found
    other = attempt(sandbox, "tcp", host=host, port=places.HOST_PORT_EVERYWHERE, say=say)
    assert "ECONNREFUSED" == other["error"]


def test_a_rule_with_an_address_allows_the_address(make: MakeSandbox, world: World) -> None:
    sandbox = make(network=f"{places.WEB_V4}:80,[{places.WEB_V6}]:8080,198.51.0.0/16:80")

    for host, port in ((places.WEB_V4, 80), (places.WEB_V6, 8080), (places.DNS_V4, 80)):
        address = f"[{host}]" if ":" in host else host
        found = attempt(sandbox, "tcp", host=host, port=port, say=_request(f"{address}:{port}"))
        assert "200" in found["heard"][:20], found
    for host, port in ((places.WEB_V4, 8080), (places.WEB_V6, 80), (places.OTHER_V4, 80)):
        assert not attempt(sandbox, "tcp", host=host, port=port, say=SAY)["connected"]


def test_the_hosts_own_address_is_not_opened_by_a_wider_rule_of_names(
    make: MakeSandbox, world: World
) -> None:
    """198.51.100.254 is the host's: only a rule with an address may allow it."""
    sandbox = make(network="host.test,*.wild.test")
    port = places.HOST_PORT_EVERYWHERE

    found = attempt(sandbox, "tcp", host="host.test", port=port, say=_request(f"host.test:{port}"))

    assert '"server"' not in found["heard"]
