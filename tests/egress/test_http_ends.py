"""How an exchange ends when one side stops, goes away or does not listen: what the others get."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from ringfence.egress.http import exchange as exchanges
from ringfence.egress.http.exchange import BrokenOff, exchange
from ringfence.egress.io.loop import sleep
from ringfence.egress.io.streams import SocketStream
from ringfence.egress.refused import Refused
from ringfence.model.net.network import NetworkLimits
from tests.egress.scene import (
    ANSWER,
    Outcome,
    Script,
    a_site,
    all_of,
    answering,
    play,
    saying,
    until,
)
from tests.egress.smuggling import TE, head, post
from tests.egress.test_http import SWITCHED, WEBSOCKET

if TYPE_CHECKING:
    from ringfence.egress.io.streams import Stream

pytestmark = pytest.mark.anyone


def ending(request: bytes) -> Callable[[Outcome], Script]:
    """A client that says `request`, ends its side and reads."""

    def make(outcome: Outcome) -> Script:
        async def talk(stream: Stream) -> None:
            await stream.write(request)
            await stream.end()
            outcome.received = await all_of(stream)
            stream.close()

        return talk

    return make


def listening(outcome: Outcome) -> Script:
    """A server that says nothing."""

    async def serve(stream: Stream) -> None:
        outcome.served = await all_of(stream)
        stream.close()

    return serve


@pytest.mark.parametrize(
    "request_",
    [post(b"Content-Length: 10") + b"half", post(TE) + b"5\r\nhel", post(TE) + b"5\r\nhello\r\n"],
)
def test_a_body_that_ends_early_is_not_taken_for_a_whole(request_: bytes) -> None:
    outcome = play(ending(request_), listening, a_site())

    assert "the connection ended inside a body" == outcome.reason
    assert outcome.received.startswith(b"HTTP/1.1 400 ")
    assert outcome.served is not None
    assert outcome.served.endswith(b"<reset>")


def test_a_server_that_closed_after_its_answer_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the rest of the body cannot be sent any more."""

    def server(outcome: Outcome) -> Script:
        async def serve(stream: Stream) -> None:
            outcome.served = await until(stream, b"\r\n\r\n")
            await stream.write(ANSWER)
            stream.close()

        return serve

    def client(outcome: Outcome) -> Script:
        async def talk(stream: Stream) -> None:
            await stream.write(post(b"Content-Length: 30"))
            for _ in range(3):
                await sleep(0.02)
                await stream.write(b"x" * 10)
            outcome.received = await all_of(stream)
            stream.close()

        return talk

    outcome = play(client, server, a_site())

    assert outcome.received.endswith(b"hello")
    assert outcome.error is None


@pytest.mark.parametrize("request_", [head(), post(b"Content-Length: 5") + b"hello"])
def test_a_server_that_is_gone_before_the_request_is_sent_is_told_of(request_: bytes) -> None:
    def gone(_outcome: Outcome) -> Script:
        async def serve(stream: Stream) -> None:
            stream.abort()

        return serve

    outcome = play(saying(request_), gone, a_site())

    assert outcome.reason.startswith("the server closed the connection: ")
    assert outcome.received.startswith(b"HTTP/1.1 502 ")


def test_an_answer_is_heard_though_the_rest_of_the_body_could_not_be_sent() -> None:
    """The server closed in between, and what it has said was not read yet."""
    servers: list[Stream] = []

    def server(outcome: Outcome) -> Script:
        async def serve(stream: Stream) -> None:
            outcome.served = await until(stream, b"\r\n\r\n")
            servers.append(stream)

        return serve

    def client(outcome: Outcome) -> Script:
        async def talk(stream: Stream) -> None:
            await stream.write(post(b"Content-Length: 30"))
            while not servers:
                await sleep(0.001)
            await stream.write(b"x" * 10)
            await servers[0].write(ANSWER)
            servers[0].abort()
            outcome.received = await all_of(stream)
            stream.close()

        return talk

    outcome = play(client, server, a_site())

    assert outcome.received.endswith(b"hello")
    assert outcome.error is None


def test_a_client_that_does_not_read_is_not_waited_for_without_end() -> None:
    def client(outcome: Outcome) -> Script:
        async def talk(stream: Stream) -> None:
            await stream.write(head())
            while not isinstance(outcome.error, TimeoutError):
                await sleep(0.01)
            outcome.received = await all_of(stream)
            stream.close()

        return talk

    size = 30_000_000
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + bytes(size)
    limits = NetworkLimits(idle_s=0.2)
    outcome = play(client, _as_far_as_it_goes(answer), a_site(limits=limits))

    assert outcome.received.endswith(b"<reset>")
    assert outcome.served is not None
    assert outcome.served.endswith(b"<reset>")


def _as_far_as_it_goes(answer: bytes) -> Callable[[Outcome], Script]:
    def make(outcome: Outcome) -> Script:
        async def serve(stream: Stream) -> None:
            outcome.served = await until(stream, b"\r\n\r\n")
            try:
                await stream.write(answer)
            except OSError:
                outcome.served += b"<reset>"
            stream.close()

        return serve

    return make


@pytest.mark.parametrize(
    ("error", "status"), [(TimeoutError(), 504), (OSError(111, "Connection refused"), 502)]
)
def test_a_server_that_is_not_reached(error: OSError, status: int) -> None:
    async def fails() -> Stream:
        raise error

    async def middle(stream: Stream, site: object, _reach: object) -> None:
        await exchange(stream, site, fails)  # type: ignore[arg-type]

    outcome = play(saying(head()), listening, a_site(), middle)

    assert outcome.received.startswith(b"HTTP/1.1 %d " % status)
    assert isinstance(outcome.error, Refused)
    assert status == outcome.error.status
    assert outcome.served is None


