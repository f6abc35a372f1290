"""How much one sandbox may have of the network, each limit beside what stays within it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ringfence import Limits, NetworkLimits, NetworkPolicy
from ringfence.egress.host.client import Egress
from tests.egress.inside.conftest import attempt
from tests.egress.inside.process.clients import Client
from tests.egress.inside.process.conftest import MakeBox
from tests.egress.world import places
from tests.native.outside import until

pytestmark = [pytest.mark.in_world, pytest.mark.anyone, pytest.mark.full]


def policy(*rules: str, **limits: Any) -> NetworkPolicy:
    return NetworkPolicy(allowed_hosts=rules, limits=NetworkLimits(**limits))


def echoes(client: Client, key: str) -> bool:
    """Whether a new connection gets through; refused, it may be reset while it still connects."""
    client.do("connect", key=key, host="echo.test", port=7)
    client.do("send", key=key, text="x")
    return bool("x" == client.do("receive", key=key))


def test_connections_at_the_same_time(box: MakeBox, egress: Egress) -> None:
    sandbox = box(network=policy("echo.test:7", connections=3))
    with Client(sandbox) as client:
        assert all(echoes(client, key) for key in "abc")
        assert not echoes(client, "d")

        client.do("close", key="a")

        assert until(lambda: echoes(client, "e"))  # the other side has yet to notice
    reasons = [event.reason for event in egress.events(sandbox.id)]
    assert "too many connections at the same time" in reasons


def test_connections_a_second(box: MakeBox) -> None:
    sandbox = box(network=policy("echo.test:7", connections_per_s=2))
    with Client(sandbox) as client:
        began, tried, through = time.monotonic(), 0, 0
        while tried == through:  # a busy machine may take its time, and is allowed more then
            tried += 1
            through += echoes(client, str(tried))
        allowed = 2 + 2 * (time.monotonic() - began)

        assert 2 <= through <= allowed
        assert until(lambda: echoes(client, "later"))


def test_bytes_a_second(box: MakeBox) -> None:
    sandbox = box(network=policy("a.test:19", bytes_per_s=1 << 20))
    with Client(sandbox) as client:
        client.do("connect", key="x", host="a.test", port=places.SOURCE)
        started = time.monotonic()
        assert client.do("drain", key="x", least=1 << 20) >= 1 << 20
        took = time.monotonic() - started

    assert took > 0.5


def test_bytes_of_a_whole_life(box: MakeBox, egress: Egress) -> None:
    sandbox = box("a.test:19", "echo.test:7", limits=Limits(network_bytes=5 << 20))
    with Client(sandbox) as client:
        client.do("connect", key="x", host="a.test", port=places.SOURCE)
        assert {"error": "ECONNRESET"} == client.do("drain", key="x", least=1 << 30)
        assert not echoes(client, "y")
    moved = egress.totals(sandbox.id)
    assert 4 << 20 < moved["bytes_in"] + moved["bytes_out"] <= 5 << 20


def test_bytes_of_a_whole_life_over_http(box: MakeBox, egress: Egress) -> None:
    sandbox = box("a.test:80", limits=Limits(network_bytes=1 << 20))
    fetch = "curl -sS -m 30 http://a.test/bytes/{} | wc -c"

    small = sandbox.shell(fetch.format(1 << 19)).stdout_text
    large = sandbox.shell(fetch.format(1 << 20)).stdout_text

    assert 1 << 19 == int(small)
    assert int(large) < 1 << 19
    moved = egress.totals(sandbox.id)
    assert moved["bytes_in"] + moved["bytes_out"] <= 1 << 20


def test_idle_connections(box: MakeBox, egress: Egress) -> None:
    sandbox = box(network=policy("echo.test:7", idle_s=1.5))
    with Client(sandbox) as client:
        for key in ("busy", "silent", "done"):
            client.do("connect", key=key, host="echo.test", port=7)
        client.do("send", key="done", text="x")
        assert "x" == client.do("receive", key="done")
        for _ in range(6):
            time.sleep(0.3)
            client.do("send", key="busy", text="x")
            assert "x" == client.do("receive", key="busy")

        assert {"error": "ECONNRESET"} == client.do("receive", key="silent")
        assert {"error": "ECONNRESET"} == client.do("receive", key="done")
    assert 2 == [event.reason for event in egress.events(sandbox.id)].count("idle for too long")


@pytest.mark.parametrize(
    ("port", "pieces", "answer"),
    [
        (80, ["GET / HT", "TP/1.1\r\n", "Host: a.test\r\n", "X: y\r\n"], "HTTP/1.1 408 "),
        (8080, ["G", "E", "T", " ", "/"], ""),
        (443, ["\x16", "\x03", "\x01", "\x02"], ""),
        (7, ["\x16"], ""),
    ],
)
def test_who_takes_too_long_to_say_what_it_wants(
    box: MakeBox, port: int, pieces: list[str], answer: str
) -> None:
    """A slow loris holds nothing for longer than header_s in all, however often it moves."""
    sandbox = box(network=policy("a.test", "echo.test", header_s=0.5))
    host = "echo.test" if 7 == port else "a.test"
    with Client(sandbox) as client:
        client.do("connect", key="x", host=host, port=port)
        heard = []
        for piece in pieces:
            heard.append(client.do("send", key="x", text=piece))
            time.sleep(0.15)
        heard.append(client.do("receive", key="x", patience_s=20.0))

    if answer:
        assert str(heard[-1]).startswith(answer)
    else:
        assert "ECONNRESET" in str(heard) or "EPIPE" in str(heard)


def test_a_server_that_never_takes_the_connection(box: MakeBox) -> None:
    sandbox = box(network=policy("blackhole.test", connect_s=0.3))

    found = attempt(sandbox, "tcp", host="blackhole.test", port=22)
    proxied = sandbox.exec(["curl", "-sS", "-m", "30", "https://blackhole.test/"], timeout_s=40)

    assert "ECONNRESET" == found["error"]
    assert "504" in proxied.stderr_text


def test_heads_that_are_too_long(box: MakeBox) -> None:
    sandbox = box(network=policy("a.test", header_bytes=1000))
    for length, status in ((500, "200"), (1500, "431")):
        say = [f"GET / HTTP/1.1\r\nHost: a.test\r\nX: {'y' * length}\r\n\r\n"]
        assert attempt(sandbox, "tcp", host="a.test", port=80, say=say)["heard"][9:12] == status
