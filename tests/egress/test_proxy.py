"""Clients that ask a proxy: what each is told, what goes on behind it, and what is on record."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from ringfence import NetworkLimits, NetworkPolicy, NetworkRule
from ringfence.egress import reach, socks
from ringfence.linux.destination import packed
from tests.egress.hellos import message, records, sni
from tests.egress.one_sandbox import Scene

pytestmark = pytest.mark.anyone

POLICY = NetworkPolicy(
    allowed_hosts=("a.test", "127.0.0.0/8"),
    rules=(NetworkRule("b.test", methods=("GET",)),),
    limits=NetworkLimits(header_s=0.3),
)
RAW = b"\0raw"
Make = Callable[[], Scene]


@pytest.fixture
def scene() -> Iterator[Scene]:
    """One whose client comes to the proxy."""
    with ExitStack() as stack:
        made = Scene(POLICY)
        stack.callback(made.close)
        made._name = packed("198.18.0.1")
        yield made


def connect(target: bytes) -> bytes:
    return b"CONNECT %b HTTP/1.1\r\nHost: %b\r\n\r\n" % (target, target)


def by_name(name: bytes, port: int) -> bytes:
    greeting = bytes((5, 1, 0))
    return greeting + bytes((5, 1, 0, 3, len(name))) + name + port.to_bytes(2, "big")


def by_address(address: str, port: int) -> bytes:
    there = packed(address)
    kind = 1 if len(there) == 4 else 4
    return bytes((5, 1, 0)) + bytes((5, 1, 0, kind)) + there + port.to_bytes(2, "big")


def dialled(scene: Scene) -> None:
    while not scene._servers:
        scene.settle()
    scene.settle()


def all_of(scene: Scene, client: socket.socket) -> bytes:
    """What the client is told until its end."""
    client.setblocking(False)
    said = b""
    while True:
        try:
            more = client.recv(1 << 16)
        except BlockingIOError:
            scene.settle()
            continue
        except ConnectionResetError:
            return said
        if not more:
            return said
        said += more


def last(scene: Scene) -> dict[str, Any]:
    while scene.sandbox.connections:
        scene.settle()
    return [each for each in scene.events if each["kind"] != "dns"][-1]


ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"
GRANTED = bytes((5, 0)) + bytes((5, 0, 0, 1)) + bytes(6)


@pytest.mark.parametrize(
    ("asks", "granted", "kind", "host"),
    [
        (connect(b"a.test:9000"), ESTABLISHED, "connect", "a.test"),
        (connect(b"A.Test:9000"), ESTABLISHED, "connect", "a.test"),
        (connect(b"127.0.0.1:9000"), ESTABLISHED, "connect", ""),
        (by_name(b"a.test", 9000), GRANTED, "socks", "a.test"),
        (by_name(b"A.TEST.", 9000), GRANTED, "socks", "a.test"),
        (by_name(b"127.0.0.1", 9000), GRANTED, "socks", ""),
        (by_address("127.0.0.1", 9000), GRANTED, "socks", ""),
        (by_address("::ffff:127.0.0.1", 9000), GRANTED, "socks", ""),
    ],
)
def test_a_tunnel_is_granted_and_what_was_said_at_once_goes_through(
    scene: Scene, asks: bytes, granted: bytes, kind: str, host: str
) -> None:
    with scene.begin(3128, asks + RAW) as client:
        dialled(scene)
        assert [("127.0.0.1", 9000)] == scene.dialled
        assert RAW == scene._hear()
        scene.answer(b"answer")
        assert granted + b"answer" == client.recv(999)
        (live,) = scene.sandbox.live()
        assert (kind, host, "127.0.0.1", 9000) == tuple(
            live[name] for name in ("kind", "host", "address", "port")
        )
    scene._answer()
    event = last(scene)
    assert (kind, True, 9000) == (event["kind"], event["allowed"], event["port"])


@pytest.mark.parametrize(
    ("asks", "told", "reason"),
    [
        (connect(b"c.test:80"), b"HTTP/1.1 403 ", "no rule allows c.test"),
        (connect(b"10.0.0.1:80"), b"HTTP/1.1 403 ", "10.0.0.1 is private"),
        (connect(b"a.test"), b"HTTP/1.1 400 ", "CONNECT needs host:port"),
        (b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n", b"HTTP/1.1 400 ", "this is a proxy"),
        (b"GET http://c.test/ HTTP/1.1\r\nHost: c.test\r\n\r\n", b"HTTP/1.1 403 ", "c.test"),
        (b"POST http://b.test/ HTTP/1.1\r\nHost: b.test\r\n\r\n", b"HTTP/1.1 403 ", "no rule allows POST"),
        (by_name(b"c.test", 80), bytes((5, 0, 5, socks.NOT_ALLOWED)), "no rule allows c.test"),
        (by_address("10.0.0.1", 80), bytes((5, 0, 5, socks.NOT_ALLOWED)), "10.0.0.1 is private"),
        (by_name(b"a.test", 0), bytes((5, 0, 5, socks.NOT_ALLOWED)), "an invalid port"),
        (by_name(b"1.2.3", 80), bytes((5, 0, 5, socks.NOT_ALLOWED)), "neither a host name nor"),
        (by_name(b"1.2.3.999", 80), bytes((5, 0, 5, socks.NOT_ALLOWED)), "neither a host name nor"),
        (by_name(b"0x7f.1", 80), bytes((5, 0, 5, socks.NOT_ALLOWED)), "neither a host name nor"),
        (bytes((5, 1, 0, 5, 1)), bytes((5, 0)), "no SOCKS request within 0.3 s"),
        (bytes((5, 1, 2)), bytes((5, 0xFF)), "insists on authentication"),
        (b"CONNECT a.test:80 HT", b"HTTP/1.1 408 ", "no request head within 0.3 s"),
    ],
)  # fmt: skip
def test_who_may_not_go_there_is_told(scene: Scene, asks: bytes, told: bytes, reason: str) -> None:
    with scene.begin(3128, asks) as client:
        assert all_of(scene, client).startswith(told)
    event = last(scene)
    assert not event["allowed"]
    assert reason in event["reason"]
    if "proxy" in reason or "request" in reason:
        assert 0 == event["port"], "the proxy's own says nothing"
    assert [] == scene.dialled
    assert 0 == scene.commons.connections


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (OSError(errno.ECONNREFUSED, "refused"), socks.NOT_ANSWERED, 502),
        (OSError(errno.ENETUNREACH, "far"), socks.UNREACHABLE, 502),
        (OSError(errno.EHOSTUNREACH, "far"), socks.UNREACHABLE, 502),
        (OSError(errno.EPIPE, "odd"), socks.FAILED, 502),
        (TimeoutError("late"), socks.UNREACHABLE, 504),
    ],
)
def test_a_server_that_cannot_be_reached_is_told(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, error: OSError, code: int, status: int
) -> None:
    async def fails(*_: object) -> tuple[socket.socket, str]:
        raise error

    monkeypatch.setattr(reach, "connect", fails)
    for asks, told in (
        (by_name(b"a.test", 80), bytes((5, 0, 5, code))),
        (connect(b"a.test:80"), b"HTTP/1.1 %d " % status),
        (b"GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n", b"HTTP/1.1 %d " % status),
    ):
        with scene.begin(3128, asks) as client:
            assert all_of(scene, client).startswith(told)
        assert last(scene)["allowed"], "by the rules it was"


def test_a_request_by_url_is_judged_and_passed_on(scene: Scene) -> None:
    asks = (
        b"GET http://b.test:8080/x HTTP/1.1\r\nHost: b.test:8080\r\nProxy-Connection: close\r\n\r\n"
    )
    with scene.begin(3128, asks) as client:
        dialled(scene)
        assert [("127.0.0.1", 8080)] == scene.dialled
        assert b"GET /x HTTP/1.1\r\nHost: b.test:8080\r\nConnection: close\r\n\r\n" == scene._hear()
        scene.answer(b"HTTP/1.1 204 No\r\n\r\n")
        assert all_of(scene, client).startswith(b"HTTP/1.1 204 No\r\n")
    event = last(scene)
    assert ("http", "b.test", 8080, "GET", "/x", True) == tuple(
        event[name] for name in ("kind", "host", "port", "method", "path", "allowed")
    )
    assert len(asks) == event["bytes_out"]
    assert len(b"HTTP/1.1 204 No\r\n\r\n") == event["bytes_in"]


def test_what_is_said_in_a_tunnel_is_looked_at_as_anywhere(scene: Scene) -> None:
    hello = records(message(sni(b"b.example")))
    with scene.begin(3128, connect(b"a.test:443") + hello) as client:
        assert ESTABLISHED == all_of(scene, client)
    assert "TLS for 'b.example' in a connection for a.test" == last(scene)["reason"]
    for asks in (connect(b"a.test:443"), by_name(b"a.test", 443)):
        with scene.begin(3128, asks + b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n") as client:
            all_of(scene, client)
        assert "HTTP where only TLS may be spoken" == last(scene)["reason"]
    assert b"" == scene._hear()


def test_who_says_nothing_is_not_on_record(scene: Scene) -> None:
    assert b"" == scene.say(3128, [])
    assert [] == scene.events
    assert 0 == scene.commons.connections


@pytest.mark.parametrize("method", [b"HEAD", b"GET"])
def test_a_refusal_of_head_has_no_body_at_the_proxy_either(scene: Scene, method: bytes) -> None:
    with scene.begin(3128, method + b" http://c.test/ HTTP/1.1\r\nHost: c.test\r\n\r\n") as client:
        told = all_of(scene, client)
    assert told.startswith(b"HTTP/1.1 403 ")
    assert (b"HEAD" == method) == told.endswith(b"\r\n\r\n")


def test_a_connection_that_is_kept_ready_ends_after_the_time_of_its_policy(scene: Scene) -> None:
    scene.change(NetworkPolicy.parse("a.test").altered(limits=NetworkLimits(idle_s=0.05)))
    with scene.begin(3128, b"") as client:
        for _ in range(500):
            if not scene.sandbox.connections:
                break
            scene.settle()
        assert 0 == scene.commons.connections
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    assert "nothing for 0.05 s" == scene.events[-1]["reason"]
