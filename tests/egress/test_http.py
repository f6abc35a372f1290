"""One request through: what the server gets, what the client gets, and what neither does."""

from __future__ import annotations

import errno
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import pytest

from ringfence.egress.http.exchange import BrokenOff, exchange
from ringfence.egress.http.head import parse_request
from ringfence.egress.http.scrub import Secrets
from ringfence.egress.http.site import Site
from ringfence.egress.io.loop import sleep
from ringfence.egress.io.streams import SocketStream
from ringfence.egress.refused import Refused
from ringfence.model.net.network import NetworkLimits
from ringfence.model.net.rules import NetworkRule
from tests.egress.scene import (
    ANSWER,
    QUICK,
    Outcome,
    Script,
    a_site,
    all_of,
    answering,
    play,
    saying,
    until,
)
from tests.egress.smuggling import CHUNKS, EVERY_HEAD, TE, head, post

if TYPE_CHECKING:
    from ringfence.egress.io.streams import Stream

pytestmark = pytest.mark.anyone

CLOSED = ANSWER.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
WEBSOCKET = head(
    b"Connection: Upgrade",
    b"Upgrade: websocket",
    b"Sec-WebSocket-Version: 13",
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    start=b"GET /socket HTTP/1.1",
)
SWITCHED = (
    b"HTTP/1.1 101 Switching Protocols\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n"
    b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
)
# Of servers' and gateways' own: all have an answer cut, coded, or written in other characters.
HIDING = (
    *("Range", "If-Range", "Request-Range", "X-Range", "x-ms-range", "Unless-Modified-Since"),
    *("A-IM", "IM", "Accept-Charset", "Want-Digest", "Want-Content-Digest", "Want-Repr-Digest"),
    *("Grpc-Accept-Encoding", "X-Accept-Encoding", "Sec-WebSocket-Extensions"),
)


def nobody(_outcome: Outcome) -> Script:
    async def serve(_stream: Stream) -> None:
        raise AssertionError("nobody should have come")

    return serve


