"""What has been held until it was told apart is judged by the policy of then, not by that of its beginning."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence import NetworkLimits, NetworkPolicy
from ringfence.egress import passage
from ringfence.egress.first import HOLD, PASS, RAW
from ringfence.egress.gate import Gate
from ringfence.egress.io.loop import sleep
from tests.egress.one_sandbox import Scene


@pytest.mark.parametrize("is_ended", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_what_is_neither_tls_nor_http_passes_only_where_requests_are_not_judged(
    is_ended: bool, waits: bool
) -> None:
    passed: list[bytes] = []
    cut: list[str] = []
    relay = SimpleNamespace(start_out=passed.append, cut=cut.append)
    sandbox = SimpleNamespace(terminates=lambda *_: is_ended)
    connection = SimpleNamespace(sandbox=sandbox, host="a.example", port=9000, is_opaque=False)
    gate: Any = Gate.__new__(Gate)
    gate._connection, gate._relay, gate._patience = connection, relay, object() if waits else None

    gate._pass_on(b"raw")

    assert connection.is_opaque is (not is_ended and not waits)
    assert ([b"raw"] if connection.is_opaque else []) == passed
    assert len(cut) == (not connection.is_opaque)


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize(
    ("more", "kind", "verb", "is_decided"),
    [
        (b"more", RAW, "start_out", True),
        (b"more", PASS, "hand_over", False),
        (b"more", HOLD, "", False),
        (b"", HOLD, "start_out", True),
    ],
)
def test_what_was_held_goes_on_as_a_whole_and_else_what_came(
    held: bool, more: bytes, kind: str, verb: str, is_decided: bool
) -> None:
    """Handed over where what follows is still to be looked at; passed on for good where it is not."""
    done: list[tuple[str, bytes]] = []
    gate: Any = Gate.__new__(Gate)
    gate._relay = SimpleNamespace(
        start_out=lambda data: done.append(("start_out", data)),
        hand_over=lambda data: done.append(("hand_over", data)),
    )
    sandbox = SimpleNamespace(terminates=lambda *_: False)
    gate._connection = SimpleNamespace(sandbox=sandbox, host="a.example", port=9000)
    gate._patience, gate._limit = None, lambda: None
    opening = SimpleNamespace(verdict=HOLD if held else PASS, data=b"whole", objection="")
    opening.feed = lambda _: kind
    gate._opening = opening

    assert is_decided == gate._decide(more)

    assert ([(verb, b"whole" if held else more)] if verb else []) == done


# -- while both sides may speak first ------------------------------------------------------------

HEADER_S = 0.1
HTTP = b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n"
Make = Callable[..., Scene]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(passage, "_SILENCE_S", 0.01)
    with ExitStack() as stack:

        def made(**limits: Any) -> Scene:
            allowed = NetworkLimits(**{"header_s": HEADER_S, **limits})
            scene = Scene(NetworkPolicy(allowed_hosts=("a.test", "127.0.0.0/8"), limits=allowed))
            stack.callback(scene.close)
            return scene

        yield made


def wait(scene: Scene, seconds: float = 2 * HEADER_S) -> None:
    scene.loop.run_until_done(sleep(seconds))


def dialled(scene: Scene) -> None:
    """Wait until a server was dialled: its name is looked up in a thread."""
    while not scene._servers:
        scene.settle()


def ends(scene: Scene) -> list[str]:
    return [each["reason"] for each in scene.events if each["kind"] != "dns"]


@pytest.mark.anyone
@pytest.mark.parametrize("port", [443, 80])
def test_a_server_that_speaks_first_has_as_long_as_it_likes_from_then_on(
    make: Make, port: int
) -> None:
    """Then it speaks neither TLS nor HTTP, and there is nothing to wait for."""
    scene = make()
    with scene.begin(port, b"") as client:
        dialled(scene)
        scene.answer(b"220 hello")
        assert b"220 hello" == client.recv(99)
        wait(scene)
        assert [] == ends(scene)
        client.sendall(b"\0raw")
        scene.settle()
        assert b"\0raw" == scene._hear()
        scene.answer(b"and more")
        assert b"and more" == client.recv(99)
        wait(scene)
        assert [] == ends(scene)


@pytest.mark.anyone
@pytest.mark.parametrize(
    ("said", "is_done"), [(b"\0raw", True), (b"hello world\n", True), (b"hello", False)]
)
@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("port", [443, 9000])
def test_what_a_client_says_before_its_server_waits_only_where_tls_is_expected(
    make: Make, port: int, is_slow: bool, said: bytes, is_done: bool
) -> None:
    """Then it is passed on as a whole; what was not told apart yet is looked at further."""
    scene = make(header_s=5.0)
    with scene.begin(port, b"" if is_slow else said) as client:
        dialled(scene)
        if is_slow:
            client.sendall(said)
        if port == 443:
            scene.settle()
            assert b"" == scene._hear(), "one that speaks TLS would not speak first"
            scene.answer(b"220 hello")
            assert b"220 hello" == client.recv(99)
        scene.settle()
        assert said == scene._hear()
        (connection,) = scene.sandbox.connections
        assert is_done == connection.is_opaque, "by a policy that judges requests it is cut"
        client.sendall(b" HTTP/1.1\r\n")
        scene.settle()
        if is_done:
            assert b" HTTP/1.1\r\n" == scene._hear()
            assert [] == ends(scene)
        else:
            with pytest.raises(ConnectionResetError):
                client.recv(1)
            assert b"" == scene._hear()
            (reason,) = ends(scene)
            assert "HTTP that starts like no client's" in reason


@pytest.mark.anyone
@pytest.mark.parametrize("said", [b"", b"\0raw"])
def test_neither_side_is_waited_for_without_end_where_only_tls_may_be_spoken(
    make: Make, said: bytes
) -> None:
    scene = make()
    with scene.begin(443, said) as client:
        dialled(scene)
        wait(scene)
        scene.settle()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    assert b"" == scene._hear(), "the server is told nothing before it spoke"
    (reason,) = ends(scene)
    assert ("TLS may be spoken" if said else "not enough within") in reason
    assert [False] == [each["allowed"] for each in scene.events if each["kind"] != "dns"]


@pytest.mark.anyone
@pytest.mark.parametrize("said", [HTTP, b"\x16\x03\x01\x00\x01"])
@pytest.mark.parametrize("port", [80, 9000])
def test_http_and_tls_are_cut_where_the_server_has_spoken_first(
    make: Make, said: bytes, port: int
) -> None:
    """A server behind another name may answer there: the request must be for the name."""
    scene = make()
    with scene.begin(port, b"") as client:
        dialled(scene)
        scene.answer(b"220 hello")
        assert b"220 hello" == client.recv(99)
        client.sendall(said)
        scene.settle()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    assert b"" == scene._hear()
    (reason,) = ends(scene)
    is_foreign = port == 80 and said is not HTTP
    assert ("where only HTTP may" if is_foreign else "has spoken first") in reason


@pytest.mark.anyone
@pytest.mark.parametrize("port", [80, 9000])
def test_http_of_a_client_that_was_slow_is_served_and_ends_with_its_sandbox(
    make: Make, port: int
) -> None:
    scene = make()
    with scene.begin(port, b"") as client:
        dialled(scene)
        client.sendall(HTTP)
        scene.settle()
        assert scene._hear().startswith(b"GET / HTTP/1.1\r\n")
        assert 1 == len(scene.dialled), "the server that was dialled already"
        wait(scene)
        scene.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
        assert client.recv(999).endswith(b"half")
        scene.sandbox.close()
        scene.settle()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    (server,) = scene._servers
    assert b"" == server.recv(1), "the server's side is closed as well"
    assert ["the sandbox is gone"] == ends(scene)
    assert 0 == scene.commons.connections


@pytest.mark.anyone
def test_half_of_something_is_not_waited_for_and_what_is_told_apart_is(make: Make) -> None:
    scene = make()
    with scene.begin(9000, b"GE") as half:
        dialled(scene)
        wait(scene)
        scene.settle()
        with pytest.raises(ConnectionResetError):
            half.recv(1)
    assert ["the client's protocol cannot be detected"] == ends(scene)
    with scene.begin(9000, b"GE") as client:
        while len(scene._servers) < 2:
            scene.settle()
        client.sendall(b"LLO")
        scene.settle()
        assert b"GELLO" == scene._hear()
        wait(scene)
        assert 1 == len(ends(scene)), "a client may say nothing for long"
        client.sendall(b" world\n")
        scene.settle()
        assert b" world\n" == scene._hear()


@pytest.mark.anyone
@pytest.mark.parametrize("says", [b"x", b""])
def test_where_all_bytes_are_used_up_only_an_end_is_let_through(make: Make, says: bytes) -> None:
    scene = make()
    with scene.begin(9000, b"") as client:
        dialled(scene)
        meter = scene.sandbox.meter
        meter.limit(meter.moved_bytes, None)
        if says:
            client.sendall(says)
        else:
            client.shutdown(socket.SHUT_WR)
        scene.settle()
        (server,) = scene._servers
        assert b"" == server.recv(9), "it ends or is cut"
        if says:
            with pytest.raises(ConnectionResetError):
                client.recv(1)
            assert ["the sandbox has used up its network bytes"] == ends(scene)
        else:
            assert [] == ends(scene), "the server may still end in order"


@pytest.mark.anyone
def test_whatever_a_client_says_it_waits_for_the_meter_once(make: Make) -> None:
    """Else each of its packets would be work at every look at the rate, for as long as there is none."""
    scene = make()
    with scene.begin(9000, b"") as client:
        dialled(scene)
        meter = scene.sandbox.meter
        meter.limit(None, 1)
        meter.count(100)
        for _ in range(20):
            client.sendall(b"x")
            scene.loop.run_until_done(sleep(0.001))
            assert len(meter._waiting) <= 1
        assert b"" == scene._hear()
        meter.limit(None, None)
        wait(scene)
        scene.settle()
        assert b"x" * 20 == scene._hear()
