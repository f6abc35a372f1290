"""What a client or its server does not say in time, or not in full; and what is counted of the rest."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence import NetworkLimits, NetworkPolicy, NetworkRule
from ringfence.egress import passage, reach
from ringfence.egress.inbound import Inbound
from ringfence.egress.io.loop import sleep
from tests.egress.hellos import message, records, sni
from tests.egress.one_sandbox import Scene
from tests.egress.scene import tcp_pair

pytestmark = pytest.mark.anyone

HELLO = records(message(sni(b"a.test")))
GET = b"GET /x?y=1 HTTP/1.1\r\nHost: a.test\r\n\r\n"
JUDGED = (NetworkRule("a.test", methods=("GET",)),)
Make = Callable[..., Scene]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(passage, "_SILENCE_S", 0.01)
    with ExitStack() as stack:

        def made(*rules: NetworkRule, **limits: Any) -> Scene:
            hosts = ("127.0.0.0/8",) if rules else ("a.test", "127.0.0.0/8")
            policy = NetworkPolicy(allowed_hosts=hosts, rules=rules, limits=NetworkLimits(**limits))
            scene = Scene(policy)
            stack.callback(scene.close)
            return scene

        yield made


def ended(scene: Scene, seconds: float = 5) -> dict[str, Any]:
    """The event of the one connection, once it is over."""
    until = time.monotonic() + seconds
    while scene.sandbox.connections:
        assert time.monotonic() < until, "it does not end"
        scene.loop.run_until_done(sleep(0.005))
    (event,) = (each for each in scene.events if each["kind"] != "dns")
    return event


def is_reset(client: socket.socket) -> bool:
    try:
        return not client.recv(1)
    except ConnectionResetError:
        return True


def dialled(scene: Scene) -> socket.socket:
    while not scene._servers:
        scene.settle()
    scene.settle()
    (server,) = scene._servers
    return server


# -- clients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [HELLO[:40], HELLO[:3]])
@pytest.mark.parametrize("is_over", [True, False])
def test_half_a_hello_leads_nowhere(make: Make, said: bytes, is_over: bool) -> None:
    scene = make(header_s=20 if is_over else 0.1)
    with scene.begin(443, said) as client:
        if is_over:
            client.shutdown(socket.SHUT_WR)
        event = ended(scene)
        assert is_reset(client)
    assert ([], False) == (scene.dialled, event["allowed"])
    why = (
        "the client ended within its TLS ClientHello"
        if is_over
        else "no TLS ClientHello within 0.1 s"
    )
    assert why == event["reason"]


def test_who_ends_before_it_has_said_anything_is_not_waited_for(make: Make) -> None:
    scene = make()
    assert b"" == scene.say(443, [])
    assert ([], False) == (scene.dialled, scene.events[-1]["allowed"])
    assert "the client ended before its protocol was known" == scene.events[-1]["reason"]


@pytest.mark.parametrize("is_judged", [True, False])
def test_where_requests_are_judged_nothing_is_dialled_for_who_says_nothing(
    make: Make, is_judged: bool
) -> None:
    """A server is told of a connection only once a request to it is allowed."""
    scene = make(*(JUDGED if is_judged else ()), header_s=0.1)
    with scene.begin(443, b"") as client:
        event = ended(scene)
        assert is_reset(client)
    assert is_judged == (not scene.dialled)
    assert not event["allowed"]
    assert "not enough within 0.1 s to detect the protocol" == event["reason"]


@pytest.mark.parametrize(
    ("port", "said", "reason"),
    [
        (443, GET, "HTTP where only TLS may be spoken"),
        (80, HELLO, "TLS where only HTTP may be spoken"),
        (9000, GET, ""),
    ],
)
def test_http_and_tls_stay_at_their_ports(make: Make, port: int, said: bytes, reason: str) -> None:
    scene = make()
    heard = scene.say(port, [said])
    assert (not reason) == heard.startswith(b"GET /x?y=1 ") == bool(scene.dialled)
    assert scene.events[-1]["reason"].startswith(reason)


@pytest.mark.parametrize("has_terminator", [True, False])
def test_without_an_authority_no_tls_is_ended(make: Make, has_terminator: bool) -> None:
    scene = make(*JUDGED)
    scene.commons.terminator = SimpleNamespace() if has_terminator else None  # type: ignore[assignment]
    assert b"" == scene.say(443, [HELLO])
    assert "this sandbox has no certificate authority to end TLS" in scene.events[-1]["reason"]
    assert ([], False) == (scene.dialled, scene.events[-1]["allowed"])


def test_where_tls_is_ended_the_site_is_one_of_https_and_the_hello_still_to_be_read(
    make: Make,
) -> None:
    """Credentials are written into requests over TLS alone."""
    served: list[tuple[Any, ...]] = []

    async def serve(stream: Any, hello: Any, site: Any, authority: Any, _reach: Any) -> None:
        said = await stream.read(1 << 16)
        served.append((said, hello.server_name, site.scheme, site.host, site.port, authority))
        stream.close()

    scene = make(*JUDGED)
    authority: Any = object()
    scene.commons.terminator = SimpleNamespace(serve=serve)  # type: ignore[assignment]
    scene.sandbox.authority = authority
    scene.say(443, [HELLO])
    assert [(HELLO, "a.test", "https", "a.test", 443, authority)] == served


def test_who_is_refused_at_once_sees_a_reset(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """An end would be taken for all there is."""
    scene = make()
    monkeypatch.setattr(scene.commons, "has_room_for", lambda _sandbox: False)
    with scene.begin(9000, b"") as client, pytest.raises(ConnectionResetError):
        client.recv(1)


# -- servers -------------------------------------------------------------------------------------


def test_a_server_that_is_silent_after_a_hello_is_given_up_and_let_go(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connect(places: list[tuple[int, str]], port: int) -> tuple[socket.socket, str]:
        scene.sandbox.limits = NetworkLimits(connect_s=0.1)  # from here on
        return await scene._connect(places, port)

    scene = make()
    monkeypatch.setattr(reach, "connect", connect)
    with scene.begin(443, HELLO) as client:
        server = dialled(scene)
        assert HELLO == server.recv(1 << 16)
        event = ended(scene)
        assert is_reset(client)
    assert b"" == server.recv(1)
    assert (True, "nothing for 0.1 s") == (event["allowed"], event["reason"])


def test_what_is_told_while_a_server_is_dialled_is_kept_when_it_cannot_be_reached(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(*_: object) -> tuple[socket.socket, str]:
        await sleep(60)
        raise AssertionError

    async def refusing(*_: object) -> tuple[socket.socket, str]:
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))

    for connect, why, address in (
        (silent, "nothing for 0.05 s", ""),
        (refusing, "Connection refused", "127.0.0.1"),
    ):
        scene = make(connect_s=30 if address else 0.05)
        monkeypatch.setattr(reach, "connect", connect)
        with scene.begin(9000, b"\0raw") as client:
            event = ended(scene)
            assert is_reset(client)
        assert (True, why) == (event["allowed"], event["reason"])
        assert event["address"] in (address, "127.0.0.1")


def test_why_a_name_cannot_be_resolved_is_on_record(make: Make) -> None:
    def fail(_name: str) -> Any:
        raise OSError(-2, "Name or service not known")

    scene = make()
    scene.commons.resolver._look_up = fail
    assert b"" == scene.say(9000, [b"\0raw"])
    assert "Name or service not known" == scene.events[-1]["reason"]


def test_half_an_answer_ends_for_its_client_with_a_reset(make: Make) -> None:
    scene = make()
    with scene.begin(80, GET) as client:
        server = dialled(scene)
        scene.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
        server.shutdown(socket.SHUT_WR)
        ended(scene)
        assert client.recv(1 << 16).endswith(b"half")
        with pytest.raises(ConnectionResetError):
            client.recv(1)


# -- what is counted -----------------------------------------------------------------------------


def test_a_request_and_its_answer_are_counted_where_they_are_read(make: Make) -> None:
    scene = make()
    began = time.time()
    with scene.begin(80, GET) as client:
        dialled(scene)
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
        heard = time.time()
        scene.answer(answer)
        assert client.recv(1 << 16).endswith(b"hello")
        client.shutdown(socket.SHUT_WR)
        event = ended(scene)
    assert (len(GET), len(answer)) == (event["bytes_out"], event["bytes_in"])
    assert len(GET) + len(answer) == scene.sandbox.meter.moved_bytes
    assert ("GET", "/x?y=1") == (event["method"], event["path"])
    assert began <= event["time"] <= heard, "it is when it came, not when it ended"
    assert 0 < event["duration_s"] <= time.time() - began + 0.1


def test_no_hello_is_passed_on_once_all_bytes_are_used_up(make: Make) -> None:
    scene = make()
    for rest in (None, scene.sandbox.meter.moved_bytes):
        scene.sandbox.meter.limit(rest, None)
        heard = scene.say(443, [HELLO])
        assert (HELLO if rest is None else b"") == heard
        scene.sandbox.meter.limit(None, None)
        scene.sandbox.meter.moved_bytes = 0
    assert "network bytes" in scene.events[-1]["reason"]


def test_time_without_a_word_is_that_of_the_policy_and_no_other(make: Make) -> None:
    scene = make(idle_s=0.05, header_s=30, connect_s=30)
    with scene.begin(9000, b"\0raw") as client:
        dialled(scene)
        event = ended(scene)
        assert is_reset(client)
    assert "idle for too long" == event["reason"]


def test_a_connection_into_a_sandbox_stays_whatever_its_policy_says(make: Make) -> None:
    scene = make()
    (client, one), (server, other) = tcp_pair(), tcp_pair()
    with client, server:
        Inbound(scene.sandbox, one, other).start()
        scene.change(NetworkPolicy(allowed_hosts=("b.test",)))
        scene.settle()
        client.sendall(b"still")
        scene.settle()
        server.settimeout(30)
        assert b"still" == server.recv(9)
    scene.settle()