class TestPassedOn:
    def test_a_request_and_its_answer(self) -> None:
        site = a_site()
        outcome = play(saying(head(b"A: b")), answering(ANSWER), site)

        assert (
            b"GET / HTTP/1.1\r\nHost: a.test\r\nA: b\r\nConnection: close\r\n\r\n" == outcome.served
        )
        assert (
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello"
            == outcome.received
        )
        assert outcome.error is None
        assert (200, "a.test") == (site.status, site.rule)
        assert site.request is not None
        assert "GET" == site.request.method

    def test_a_body_of_a_length(self) -> None:
        request = post(b"Content-Length: 5") + b"world"
        outcome = play(saying(request), answering(ANSWER, after=b"world"), a_site())

        assert outcome.served is not None
        assert outcome.served.endswith(b"Content-Length: 5\r\nConnection: close\r\n\r\nworld")
        assert CLOSED == outcome.received

    def test_a_body_in_chunks(self) -> None:
        request = post(TE) + b"3\r\nwor\r\n2\r\nld\r\n0\r\n\r\n"
        outcome = play(saying(request), answering(ANSWER, after=b"0\r\n\r\n"), a_site())

        assert outcome.served is not None
        body = outcome.served.partition(b"\r\n\r\n")[2]
        assert body in (b"5\r\nworld\r\n0\r\n\r\n", b"3\r\nwor\r\n2\r\nld\r\n0\r\n\r\n")

    def test_large_bodies_both_ways(self) -> None:
        size = 3_000_000
        request = post(b"Content-Length: %d" % size) + b"x" * (size - 3) + b"end"
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"y" * size
        outcome = play(saying(request), answering(answer, after=b"end"), a_site())

        assert outcome.served is not None
        assert size == len(outcome.served.partition(b"\r\n\r\n")[2])
        assert b"y" * size == outcome.received.partition(b"\r\n\r\n")[2]

    def test_an_answer_in_chunks(self) -> None:
        answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x\r\nhello\r\n0\r\nT: u\r\n\r\n"
        outcome = play(saying(head()), answering(answer), a_site())

        assert outcome.received.endswith(b"\r\n\r\n5\r\nhello\r\n0\r\n\r\n")

    def test_an_answer_in_chunks_for_http_1_0(self) -> None:
        answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
        request = head(start=b"GET / HTTP/1.0")
        outcome = play(saying(request), answering(answer), a_site())

        assert outcome.received == b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello"

    def test_an_answer_until_the_end(self) -> None:
        outcome = play(saying(head()), answering(b"HTTP/1.0 200 OK\r\n\r\nhello"), a_site())

        assert b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello" == outcome.received

    def test_an_answer_that_goes_on_after_its_end(self) -> None:
        """A server that keeps its connection open is not waited for, and a second answer is dropped."""
        outcome = play(saying(head()), answering(ANSWER + ANSWER), a_site())

        assert CLOSED == outcome.received

    def test_head_has_no_body(self) -> None:
        outcome = play(saying(head(start=b"HEAD / HTTP/1.1")), answering(ANSWER), a_site())

        assert outcome.received.endswith(b"Content-Length: 5\r\nConnection: close\r\n\r\n")

    def test_continue_comes_first(self) -> None:
        def client(outcome: Outcome) -> Script:
            async def talk(stream: Stream) -> None:
                await stream.write(post(b"Expect: 100-continue", b"Content-Length: 5"))
                outcome.received = await until(stream, b"\r\n\r\n")
                await stream.write(b"world")
                outcome.received += await all_of(stream)
                stream.close()

            return talk

        def server(outcome: Outcome) -> Script:
            async def serve(stream: Stream) -> None:
                outcome.served = await until(stream, b"\r\n\r\n")
                await stream.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                outcome.served += await until(stream, b"world")
                await stream.write(ANSWER)
                stream.close()

            return serve

        outcome = play(client, server, a_site())

        assert outcome.received == b"HTTP/1.1 100 Continue\r\n\r\n" + CLOSED
        assert outcome.served is not None
        assert outcome.served.endswith(b"\r\n\r\nworld")

    def test_an_answer_before_the_body_is_over(self) -> None:
        """The rest of the body is not waited for; the client still reads the answer."""
        answer = b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n"

        def server(outcome: Outcome) -> Script:
            async def serve(stream: Stream) -> None:
                outcome.served = await until(stream, b"\r\n\r\n")
                await stream.write(answer)
                await all_of(stream)
                stream.close()

            return serve

        outcome = play(saying(post(b"Content-Length: 900000") + b"x" * 800_000), server, a_site())

        assert outcome.received.startswith(b"HTTP/1.1 413 Too Large")
        assert not outcome.received.endswith(b"<reset>")
        assert outcome.error is None

    def test_a_client_may_end_its_side_first(self) -> None:
        def client(outcome: Outcome) -> Script:
            async def talk(stream: Stream) -> None:
                await stream.write(head())
                await stream.end()
                outcome.received = await all_of(stream)
                stream.close()

            return talk

        assert CLOSED == play(client, answering(ANSWER), a_site()).received

    def test_a_client_that_says_nothing(self) -> None:
        def client(_outcome: Outcome) -> Script:
            async def talk(stream: Stream) -> None:
                stream.close()

            return talk

        assert play(client, nobody, a_site()).error is None


