"""A preview of a server inside: the fields that pass, the ends of an exchange, and what each gives back."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from ringfence.api.loop_share import LoopShare
from ringfence.api.streaming import preview
from ringfence.api.streaming.breaking import BreakableResponse, BrokenOff
from ringfence.api.streaming.preview import Answer, answer_fields, ask, request_fields
from ringfence.errors import ConnectError, TimeoutExceeded

pytestmark = pytest.mark.anyone

HOP = b"connection keep-alive proxy-connection te trailer transfer-encoding upgrade".split()
"""Fields of one connection."""
CREDENTIALS = b"authorization proxy-authorization x-api-key cookie".split()
PLACES = b"host origin referer expect".split()
OF_THE_ORIGIN = (
    b"set-cookie clear-site-data strict-transport-security alt-svc nel report-to reporting-endpoints"
    b" service-worker-allowed content-security-policy content-security-policy-report-only"
    b" referrer-policy x-content-type-options date server access-control-allow-origin"
    b" access-control-allow-credentials access-control-expose-headers"
).split()


@pytest.mark.parametrize("name", [*HOP, *CREDENTIALS, *PLACES])
def test_a_server_inside_does_not_see_what_is_the_apis(name: bytes) -> None:
    for spelled in (name, name.title(), name.upper()):
        found = request_fields([(spelled, b"secret"), (b"x-own", b"kept")], 8000)
        assert b"secret" not in [value for _, value in found], spelled
        assert (b"x-own", b"kept") in found
    assert (b"host", b"localhost:8000") == found[0]
    assert (b"connection", b"close") == found[-1]


@pytest.mark.parametrize("name", [*HOP, b"x-token", *CREDENTIALS])
def test_where_a_sandbox_has_an_origin_only_what_is_withheld_is_hidden(name: bytes) -> None:
    given = [(b"Host", b"sandbox.example"), (name, b"value"), (b"cookie", b"a=b")]
    found = request_fields(given, 8000, frozenset([b"x-token"]))

    assert (name in (*HOP, b"x-token")) == (b"value" not in [value for _, value in found])
    assert (b"Host", b"sandbox.example") == found[0]
    assert (b"cookie", b"a=b") in found


def test_a_body_has_one_length() -> None:
    """Two ways to say where it ends are how requests are smuggled."""
    given = [(b"Transfer-Encoding", b"gzip, chunked"), (b"Content-Length", b"5")]
    found = request_fields(given, 80)
    assert [(b"transfer-encoding", b"chunked")] == [
        each for each in found if each[0].lower() in (b"transfer-encoding", b"content-length")
    ]
    assert (b"Content-Length", b"5") in request_fields(given[1:], 80), "the control"


@pytest.mark.parametrize("name", [*HOP, *OF_THE_ORIGIN])
def test_a_server_inside_speaks_for_itself_and_not_for_the_api(name: bytes) -> None:
    found = answer_fields([(name, b"planted"), (b"x-own", b"kept")], 8000, b"/p")

    assert b"planted" not in [value for _, value in found]
    assert (b"x-own", b"kept") in found
    policies = dict(found[-2:])
    assert b"no-referrer" == policies[b"referrer-policy"]
    words = policies[b"content-security-policy"].split()
    assert b"sandbox" == words[0]
    assert not {b"allow-same-origin", b"allow-top-navigation", b"allow-downloads"} & {*words}


@pytest.mark.parametrize("name", [b"location", b"content-location"])
def test_places_of_an_answer_are_below_the_preview(name: bytes) -> None:
    assert (name, b"/p/x") == answer_fields([(name, b"/x")], 8000, b"/p")[0]
    assert (b"x-place", b"/x") == answer_fields([(b"x-place", b"/x")], 8000, b"/p")[0]


@pytest.mark.parametrize(
    ("place", "found"),
    [
        (b"http://localhost:8000", b"/p"),
        (b"http://127.0.0.1:8000/x?y", b"/p/x?y"),
        (b"http://[::1]:8000?y", b"/p?y"),
        (b"http://localhost:80001/x", b"http://localhost:80001/x"),
        (b"http://localhost:800/x", b"http://localhost:800/x"),
        (b"http://localhost:8000.evil.test/", b"http://localhost:8000.evil.test/"),
        (b"http://localhost:8000@evil.test/", b"http://localhost:8000@evil.test/"),
        (b"https://localhost:8000/x", b"https://localhost:8000/x"),
        (b"//evil.test/x", b"//evil.test/x"),
        (b"/", b"/p/"),
        (b"x/y", b"x/y"),
        (b"", b""),
    ],
)
def test_only_places_on_the_port_itself_are_moved(place: bytes, found: bytes) -> None:
    assert found == preview.located(place, 8000, b"/p")


# -- an exchange -----------------------------------------------------------------------------------


async def nothing() -> AsyncIterator[bytes]:
    return
    yield b""


class Exchange:
    """A request to a server inside, of which this test is the server."""

    def __init__(self) -> None:
        self.ours, theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.inside = theirs
        self.client_is_gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def ask(
        self, body: AsyncIterator[bytes] | None = None, fields: preview.Fields | None = None
    ) -> Answer:
        async def gone() -> None:
            await self.client_is_gone

        return await ask(
            self.inside,
            8000,
            "POST",
            b"/x",
            fields or [],
            body or nothing(),
            b"/p",
            LoopShare(),
            gone,
        )

    async def say(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.ours, data)

    async def hear(self, until: bytes) -> bytes:
        """Read what came up to a text; all of it where the connection ends first."""
        found = b""
        while until not in found:
            try:
                data = await asyncio.get_running_loop().sock_recv(self.ours, 1 << 16)
            except ConnectionError:
                break
            if not data:
                break
            found += data
        return found

    async def is_closed(self) -> bool:
        """Wait until the other end has closed."""
        async with asyncio.timeout(20):
            await self.hear(b"never said")
        return True


def run(scene: Callable[[Exchange], Awaitable[None]]) -> None:
    """Play a scene, and check that every descriptor is given back."""

    async def main() -> int:
        before = len(os.listdir("/proc/self/fd"))
        exchange = Exchange()
        await scene(exchange)
        assert await exchange.is_closed()
        exchange.ours.close()
        for _ in range(3):
            await asyncio.sleep(0)
        return len(os.listdir("/proc/self/fd")) - before

    assert 0 == asyncio.run(main())


def test_an_answer_passes_with_its_body_and_closes_its_connection() -> None:
    async def scene(exchange: Exchange) -> None:
        async def body() -> AsyncIterator[bytes]:
            yield b"one"
            yield b""
            yield b"two"

        asked = asyncio.ensure_future(exchange.ask(body(), [(b"content-length", b"6")]))
        heard = await exchange.hear(b"onetwo")
        assert heard.startswith(b"POST /x HTTP/1.1\r\n")
        await exchange.say(b"HTTP/1.1 207 Yes\r\nContent-Length: 4\r\nX-Own: a\r\n\r\nbody")
        answer = await asked
        assert (207, b"a") == (answer.status, dict(answer.fields)[b"x-own"])
        assert b"body" == b"".join([piece async for piece in answer.body])

    run(scene)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 600 No\r\n\r\n",
        b"HTTP/1.1 999 No\r\n\r\n",
        b"HTTP/1.1 20",
    ],
)
def test_what_is_no_answer_is_an_error_of_the_server_inside(said: bytes) -> None:
    async def scene(exchange: Exchange) -> None:
        asked = asyncio.ensure_future(exchange.ask())
        await exchange.hear(b"\r\n\r\n")
        if said:
            await exchange.say(said)
        exchange.ours.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectError, match="port 8000 does not speak HTTP"):
            await asked

    run(scene)


@pytest.mark.parametrize("status", [200, 304, 404, 599])
def test_each_status_of_http_passes(status: int) -> None:
    async def scene(exchange: Exchange) -> None:
        asked = asyncio.ensure_future(exchange.ask())
        await exchange.hear(b"\r\n\r\n")
        await exchange.say(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % status)
        answer = await asked
        assert status == answer.status
        assert [] == [piece async for piece in answer.body]

    run(scene)


def test_a_server_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preview, "_ANSWER_S", 0.01)

    async def scene(exchange: Exchange) -> None:
        with pytest.raises(TimeoutExceeded):
            await exchange.ask()

    run(scene)


def test_a_head_is_as_long_as_it_may_be_and_no_longer() -> None:
    async def scene(exchange: Exchange) -> None:
        asked = asyncio.ensure_future(exchange.ask())
        await exchange.hear(b"\r\n\r\n")
        await exchange.say(b"HTTP/1.1 200 X\r\nx: " + b"y" * (40 << 10))
        with pytest.raises(ConnectError):
            await asked

    run(scene)


def test_small_chunks_come_together_and_none_waits_for_the_next() -> None:
    async def scene(exchange: Exchange) -> None:
        asked = asyncio.ensure_future(exchange.ask())
        await exchange.hear(b"\r\n\r\n")
        await exchange.say(b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n")
        body = (await asked).body
        for said, found in (
            (b"3\r\none\r\n", b"one"),
            (b"1\r\na\r\n1\r\nb\r\n1\r\nc\r\n", b"abc"),
            (b"1\r\nd\r\n1\r\ne\r\n0\r\n\r\n", b"de"),
        ):
            await exchange.say(said)
            assert found == await asyncio.wait_for(anext(body), 20)
        assert [] == [piece async for piece in body]

    run(scene)


@pytest.mark.parametrize("count", [1, 8, 9])
def test_so_many_interim_answers_come_before_the_answer(count: int) -> None:
    async def scene(exchange: Exchange) -> None:
        asked = asyncio.ensure_future(exchange.ask())
        await exchange.hear(b"\r\n\r\n")
        await exchange.say(b"HTTP/1.1 103 Early\r\nx-early: 1\r\n\r\n" * count)
        await exchange.say(b"HTTP/1.1 200 X\r\nContent-Length: 2\r\n\r\nok")
        if count > 8:
            with pytest.raises(ConnectError):
                await asked
            return
        answer = await asked
        assert 200 == answer.status
        assert b"x-early" not in dict(answer.fields)
        assert b"ok" == b"".join([piece async for piece in answer.body])

    run(scene)


def test_a_body_that_breaks_off_breaks_off_for_the_client_too() -> None:
    async def scene(exchange: Exchange) -> None:
        asked = asyncio.ensure_future(exchange.ask())
        await exchange.hear(b"\r\n\r\n")
        await exchange.say(b"HTTP/1.1 200 X\r\nContent-Length: 9\r\n\r\nhalf")
        answer = await asked
        exchange.ours.shutdown(socket.SHUT_WR)
        with pytest.raises(BrokenOff):
            [piece async for piece in answer.body]

    run(scene)


@pytest.mark.parametrize("ends", ["the client goes", "its body breaks off", "it is cancelled"])
def test_a_request_ends_with_its_client(ends: str) -> None:
    """The server inside is to notice: half a request is none."""

    async def scene(exchange: Exchange) -> None:
        async def breaks_off() -> AsyncIterator[bytes]:
            yield b"half"
            raise ClientDisconnect

        body = breaks_off() if ends == "its body breaks off" else None
        asked = asyncio.ensure_future(
            exchange.ask(body, [(b"content-length", b"9")] if body else [])
        )
        await exchange.hear(b"\r\n\r\n")
        if ends == "the client goes":
            exchange.client_is_gone.set_result(None)
        elif ends == "it is cancelled":
            asked.cancel()
        assert await exchange.is_closed()
        with pytest.raises((ConnectError, asyncio.CancelledError)):
            await asked

    run(scene)


def test_a_server_may_answer_before_it_has_read_all() -> None:
    async def scene(exchange: Exchange) -> None:
        async def endless() -> AsyncIterator[bytes]:
            while True:
                yield bytes(1 << 16)

        asked = asyncio.ensure_future(exchange.ask(endless(), [(b"transfer-encoding", b"chunked")]))
        await exchange.say(b"HTTP/1.1 413 X\r\nContent-Length: 0\r\n\r\n")
        answer = await asked
        assert [] == [piece async for piece in answer.body]

    run(scene)


# -- to the client ---------------------------------------------------------------------------------


@pytest.mark.parametrize("breaks_off", [False, True])
def test_only_a_whole_body_has_an_end(breaks_off: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"one"
        if breaks_off:
            raise BrokenOff

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(BreakableResponse(pieces(), status_code=207).stream_response(send))
    start, first, *rest = sent
    assert ("http.response.start", 207) == (start["type"], start["status"])
    assert (b"one", True) == (first["body"], first["more_body"])
    assert ([] if breaks_off else [False]) == [each["more_body"] for each in rest]