def test_once_a_part_of_the_answer_was_seen_a_refusal_breaks_it_off() -> None:
    """Nothing of what is said of it could be told from the answer."""
    interim = b"HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n"
    outcome = play(saying(head()), answering(interim + b"nonsense\r\n\r\n"), a_site())

    assert interim + b"<reset>" == outcome.received
    assert isinstance(outcome.error, BrokenOff)
    assert 502 == outcome.error.status


def test_an_answer_that_ends_with_its_connection_is_one_for_a_client_of_secrets_too() -> None:
    secrets = {"KEY": "hunter2-and-more"}
    answer = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\nzipped"
    outcome = play(saying(head()), answering(answer), a_site(secrets=secrets))
    assert outcome.received.startswith(b"HTTP/1.1 502 ")

    for plain in (b"", b"Content-Encoding: identity\r\n"):
        answer = b"HTTP/1.1 200 OK\r\n" + plain + b"\r\n<hunter2-and-more>hunt"
        outcome = play(saying(head()), answering(answer), a_site(secrets=secrets))
        assert outcome.received.endswith(b"\r\n\r\n<****************>hunt")
    # Without a body there is nothing to look into.
    nothing = b"HTTP/1.1 304 Not Modified\r\nContent-Encoding: gzip\r\n\r\n"
    outcome = play(saying(head()), answering(nothing), a_site(secrets=secrets))
    assert outcome.received.startswith(b"HTTP/1.1 304 ")


def test_a_client_that_goes_on_talking_is_parted_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "_DRAIN_BYTES", 1000)

    def client(outcome: Outcome) -> Script:
        async def talk(stream: Stream) -> None:
            await stream.write(b"nonsense\r\n\r\n")
            outcome.received = await until(stream, b"\n\n")
            try:
                while True:
                    await stream.write(b"x" * 500)
                    await sleep(0.001)
            except OSError:
                outcome.served = b"parted"
            stream.close()

        return talk

    began = time.monotonic()
    outcome = play(client, listening, a_site())

    assert b"parted" == outcome.served
    assert outcome.received.startswith(b"HTTP/1.1 400 ")
    assert time.monotonic() - began < 0.9, "not the whole second"


class TestWebSockets:
    @staticmethod
    def server(outcome: Outcome) -> Script:
        """One that ends its side first."""

        async def serve(stream: Stream) -> None:
            outcome.served = await until(stream, b"\r\n\r\n")
            await stream.write(SWITCHED + b"first")
            await stream.end()
            outcome.served += await all_of(stream)
            stream.close()

        return serve

    @staticmethod
    def client(outcome: Outcome) -> Script:
        async def talk(stream: Stream) -> None:
            await stream.write(WEBSOCKET)
            outcome.received = await all_of(stream)
            await stream.write(b"afterwards")
            await stream.end()
            stream.close()

        return talk

    def test_each_side_may_end_and_hear_the_other(self) -> None:
        outcome = play(self.client, self.server, a_site())

        assert outcome.received.endswith(b"\r\n\r\nfirst")
        assert outcome.served is not None
        assert outcome.served.endswith(b"\r\n\r\nafterwards")
        assert outcome.error is None

    def test_what_is_said_before_the_switch_waits_for_it_and_arrives(self) -> None:
        def client(outcome: Outcome) -> Script:
            async def talk(stream: Stream) -> None:
                await stream.write(WEBSOCKET + b"early")
                await sleep(0.02)
                await stream.write(b"soon")
                outcome.received = await until(stream, b"first")
                await stream.end()
                stream.close()

            return talk

        def server(outcome: Outcome) -> Script:
            async def serve(stream: Stream) -> None:
                outcome.served = await until(stream, b"\r\n\r\n")
                await sleep(0.04)
                await stream.write(SWITCHED + b"first")
                outcome.served += await all_of(stream)
                stream.close()

            return serve

        outcome = play(client, server, a_site())

        assert outcome.served is not None
        assert outcome.served.endswith(b"\r\n\r\nearlysoon")

    def test_it_is_cut_when_nothing_moves(self) -> None:
        def client(outcome: Outcome) -> Script:
            async def talk(stream: Stream) -> None:
                await stream.write(WEBSOCKET)
                outcome.received = await all_of(stream)
                stream.close()

            return talk

        def server(outcome: Outcome) -> Script:
            async def serve(stream: Stream) -> None:
                outcome.served = await until(stream, b"\r\n\r\n")
                await stream.write(SWITCHED)
                outcome.served += await all_of(stream)
                stream.close()

            return serve

        outcome = play(client, server, a_site(limits=NetworkLimits(idle_s=0.1)))

        assert "idle for too long" == outcome.reason
        assert outcome.received.endswith(b"<reset>")
        assert outcome.served is not None
        assert outcome.served.endswith(b"<reset>")


def test_streams_are_closed_whoever_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[SocketStream] = []
    plain = SocketStream.__init__

    def noting(self: SocketStream, *args: object) -> None:
        plain(self, *args)  # type: ignore[arg-type]
        made.append(self)

    def gone(request: bytes) -> Callable[[Outcome], Script]:
        def make(_outcome: Outcome) -> Script:
            async def talk(stream: Stream) -> None:
                await stream.write(request)
                await sleep(0.02)
                stream.abort()

            return talk

        return make

    monkeypatch.setattr(SocketStream, "__init__", noting)
    for request in (head()[:-2], post(b"Content-Length: 5") + b"x", head()):
        assert isinstance(play(gone(request), listening, a_site()).error, OSError)
    play(ending(post(b"Content-Length: 5") + b"x"), listening, a_site())

    assert all(-1 == stream.socket.fileno() for stream in made)