class TestRefused:
    @pytest.mark.parametrize(
        ("data", "status"),
        [(d, s) for _, d, s in EVERY_HEAD if not d.startswith(b"CONNECT")],
        ids=[name for name, d, _ in EVERY_HEAD if not d.startswith(b"CONNECT")],
    )
    def test_smuggling_forms_never_reach_a_server(self, data: bytes, status: int) -> None:
        # Bare line ends may leave a head without an end: then that is what is refused.
        outcome = play(saying(data), nobody, a_site(limits=QUICK))

        assert isinstance(outcome.error, Refused)
        assert outcome.error.status in (status, 408)
        assert outcome.received.startswith(b"HTTP/1.1 %d " % outcome.error.status)
        assert b"Connection: close" in outcome.received
        assert not outcome.received.endswith(b"<reset>")

    def test_behind_a_request_nothing_is_passed_on(self) -> None:
        request = post(b"Content-Length: 5") + b"world" + head(start=b"GET /second HTTP/1.1")
        outcome = play(saying(request), answering(ANSWER, after=b"world"), a_site())

        assert outcome.served is not None
        assert outcome.served.endswith(b"\r\n\r\nworld")
        assert CLOSED == outcome.received

    @pytest.mark.parametrize("body", [d for _, d in CHUNKS], ids=[name for name, _ in CHUNKS])
    def test_odd_chunks_break_off(self, body: bytes) -> None:
        """The server never gets the last chunk: the request is not one."""
        outcome = play(saying(post(TE) + body), answering(b"", after=b"0\r\n\r\n"), a_site())

        assert outcome.served is not None
        assert b"0\r\n\r\n" not in outcome.served
        assert isinstance(outcome.error, Refused)
        assert outcome.received.startswith(b"HTTP/1.1 400 ")

    @pytest.mark.parametrize(
        "data",
        [
            head(host=b"Host: b.test"),
            head(host=b"Host: a.test.evil.test"),
            head(host=b"Host: a.test:81"),
            head(host=b"Host: 127.0.0.1"),
            head(start=b"GET http://b.test/ HTTP/1.1", host=b"Host: b.test"),
            head(start=b"GET http://a.test:81/ HTTP/1.1", host=b"Host: a.test:81"),
        ],
    )
    def test_another_host_than_the_connection_s(self, data: bytes) -> None:
        outcome = play(saying(data), nobody, a_site())

        assert "the connection for a.test:80" in outcome.reason
        assert outcome.received.startswith(b"HTTP/1.1 403 Forbidden\r\n")

    def test_connect_is_not_for_servers(self) -> None:
        data = head(start=b"CONNECT a.test:80 HTTP/1.1", host=b"Host: a.test:80")

        assert play(saying(data), nobody, a_site()).received.startswith(b"HTTP/1.1 405 ")

    def test_a_slow_head(self) -> None:
        outcome = play(saying(b"GET / HTTP/1.1\r\nHost: a.test\r\n"), nobody, a_site(limits=QUICK))

        assert outcome.received.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert "0.3 s" in outcome.reason

    def test_another_protocol_is_told_before_its_time_is_over(self) -> None:
        """Who speaks it waits for an answer, and says no more."""
        for said in (b"SSH-2.0-client\r\n", b"helo a.test\r\n", b"\x00\x01"):
            outcome = play(saying(said), nobody, a_site(limits=QUICK))
            assert outcome.received.startswith(b"HTTP/1.1 400 Bad Request\r\n")

    def test_a_head_that_drips(self) -> None:
        """The time is for all of it, not for each byte."""

        def client(outcome: Outcome) -> Script:
            async def talk(stream: Stream) -> None:
                for byte in head() * 100:
                    try:
                        await stream.write(bytes([byte]))
                    except OSError:
                        break
                    await sleep(0.05)
                outcome.received = await all_of(stream)
                stream.close()

            return talk

        assert 408 == getattr(play(client, nobody, a_site(limits=QUICK)).error, "status", 0)

    def test_a_long_head(self) -> None:
        limits = NetworkLimits(header_bytes=1000)
        outcome = play(saying(head(b"A: " + b"b" * 1000)), nobody, a_site(limits=limits))

        assert outcome.received.startswith(b"HTTP/1.1 431 ")

    def test_the_reason_is_told_without_controls(self) -> None:
        outcome = play(saying(head(host=b"Host: b.test")), nobody, a_site())

        assert outcome.received.endswith(
            b"\r\n\r\nringfence: the request is for b.test:80, and the connection for a.test:80\n"
        )

    def test_a_refusal_of_head_has_no_body(self) -> None:
        data = head(host=b"Host: b.test", start=b"HEAD / HTTP/1.1")

        assert play(saying(data), nobody, a_site()).received.endswith(b"\r\n\r\n")


RULES = (
    NetworkRule("a.test", methods=("GET",), paths=("/open/*",)),
    NetworkRule("a.test", action="deny", paths=("/open/secret*",)),
)


