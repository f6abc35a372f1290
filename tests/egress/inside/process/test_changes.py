"""Another policy for a sandbox that lives: at once, for what is new and for what is under way."""

from __future__ import annotations

import pytest

from ringfence import NetworkPolicy, NetworkRule, Sandbox
from ringfence.egress.host.client import Egress
from tests.egress.inside.conftest import attempt
from tests.egress.inside.process.clients import Client
from tests.egress.inside.process.conftest import MakeBox
from tests.egress.world import places

pytestmark = [pytest.mark.in_world, pytest.mark.anyone, pytest.mark.full]


def change(egress: Egress, sandbox: Sandbox, *rules: str, **more: object) -> None:
    policy = NetworkPolicy(allowed_hosts=rules, **more)  # type: ignore[arg-type]
    egress.change(sandbox.id, policy, {}, None)


def is_open(client: Client, key: str) -> bool:
    if "error" in str(client.do("send", key=key, text="still there\n")):
        return False
    return bool("still there\n" == client.do("receive", key=key))


def test_what_is_not_allowed_any_more_is_cut_and_the_rest_stays(
    box: MakeBox, egress: Egress
) -> None:
    sandbox = box("echo.test:7", "a.test:7", "203.0.113.5:7", "*.wild.test:7")
    hosts = ("echo.test", "a.test", "203.0.113.5", "x.wild.test")
    with Client(sandbox) as client:
        for host in hosts:
            client.do("connect", key=host, host=host, port=7)
            assert is_open(client, host)

        change(egress, sandbox, "a.test:7", "*.wild.test:7", "!x.wild.test")

        assert [False, True, False, False] == [is_open(client, host) for host in hosts]
        assert "error" in client.do("connect", key="new", host="echo.test", port=7)
        assert client.do("connect", key="new", host="y.wild.test", port=7)
    cut = [event for event in egress.events(sandbox.id) if "no longer allowed" in event.reason]
    assert {"echo.test", "", "x.wild.test"} == {event.host for event in cut}


def test_in_force_when_it_returns(box: MakeBox, egress: Egress) -> None:
    """Programs inside are asked at once, and get the new answers."""
    sandbox = box("a.test:7")
    with Client(sandbox) as client:
        client.do("connect", key="warm", host="a.test", port=7)
        for turn in range(20):
            allowed, other = ("a.test", "b.test")[:: 1 if turn % 2 else -1]
            change(egress, sandbox, f"{allowed}:7")
            assert client.do("connect", key="x", host=allowed, port=7) is True
            assert "error" in client.do("connect", key="y", host=other, port=7)


def test_who_waits_for_its_first_byte_is_judged_too(box: MakeBox, egress: Egress) -> None:
    sandbox = box("echo.test:7", "a.test:443")
    with Client(sandbox) as client:
        client.do("connect", key="silent", host="echo.test", port=7)
        client.do("connect", key="hello", host="a.test", port=443)
        client.do("send", key="hello", text="\x16\x03\x01")
        change(egress, sandbox, "b.test")

        for key in ("silent", "hello"):
            assert {"error": "ECONNRESET"} == client.do("receive", key=key)


def test_who_waits_for_the_network_is_judged_too(box: MakeBox, egress: Egress) -> None:
    sandbox = box("blackhole.test:7", "slow.test:7")
    with Client(sandbox) as client:
        client.do("connect", key="dialling", host="blackhole.test", port=7)
        client.do("connect", key="resolving", host="slow.test", port=7)
        change(egress, sandbox, "b.test")

        for key in ("dialling", "resolving"):
            assert {"error": "ECONNRESET"} == client.do("receive", key=key)


@pytest.mark.parametrize("judged_before", [False, True])
def test_what_is_to_be_judged_request_by_request_is_cut_where_it_cannot_be(
    box: MakeBox, egress: Egress, judged_before: bool
) -> None:
    """Also when both policies are held by the same process."""
    judged = (NetworkRule("b.test", "80", methods=("GET",)),) if judged_before else ()
    policy = NetworkPolicy(allowed_hosts=("echo.test:7", "a.test:7"), rules=judged)
    sandbox = box(network=policy)
    with Client(sandbox) as client:
        for key in ("raw", "silent"):
            client.do("connect", key=key, host="echo.test", port=7)
        client.do("connect", key="other", host="a.test", port=7)
        assert is_open(client, "raw")
        assert is_open(client, "other")

        rules = (*judged, NetworkRule("echo.test", "7", methods=("GET",)))
        change(egress, sandbox, "a.test:7", rules=rules)

        assert not is_open(client, "raw")
        assert not is_open(client, "silent")
        assert judged_before == is_open(client, "other")


def test_a_request_under_way_is_cut(box: MakeBox, egress: Egress) -> None:
    sandbox = box("a.test:80")
    with Client(sandbox) as client:
        client.do("connect", key="slow", host="a.test", port=80)
        client.do("send", key="slow", text="GET /slow/5 HTTP/1.1\r\nHost: a.test\r\n\r\n")
        found = attempt(
            sandbox, "tcp", host="a.test", port=80, say=["GET / HTTP/1.1\r\nHost: a.test\r\n\r\n"]
        )
        assert "200" in found["heard"]

        change(egress, sandbox, "b.test:80")

        assert {"error": "ECONNRESET"} == client.do("receive", key="slow")


def test_the_record_goes_on_from_one_kind_of_process_to_the_other(
    box: MakeBox, egress: Egress
) -> None:
    sandbox = box("echo.test:7", "a.test:80")
    attempt(sandbox, "tcp", host="echo.test", port=7, say=["x"], until="x")
    before = egress.totals(sandbox.id)

    rules = (NetworkRule("a.test", "80", methods=("GET",)),)
    change(egress, sandbox, "echo.test:7", rules=rules)
    attempt(sandbox, "tcp", host="echo.test", port=7, say=["x"], until="x")

    after = egress.totals(sandbox.id)
    assert 2 == len([event for event in egress.events(sandbox.id) if "tcp" == event.kind])
    assert after["allowed"] > before["allowed"]
    change(egress, sandbox, "echo.test:7")
    assert "x" == attempt(sandbox, "tcp", host="echo.test", port=7, say=["x"], until="x")["heard"]


@pytest.mark.parametrize("own", [f"{places.HOST_V4}", "198.51.100.0/24"])
def test_the_host_s_own_address_needs_a_rule_of_its_own(box: MakeBox, own: str) -> None:
    without, with_rule = box("host.test"), box("host.test", own)
    port = places.HOST_PORT_EVERYWHERE
    say = [f"GET / HTTP/1.1\r\nHost: host.test:{port}\r\n\r\n"]

    refused = attempt(without, "tcp", host="host.test", port=port, say=say)
    let_through = attempt(with_rule, "tcp", host="host.test", port=port, say=say)

    assert "ECONNRESET" == refused["error"]
    assert "HTTP/1.1 200 " == let_through["heard"][:13]