class TestRules:
    @pytest.mark.parametrize(
        "start",
        [b"GET /open/x HTTP/1.1", b"GET /open/x?a=/../b HTTP/1.1", b"GET /%6fpen/x HTTP/1.1"],
    )
    def test_what_a_rule_allows(self, start: bytes) -> None:
        assert CLOSED == play(saying(head(start=start)), answering(ANSWER), a_site(*RULES)).received

    @pytest.mark.parametrize(
        "start",
        [
            b"POST /open/x HTTP/1.1",
            b"GET / HTTP/1.1",
            b"GET /Open/x HTTP/1.1",
            b"GET /open/secret HTTP/1.1",
            b"GET /open/SECRETS HTTP/1.1",
            b"GET /open/../x HTTP/1.1",
            b"GET /open/%2e%2e/x HTTP/1.1",
            b"GET /open%2fx HTTP/1.1",
            b"GET //open/x HTTP/1.1",
            b"GET /open/;/../x HTTP/1.1",
            b"GET http://a.test/ HTTP/1.1",
            b"OPTIONS * HTTP/1.1",
        ],
    )
    def test_what_it_does_not(self, start: bytes) -> None:
        outcome = play(saying(head(start=start)), nobody, a_site(*RULES))

        assert outcome.received.startswith(b"HTTP/1.1 403 Forbidden\r\n")

    @pytest.mark.parametrize(
        "line",
        [
            b"X-HTTP-Method-Override: DELETE",
            b"x-http-method: DELETE",
            b"X_METHOD_OVERRIDE: PUT",
            b"X-Original-URL: /admin",
            b"X-Rewrite-URL: /admin",
        ],
    )
    def test_headers_that_would_change_what_was_judged(self, line: bytes) -> None:
        data = head(line, start=b"GET /open/x HTTP/1.1")

        assert "may change" in play(saying(data), nobody, a_site(*RULES)).reason
        # Where nothing depends on methods or paths, they are the client's business.
        assert CLOSED == play(saying(data), answering(ANSWER), a_site()).received

    def test_no_credential_goes_over_plain_http(self) -> None:
        rule = NetworkRule.from_json({"host": "a.test", "credential": {"secret": "KEY"}})
        site = a_site(rule, secrets={"KEY": "hunter2"})
        outcome = play(saying(head(b"Authorization: mine")), answering(ANSWER), site)

        assert outcome.served is not None
        assert b"hunter2" not in outcome.served
        assert b"Authorization: mine" in outcome.served


class TestServersThatFail:
    @pytest.mark.parametrize(
        ("answer", "words"),
        [
            (b"", "without an answer"),
            (b"SSH-2.0-x\r\n\r\n", "not HTTP"),
            (b"HTTP/1.1 200 OK\r\nA: b", "inside a head"),
            (b"HTTP/1.1 200 OK\r\nA : b\r\n\r\n", "plainest form"),
            (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 90 + b"B: " + b"x" * 70000, "65536 bytes"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello", "length"),
            (b"HTTP/1.1 100 Continue\r\n\r\n" * 40, "too many interim answers"),
            (SWITCHED, "switched to another protocol"),
        ],
    )
    def test_an_answer_that_is_none(self, answer: bytes, words: str) -> None:
        outcome = play(saying(head()), answering(answer), a_site())

        assert words in outcome.reason
        if b"100 Continue" not in answer:
            assert outcome.received.startswith(b"HTTP/1.1 502 Bad Gateway\r\n")

    @pytest.mark.parametrize(
        "answer",
        [
            b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nhello\r\n",
        ],
    )
    def test_half_an_answer_is_never_taken_for_a_whole(self, answer: bytes) -> None:
        outcome = play(saying(head()), answering(answer), a_site())

        assert outcome.received.endswith(b"<reset>")
        assert isinstance(outcome.error, BrokenOff)

    def test_nobody_there(self) -> None:
        async def unreachable() -> Stream:
            raise ConnectionRefusedError(111, "Connection refused")

        async def middle(stream: Stream, site: Site, _reach: object) -> None:
            await exchange(stream, site, unreachable)

        outcome = play(saying(head()), nobody, a_site(), middle)

        assert "cannot be reached: Connection refused" in outcome.reason
        assert outcome.received.startswith(b"HTTP/1.1 502 ")

    def test_a_server_whose_host_is_gone_is_told_as_such(self) -> None:
        """The kernel gives up on it in its own time, which is not ours that is over."""

        class Gone:
            def __init__(self, stream: Stream) -> None:
                self._stream = stream

            async def read(self, _most: int) -> bytes:
                raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

            def __getattr__(self, name: str) -> Any:
                return getattr(self._stream, name)

        async def middle(
            stream: Stream, site: Site, reach: Callable[[], Awaitable[Stream]]
        ) -> None:
            async def reach_it() -> Stream:
                return Gone(await reach())

            await exchange(stream, site, reach_it)

        outcome = play(saying(head()), answering(ANSWER), a_site(limits=QUICK), middle)

        assert "the server closed the connection: Connection timed out" == outcome.reason
        assert outcome.received.startswith(b"HTTP/1.1 502 ")

    def test_a_server_that_never_answers(self) -> None:
        def server(outcome: Outcome) -> Script:
            async def serve(stream: Stream) -> None:
                outcome.served = await all_of(stream)
                stream.close()

            return serve

        outcome = play(saying(head()), server, a_site(limits=QUICK))

        assert "idle" in outcome.reason
        assert outcome.received.startswith(b"HTTP/1.1 504 ")

    def test_an_upload_is_not_idle(self) -> None:
        """Longer than `idle_s`, though the server is silent all the while."""

        def client(outcome: Outcome) -> Script:
            async def talk(stream: Stream) -> None:
                await stream.write(post(b"Content-Length: 10"))
                for _ in range(10):
                    await sleep(0.1)
                    await stream.write(b"x")
                outcome.received = await all_of(stream)
                stream.close()

            return talk

        outcome = play(client, answering(ANSWER, after=b"x" * 10), a_site(limits=QUICK))

        assert CLOSED == outcome.received

    def test_a_client_that_went_away_is_not_waited_for(self) -> None:
        """Its reset reaches the server, although neither side says anything."""

        def client(_outcome: Outcome) -> Script:
            async def talk(stream: Stream) -> None:
                await stream.write(head())
                await sleep(0.05)
                stream.abort()

            return talk

        def server(outcome: Outcome) -> Script:
            async def serve(stream: Stream) -> None:
                outcome.served = await all_of(stream)
                stream.close()

            return serve

        outcome = play(client, server, a_site())

        assert isinstance(outcome.error, ConnectionResetError)
        assert outcome.served is not None
        assert outcome.served.endswith(b"<reset>")


class TestWebSockets:
    @staticmethod
    def client(outcome: Outcome) -> Script:
        async def talk(stream: Stream) -> None:
            await stream.write(WEBSOCKET)
            outcome.received = await until(stream, b"\r\n\r\n")
            for word in (b"one", b"two"):
                await stream.write(word)
                outcome.received += await until(stream, word)
            await stream.end()
            outcome.received += await all_of(stream)
            stream.close()

        return talk

    @staticmethod
    def echo(outcome: Outcome) -> Script:
        async def serve(stream: Stream) -> None:
            outcome.served = await until(stream, b"\r\n\r\n")
            await stream.write(SWITCHED)
            while data := await stream.read(1 << 16):
                await stream.write(data)
            await stream.write(b"bye")
            stream.close()

        return serve

    def test_bytes_go_both_ways_after_the_switch(self) -> None:
        site = a_site()
        outcome = play(self.client, self.echo, site)

        assert outcome.received.endswith(b"\r\n\r\nonetwobye")
        assert b"101 Switching Protocols" in outcome.received
        assert outcome.served is not None
        assert b"Upgrade: websocket\r\n" in outcome.served
        assert 101 == site.status

    def test_nothing_is_raw_before_it(self) -> None:
        """What comes behind the request waits for the switch; without one nobody gets it."""
        request = WEBSOCKET + head(start=b"GET /admin HTTP/1.1")
        outcome = play(saying(request), answering(ANSWER), a_site())

        assert outcome.served is not None
        assert b"admin" not in outcome.served
        assert CLOSED == outcome.received

    def test_a_switch_without_proof_is_none(self) -> None:
        answer = SWITCHED.replace(b"s3pPLMBi", b"AAAAAAAA")
        outcome = play(saying(WEBSOCKET), answering(answer), a_site())

        assert "switched to another protocol" in outcome.reason
        assert outcome.received.startswith(b"HTTP/1.1 502 ")

    def test_no_switch_for_another_protocol(self) -> None:
        request = head(b"Connection: Upgrade", b"Upgrade: h2c")
        answer = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
        outcome = play(saying(request), answering(answer), a_site())

        assert outcome.served is not None
        assert b"h2c" not in outcome.served
        assert outcome.received.startswith(b"HTTP/1.1 502 ")


SECRETS = {"KEY": "hunter2-and-more"}


@pytest.mark.parametrize("host", ["1.test", "127.test", "3com.test", "10.0.0.1.test"])
def test_a_name_that_begins_like_an_address_is_judged_as_a_name(host: str) -> None:
    """Rules about addresses allow whatever is said; those about names do not."""
    site = a_site(NetworkRule(host, methods=("GET",)), host=host)
    to_it = f"Host: {host}".encode()
    site.admit(parse_request(head(host=to_it)))
    with pytest.raises(Refused, match="no rule allows POST"):
        site.admit(parse_request(head(host=to_it, start=b"POST / HTTP/1.1")))
    for literal in ("10.0.0.1", "127.0.0.1"):
        to_it = f"Host: {literal}".encode()
        request = parse_request(head(host=to_it, start=b"POST / HTTP/1.1"))
        assert [] == a_site(NetworkRule("a.test"), host=literal).admit(request)


class TestSecrets:
    def site(self) -> Site:
        return a_site(secrets=SECRETS)

    def test_the_answer_is_searched_for_what_went_with_the_request(self) -> None:
        """Secrets that are changed while a server is dialled are those of the next request."""
        site, shown = self.site(), SECRETS["KEY"].encode()
        later = Secrets({"KEY": "another-one"})
        site.admit(parse_request(head()))
        site.renew(site.judge, later)
        assert b"*" * len(shown) == site.scrubber().whole(shown)
        assert b"another-one" == site.scrubber().whole(b"another-one")
        before = self.site()
        before.renew(before.judge, later)
        before.admit(parse_request(head()))
        assert b"*" * 11 == before.scrubber().whole(b"another-one")

    @pytest.mark.parametrize("cut", range(1, 15, 3))
    def test_a_secret_that_comes_back_does_not_arrive(self, cut: int) -> None:
        body = json.dumps({"seen": SECRETS["KEY"], "rest": "x" * 100}).encode()
        at = body.index(b"hunter2") + cut
        pieces = [body[:at], body[at:]]

        def server(outcome: Outcome) -> Script:
            async def serve(stream: Stream) -> None:
                outcome.served = await until(stream, b"\r\n\r\n")
                await stream.write(
                    b"HTTP/1.1 200 hunter2-and-more\r\nX-Seen: hunter2-and-more\r\n"
                    b"Transfer-Encoding: chunked\r\n\r\n"
                )
                for piece in pieces:
                    await stream.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                    await sleep(0.01)
                await stream.write(b"0\r\n\r\n")
                stream.close()

            return serve

        outcome = play(
            saying(head(b"Accept-Encoding: gzip", b"Range: bytes=0-1")), server, self.site()
        )

        assert b"hunter2" not in outcome.received
        assert b"X-Seen: ****************\r\n" in outcome.received
        assert outcome.received.count(b"*") == 3 * len("hunter2-and-more")
        assert outcome.received.endswith(b"0\r\n\r\n")
        assert outcome.served is not None
        assert b"Accept-Encoding: identity" in outcome.served
        assert b"Range" not in outcome.served

    def test_lengths_stay_right(self) -> None:
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: 18\r\n\r\n<hunter2-and-more>"
        outcome = play(saying(head()), answering(answer), self.site())

        assert outcome.received.endswith(
            b"Content-Length: 18\r\nConnection: close\r\n\r\n<****************>"
        )

    def test_the_beginning_of_a_secret_at_the_end_is_none(self) -> None:
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n<hunter2"
        outcome = play(saying(head()), answering(answer), self.site())

        assert outcome.received.endswith(b"\r\n\r\n<hunter2")

    @pytest.mark.parametrize("status", [b"100 Continue", b"103 hunter2-and-more"])
    def test_an_interim_answer_shows_none(self, status: bytes) -> None:
        """Servers may show a credential in Early Hints, before the final answer."""
        interim = b"HTTP/1.1 %b\r\nLink: <hunter2-and-more>\r\n\r\n" % status

        hidden = play(saying(head()), answering(interim + ANSWER), self.site()).received
        assert b"hunter2" not in hidden
        assert b"Link: <****************>\r\n" in hidden
        assert hidden.endswith(b"hello")
        shown = play(saying(head()), answering(interim + ANSWER), a_site()).received
        assert b"Link: <hunter2-and-more>\r\n" in shown

    def test_the_head_of_a_websocket_shows_none(self) -> None:
        answer = SWITCHED.replace(b"\r\n\r\n", b"\r\nX-Seen: hunter2-and-more\r\n\r\n")

        hidden = play(saying(WEBSOCKET), answering(answer), self.site()).received
        assert b"X-Seen: ****************\r\n" in hidden
        shown = play(saying(WEBSOCKET), answering(answer), a_site()).received
        assert b"X-Seen: hunter2-and-more\r\n" in shown

    def test_an_answer_that_nobody_can_look_into_is_refused(self) -> None:
        answer = ANSWER.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")

        outcome = play(saying(head()), answering(answer), self.site())
        assert "coded (gzip)" in outcome.reason
        assert outcome.received.startswith(b"HTTP/1.1 502 ")
        # Where there is no secret to be shown, it passes.
        assert play(saying(head()), answering(answer), a_site()).received.endswith(b"hello")

    @pytest.mark.parametrize("status", [b"206 Partial Content", b"226 IM Used"])
    def test_a_part_that_was_not_asked_for_is_refused(self, status: bytes) -> None:
        """However a server was made to cut: what shows half of a secret shows none."""
        answer = ANSWER.replace(b"200 OK", status)

        outcome = play(saying(head()), answering(answer), self.site())
        assert "a part" in outcome.reason
        assert outcome.received.startswith(b"HTTP/1.1 502 ")
        assert b"hello" not in outcome.received
        assert play(saying(head()), answering(answer), a_site()).received.endswith(b"hello")

    @pytest.mark.parametrize("name", HIDING)
    def test_no_answer_is_asked_for_that_could_hide_it(self, name: str) -> None:
        for spelled in (name, name.lower(), name.upper(), name.replace("-", "_")):
            request = head(f"{spelled}: wanted".encode())
            served = play(saying(request), answering(ANSWER), self.site()).served
            assert served is not None
            assert b"wanted" not in served
            # Where there is no secret to be shown, it passes.
            assert b"wanted" in (play(saying(request), answering(ANSWER), a_site()).served or b"")

    @pytest.mark.parametrize("name", ["Content-Range", "Prefer", "x-amz-copy-source-range"])
    def test_what_is_asked_of_the_request_itself_stays(self, name: str) -> None:
        served = play(saying(head(f"{name}: kept".encode())), answering(ANSWER), self.site()).served
        assert served is not None
        assert b"kept" in served

    def test_a_websocket_is_looked_through(self) -> None:
        def client(outcome: Outcome) -> Script:
            async def talk(stream: Stream) -> None:
                await stream.write(WEBSOCKET)
                outcome.received = await until(stream, b"\r\n\r\n")
                await stream.write(b"<hunter2-and-more>")
                outcome.received += await until(stream, b">")
                # A message that ends as the secret begins does not wait for ever.
                await stream.write(b"oh")
                outcome.received += await until(stream, b"oh")
                await stream.end()
                outcome.received += await all_of(stream)
                stream.close()

            return talk

        outcome = play(client, TestWebSockets.echo, self.site())

        assert outcome.received.endswith(b"\r\n\r\n<****************>ohbye")

    def test_errors_do_not_tell(self) -> None:
        site = self.site()
        play(saying(head(host=b"Host: b.test")), nobody, site)

        assert "hunter2" not in f"{site.request!r} {site.scrubber()!r} {vars(site)['request']!r}"


def test_streams_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens, both ends are."""
    made: list[SocketStream] = []
    plain = SocketStream.__init__

    def noting(self: SocketStream, *args: object) -> None:
        plain(self, *args)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(SocketStream, "__init__", noting)
    for answer in (ANSWER, b"", b"nonsense\r\n\r\n", SWITCHED, ANSWER[:-1]):
        play(saying(head()), answering(answer), a_site())
    play(saying(head(host=b"Host: b.test")), nobody, a_site())

    assert 22 == len(made)
    assert all(-1 == stream.socket.fileno() for stream in made)
