"""TLS that is ended on the way: what the server gets, what the client sees, and whom each believes."""

from __future__ import annotations

import ssl
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING

import pytest

from ringfence.egress.http.site import Site
from ringfence.egress.io.loop import Deadline, Loop, both, current, pause, sleep
from ringfence.egress.io.streams import SocketStream
from ringfence.egress.refused import Refused
from ringfence.egress.tls import terminate
from ringfence.egress.tls.ca import Authority
from ringfence.egress.tls.hello import Hello
from ringfence.egress.tls.roots import strict_context
from ringfence.egress.tls.stream import TlsStream
from ringfence.model.net.network import NetworkLimits
from ringfence.model.net.rules import Credential, NetworkRule
from tests.egress.hellos import of_this_library
from tests.egress.scene import (
    ANSWER,
    QUICK,
    Outcome,
    Script,
    a_site,
    all_of,
    play,
    tcp_pair,
    until,
)
from tests.egress.smuggling import head, post

if TYPE_CHECKING:
    from ringfence.egress.io.streams import Stream

pytestmark = pytest.mark.anyone

SECRET = "hunter2-and-more"
OF_SANDBOX = Authority.create(["a.test", "*.wild.test"])
OF_WORLD = Authority.create(["a.test", "b.test", "x.wild.test"])  # stands for the real ones
RULE = NetworkRule("a.test", credential=Credential("KEY"))
HELLO = Hello("a.test", (), False, 0)


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=authority.certificate)


def through(
    *,
    authority: Authority = OF_SANDBOX,
    hello: Hello = HELLO,
) -> Callable[[Stream, Site, Callable[[], Awaitable[Stream]]], Awaitable[None]]:
    """What is between: `terminate.serve`."""
    roots = strict_context(ssl.PROTOCOL_TLS_CLIENT)
    roots.load_verify_locations(cadata=OF_WORLD.certificate)

    async def middle(stream: Stream, site: Site, reach: Callable[[], Awaitable[Stream]]) -> None:
        await terminate.serve(stream, hello, site, authority, reach, roots)

    return middle


def client(
    request: bytes, context: ssl.SSLContext | None = None, name: str = "a.test"
) -> Callable[[Outcome], Script]:
    """A client over TLS that says `request`; `<TLS ...>` is what it has to complain of."""

    def make(outcome: Outcome) -> Script:
        async def talk(below: Stream) -> None:
            stream = TlsStream(below, context or trusting(OF_SANDBOX), server_name=name)
            try:
                await stream.handshake()
                await stream.write(request)
                outcome.received = await all_of(stream)
                await stream.end()
            except OSError as exc:
                outcome.received += f"<{exc}>".encode()
            stream.close()

        return talk

    return make


def server(
    answer: bytes = ANSWER,
    *,
    authority: Authority = OF_WORLD,
    name: str = "a.test",
    after: bytes = b"\r\n\r\n",
    ends_tls: bool = True,
) -> Callable[[Outcome], Script]:
    def make(outcome: Outcome) -> Script:
        async def serve(below: Stream) -> None:
            stream = TlsStream(below, authority.context(name))
            try:
                await stream.handshake()
                outcome.served = await until(stream, after)
                await stream.write(answer)
                if ends_tls:
                    await stream.end()
                    outcome.served += await all_of(stream)
            except OSError:
                pass
            stream.close()

        return serve

    return make


def site(*rules: NetworkRule, limits: NetworkLimits | None = None) -> Site:
    return a_site(
        *(rules or (RULE,)), port=443, scheme="https", secrets={"KEY": SECRET}, limits=limits
    )


class TestCredentials:
    def test_it_is_written_into_the_request(self) -> None:
        asked = head(b"Accept: x", b"authorization: Bearer placeholder", b"Cookie: a=b", b"X: y")
        outcome = play(client(asked), server(), site(), through())

        assert outcome.served == (
            b"GET / HTTP/1.1\r\nHost: a.test\r\nAccept: x\r\nCookie: a=b\r\nX: y\r\n"
            b"authorization: Bearer " + SECRET.encode() + b"\r\nAccept-Encoding: identity\r\n"
            b"Connection: close\r\n\r\n"
        )
        assert outcome.received.endswith(b"\r\n\r\nhello")
        assert outcome.error is None

    def test_a_header_of_any_name_and_no_scheme(self) -> None:
        rule = NetworkRule("a.test", credential=Credential("KEY", "X-Api-Key", ""))
        outcome = play(client(head(b"X_API_KEY: mine")), server(), site(rule), through())

        assert outcome.served is not None
        assert b"x-api-key: hunter2-and-more\r\n" in outcome.served
        assert b"mine" not in outcome.served

    def test_two_credentials(self) -> None:
        other = NetworkRule("a.test", credential=Credential("KEY", "X-Api-Key", ""))
        outcome = play(client(head()), server(), site(RULE, other), through())

        assert outcome.served is not None
        assert 2 == outcome.served.count(SECRET.encode())

    def test_only_where_its_rule_is_about(self) -> None:
        """A path that another rule allows goes without."""
        rules = (
            NetworkRule("a.test", paths=("/api/*",), credential=Credential("KEY")),
            NetworkRule("a.test"),
        )
        asked = head(b"Authorization: own", start=b"GET /other HTTP/1.1")
        outcome = play(client(asked), server(), site(*rules), through())

        assert outcome.served is not None
        assert b"Authorization: own\r\n" in outcome.served
        assert SECRET.encode() not in outcome.served

    def test_what_the_server_shows_of_it_does_not_arrive(self) -> None:
        shown = f"HTTP/1.1 200 OK\r\nX-Auth: Bearer {SECRET}\r\n\r\n".encode() + SECRET.encode() * 3
        outcome = play(client(head()), server(shown), site(), through())

        assert b"hunter2" not in outcome.received
        assert outcome.received.endswith(b"*" * 3 * len(SECRET))
        # The control: without the secret in its hands, it would have passed.
        plain = a_site(NetworkRule("a.test", inspect=True), port=443, scheme="https")
        assert b"hunter2" in play(client(head()), server(shown), plain, through()).received

    def test_a_secret_without_a_value_is_told(self) -> None:
        bare = a_site(RULE, port=443, scheme="https", secrets={})
        outcome = play(client(head()), server(), bare, through())

        assert "KEY has no value" in outcome.reason
        assert b" 502 " in outcome.received


class TestRules:
    def test_requests_are_judged_one_by_one(self) -> None:
        rule = NetworkRule("a.test", methods=("GET",), paths=("/open/*",))

        good = play(client(head(start=b"GET /open/x HTTP/1.1")), server(), site(rule), through())
        assert good.received.endswith(b"hello")
        for start in (
            b"POST /open/x HTTP/1.1",
            b"GET /shut HTTP/1.1",
            b"GET /open/../shut HTTP/1.1",
        ):
            bad = play(client(head(start=start)), server(), site(rule), through())
            assert bad.served is None
            assert bad.received.startswith(b"HTTP/1.1 403 ")

    @pytest.mark.parametrize("host", [b"b.test", b"a.test:80", b"127.0.0.1", b"a.test.b.test"])
    def test_nobody_hides_behind_an_allowed_name(self, host: bytes) -> None:
        """Domain fronting: one name in the handshake, another in the request."""
        outcome = play(client(head(host=b"Host: " + host)), server(), site(), through())

        assert outcome.served is None
        assert "the connection for a.test:443" in outcome.reason

    def test_what_is_not_http_is_refused(self) -> None:
        outcome = play(client(b"SSH-2.0-x\r\n\r\n"), server(), site(), through())

        assert outcome.served is None
        assert outcome.received.startswith(b"HTTP/1.1 400 ")

    def test_large_bodies_both_ways(self) -> None:
        size = 1_000_000
        asked = post(b"Content-Length: %d" % size) + b"x" * (size - 3) + b"end"
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"y" * size
        outcome = play(client(asked), server(answer, after=b"end"), site(), through())

        assert outcome.served is not None
        assert size == len(outcome.served.partition(b"\r\n\r\n")[2])
        assert b"y" * size == outcome.received.partition(b"\r\n\r\n")[2]

    def test_a_handshake_in_small_pieces(self) -> None:
        def dripping(outcome: Outcome) -> Script:
            async def talk(below: Stream) -> None:
                await client(head())(outcome)(_Dripping(below))

            return talk

        assert play(dripping, server(), site(), through()).received.endswith(b"hello")


class _Dripping:
    """A stream that hands over 40 bytes at a time."""

    def __init__(self, below: Stream) -> None:
        self.read, self.end, self.close, self.abort = (
            below.read,
            below.end,
            below.close,
            below.abort,
        )
        self._below = below

    async def write(self, data: bytes) -> None:
        for at in range(0, len(data), 40):
            await self._below.write(data[at : at + 40])
            await sleep(0.001)


class TestClients:
    @pytest.mark.parametrize("roots", [OF_WORLD, Authority.create(["a.test"])])
    def test_one_that_does_not_trust_the_authority_is_told_of(self, roots: Authority) -> None:
        """It pins a certificate, or is another sandbox's: nothing is sent, and the record says why."""
        outcome = play(client(head(), trusting(roots)), server(), site(), through())

        assert outcome.served is None
        assert "does not accept the certificate" in outcome.reason
        assert "a.test" in outcome.reason
        assert b"CERTIFICATE_VERIFY_FAILED" in outcome.received

    def test_one_that_hangs_up_in_the_handshake(self) -> None:
        def hangs_up(_outcome: Outcome) -> Script:
            async def talk(stream: Stream) -> None:
                await stream.write(of_this_library("a.test"))
                await stream.read(1 << 16)
                await stream.end()
                await all_of(stream)
                stream.close()

            return talk

        assert (
            "the client closed the connection" in play(hangs_up, server(), site(), through()).reason
        )

    def test_one_that_stops_in_the_handshake(self) -> None:
        def stops(outcome: Outcome) -> Script:
            async def talk(stream: Stream) -> None:
                await stream.write(of_this_library("a.test"))
                outcome.received = await all_of(stream)
                stream.close()

            return talk

        outcome = play(stops, server(), site(limits=QUICK), through())

        assert "no TLS handshake within 0.3 s" in outcome.reason
        assert outcome.received.endswith(b"<reset>")

    def test_one_that_speaks_only_http_2(self) -> None:
        context = trusting(OF_SANDBOX)
        context.set_alpn_protocols(["h2"])
        hello = Hello("a.test", ("h2",), False, 0)
        outcome = play(client(head(), context), server(), site(), through(hello=hello))

        assert "only 'h2'" in outcome.reason
        assert b"NO_APPLICATION_PROTOCOL" in outcome.received.upper().replace(b" ", b"_")

    def test_one_that_speaks_both_gets_http_1(self) -> None:
        context = trusting(OF_SANDBOX)
        context.set_alpn_protocols(["h2", "http/1.1"])
        hello = Hello("a.test", ("h2", "http/1.1"), False, 0)

        outcome = play(client(head(), context), server(), site(), through(hello=hello))
        assert outcome.received.endswith(b"hello")

    def test_a_rule_that_came_after_the_authority(self) -> None:
        late = Authority.create(["b.test"])
        outcome = play(client(head()), server(), site(), through(authority=late))

        assert "create a new sandbox" in outcome.reason
        assert b"ACCESS_DENIED" in outcome.received.upper().replace(b" ", b"_")

    def test_an_answer_ends_with_an_end_of_tls(self) -> None:
        """Else a client could not tell it from one that was cut."""
        outcome = play(client(head()), server(b"HTTP/1.0 200 OK\r\n\r\nhello"), site(), through())

        assert outcome.received.endswith(b"hello")


class TestServers:
    def test_it_is_asked_for_by_the_name_that_was_allowed(self) -> None:
        names: list[str | None] = []
        context = OF_WORLD.context("b.test")
        context.sni_callback = lambda _c, name, _x: names.append(name)
        rule = NetworkRule("b.test", inspect=True)
        to_b = a_site(rule, host="b.test", port=443, scheme="https")
        authority = Authority.create(["b.test"])

        outcome = play(
            client(head(host=b"Host: b.test"), trusting(authority), "b.test"),
            server(name="b.test"),
            to_b,
            through(authority=authority, hello=Hello("b.test", (), False, 0)),
        )

        assert outcome.received.endswith(b"hello")
        assert ["b.test"] == names

    @pytest.mark.parametrize(
        ("others", "words"),
        [
            ({"authority": Authority.create(["a.test"])}, "local issuer"),
            ({"name": "b.test"}, "Hostname mismatch"),
        ],
    )
    def test_one_that_is_not_who_it_should_be(
        self, others: dict[str, Authority | str], words: str
    ) -> None:
        outcome = play(client(head()), server(**others), site(), through())  # type: ignore[arg-type]

        assert outcome.served is None
        assert words in outcome.reason
        assert "this host does not trust the certificate of a.test" in outcome.reason
        assert outcome.received.startswith(b"HTTP/1.1 502 Bad Gateway\r\n")

    def test_the_sandbox_s_own_authority_is_nothing_to_us(self) -> None:
        """Whoever got its key could not pass for a server."""
        outcome = play(client(head()), server(authority=OF_SANDBOX), site(), through())

        assert outcome.served is None
        assert "does not trust" in outcome.reason

    def test_one_that_speaks_no_tls(self) -> None:
        def plain(outcome: Outcome) -> Script:
            async def serve(stream: Stream) -> None:
                await stream.read(1 << 16)
                await stream.write(ANSWER)
                outcome.served = await all_of(stream)
                stream.close()

            return serve

        outcome = play(client(head()), plain, site(), through())

        assert "no TLS with a.test: wrong version number" in outcome.reason
        assert outcome.served is not None
        assert SECRET.encode() not in outcome.served

    def test_one_that_says_nothing(self) -> None:
        def silent(outcome: Outcome) -> Script:
            async def serve(stream: Stream) -> None:
                await all_of(stream)
                stream.close()

            return serve

        outcome = play(client(head()), silent, site(limits=QUICK), through())

        assert "in time" in outcome.reason
        assert outcome.received.startswith(b"HTTP/1.1 504 ")

    def test_an_answer_that_somebody_cut_is_not_whole(self) -> None:
        cut = server(b"HTTP/1.0 200 OK\r\n\r\nhello", ends_tls=False)
        outcome = play(client(head()), cut, site(), through())

        assert "the server closed the connection" in outcome.reason
        assert b"<" in outcome.received  # the client's connection broke


def hello_and(end: Callable[[Stream], Awaitable[None]]) -> Callable[[Outcome], Script]:
    """A client that begins a handshake, and then ends in a way of its own."""

    def make(outcome: Outcome) -> Script:
        async def talk(stream: Stream) -> None:
            await stream.write(of_this_library("a.test"))
            await end(stream)
            outcome.received = await all_of(stream)
            stream.close()

        return talk

    return make


async def _after_a_while(stream: Stream) -> None:
    await stream.write(b"more that nobody reads")
    await sleep(0.05)


def resets(_outcome: Outcome) -> Script:
    """A client that begins a handshake, and is gone."""

    async def talk(stream: Stream) -> None:
        await stream.write(of_this_library("a.test"))
        await stream.read(1 << 16)
        stream.abort()

    return talk


def test_what_a_client_complains_of_is_on_record() -> None:
    outcome = play(client(head(), trusting(OF_WORLD)), server(), site(), through())

    assert "(tlsv1 alert unknown ca)" in outcome.reason


def test_who_reads_goes_on_after_a_long_write_of_another() -> None:
    """Both have something to flush, and one of them waits for its turn."""
    size = 5_000_000
    received = bytearray()

    async def upload(stream: TlsStream) -> None:
        await stream.write(b"x" * size)

    async def answer(stream: TlsStream) -> None:
        received.extend(await until(stream, b"done"))

    async def ours(below: Stream) -> None:
        stream = TlsStream(below, trusting(OF_SANDBOX), server_name="a.test")
        await stream.handshake()
        await both(upload(stream), answer(stream))
        await stream.end()
        stream.close()

    async def theirs(below: Stream) -> None:
        stream = TlsStream(below, OF_SANDBOX.context("a.test"))
        await stream.handshake()
        await stream.write(b"begun")
        await sleep(0.05)  # so that nobody reads, and the other side's writer has to wait
        left = size
        while left:
            left -= len(await stream.read(1 << 16))
        await stream.write(b"done")
        await all_of(stream)
        stream.close()

    async def scene() -> None:
        one, other = tcp_pair()
        await both(ours(SocketStream(one)), theirs(SocketStream(other)))

    loop = Loop()
    try:
        loop.run_until_done(scene())
    finally:
        loop.close()
    assert b"begundone" == received


class Narrow(SocketStream):
    """A stream that takes what is written two turns later, and says whether two ever wrote at once."""

    writers = most = 0
    refuses = False

    async def write(self, data: bytes) -> None:
        self.writers += 1
        self.most = max(self.most, self.writers)
        try:
            for _ in range(2):
                current().wake()
                await pause()
            if self.refuses:
                raise BrokenPipeError("nobody reads")
            await super().write(data)
        finally:
            self.writers -= 1


def test_what_lies_below_has_one_writer_at_a_time_and_each_has_its_turn() -> None:
    received: list[bytes] = []

    async def say(stream: TlsStream, what: bytes) -> str:
        try:
            with Deadline(10):
                await stream.write(what)
        except OSError as exc:
            return str(exc)
        return ""

    async def ours(below: Narrow) -> None:
        stream = TlsStream(below, trusting(OF_SANDBOX), server_name="a.test")
        await stream.handshake()
        says = both(say(stream, b"1"), both(say(stream, b"2"), say(stream, b"3")))
        assert ("", ("", "")) == await says
        below.refuses = True
        said = await both(say(stream, b"4"), say(stream, b"5"))
        assert ("nobody reads",) * 2 == said, "who has waited does not wait for ever"
        assert 1 == below.most
        stream.close()

    async def theirs(below: Stream) -> None:
        stream = TlsStream(below, OF_SANDBOX.context("a.test"))
        await stream.handshake()
        with Deadline(10):
            received.append(await until(stream, b"3"))
        stream.abort()

    async def scene() -> None:
        one, other = tcp_pair()
        await both(ours(Narrow(one)), theirs(SocketStream(other)))

    loop = Loop()
    try:
        loop.run_until_done(scene())
    finally:
        loop.close()
    assert [b"123"] == received


def test_what_the_far_end_asks_for_later_is_answered_by_who_only_reads() -> None:
    """As when it wants a certificate, or other keys: it may say no more until it has the answer."""
    asks, answers = OF_SANDBOX._new_context("a.test"), trusting(OF_SANDBOX)
    asks.verify_mode = ssl.CERT_OPTIONAL
    asks.post_handshake_auth = answers.post_handshake_auth = True

    async def ours(below: Stream) -> bytes:
        stream = TlsStream(below, answers, server_name="a.test")
        await stream.handshake()
        with Deadline(10):
            received = await stream.read(99)
        stream.close()
        return received

    async def theirs(below: Stream) -> None:
        stream = TlsStream(below, asks)
        await stream.handshake()
        stream._tls.verify_client_post_handshake()
        stream._tls.do_handshake()
        await stream._flush()
        with Deadline(10):
            stream._incoming.write(await below.read(1 << 16))
        await stream.write(b"done")
        stream.close()

    assert b"done" == meet(ours, theirs)


def test_an_end_of_tls_is_one_of_what_lies_below_too_and_the_other_side_is_heard() -> None:
    async def ours(below: Stream) -> bytes:
        stream = TlsStream(below, trusting(OF_SANDBOX), server_name="a.test")
        await stream.handshake()
        await stream.end()
        received = await all_of(stream)
        stream.close()
        return received

    async def theirs(below: Stream) -> None:
        stream = TlsStream(below, OF_SANDBOX.context("a.test"))
        await stream.handshake()
        with Deadline(10):
            assert (b"", b"") == (await stream.read(9), await below.read(9))
        await stream.write(b"heard")
        await stream.end()
        stream.close()

    assert b"heard" == meet(ours, theirs)


def meet(
    ours: Callable[[Stream], Coroutine[None, None, bytes]],
    theirs: Callable[[Stream], Coroutine[None, None, None]],
) -> bytes:
    """What our end got of the other."""

    async def scene() -> bytes:
        one, other = tcp_pair()
        received, _ = await both(ours(SocketStream(one)), theirs(SocketStream(other)))
        return received

    loop = Loop()
    try:
        return loop.run_until_done(scene())
    finally:
        loop.close()


def test_an_alert_arrives_though_the_client_said_more() -> None:
    """A connection that is closed with bytes unread takes back what was sent."""
    late = Authority.create(["b.test"])
    for middle, told in (
        (through(authority=late), 49),
        (through(hello=Hello("a.test", ("h2",), False, 0)), 120),
    ):
        outcome = play(hello_and(_after_a_while), server(), site(), middle)
        assert terminate.alert(told) == outcome.received


def test_one_that_hangs_up_is_said_not_to_accept_the_certificate() -> None:
    """Some programs tell nothing when they distrust."""

    async def hangs_up(stream: Stream) -> None:
        await stream.read(1 << 16)
        await stream.end()

    outcome = play(hello_and(hangs_up), server(), site(), through())

    assert "does not accept the certificate that this sandbox has for a.test" in outcome.reason
    assert "(the client closed the connection)" in outcome.reason


@pytest.mark.parametrize(
    ("reason", "disbelieves"),
    [
        ("TLSV1_ALERT_UNKNOWN_CA", True), ("SSLV3_ALERT_BAD_CERTIFICATE", True),
        ("SSLV3_ALERT_CERTIFICATE_UNKNOWN", True), ("TLSV1_ALERT_ACCESS_DENIED", True),
        ("UNEXPECTED_EOF_WHILE_READING", True), ("NO_SHARED_CIPHER", False), ("", False),
    ],
)  # fmt: skip
def test_of_what_a_client_complains(reason: str, disbelieves: bool) -> None:
    error = ssl.SSLError(1, reason)
    error.reason = reason

    refused = terminate._no_agreement(error, site())

    assert disbelieves == ("does not accept the certificate" in refused.reason)
    assert 403 == refused.status


def test_the_time_to_reach_a_server_is_what_its_handshake_may_take() -> None:
    def silent(_outcome: Outcome) -> Script:
        async def serve(stream: Stream) -> None:
            await all_of(stream)
            stream.close()

        return serve

    limits = NetworkLimits(header_s=60, idle_s=60, connect_s=0.1)
    began = time.monotonic()
    outcome = play(client(head()), silent, site(limits=limits), through())

    assert "in time" in outcome.reason
    assert time.monotonic() - began < 30


def test_streams_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However a handshake ends, on either side."""
    made: list[SocketStream] = []
    plain = SocketStream.__init__

    def noting(self: SocketStream, *args: object) -> None:
        plain(self, *args)  # type: ignore[arg-type]
        made.append(self)

    def plainly(data: bytes, *, resets: bool = False) -> Callable[[Outcome], Script]:
        def make(_outcome: Outcome) -> Script:
            async def serve(stream: Stream) -> None:
                await stream.read(1 << 16)
                if resets:
                    stream.abort()
                    return
                await stream.write(data)
                await all_of(stream)
                stream.close()

            return serve

        return make

    monkeypatch.setattr(SocketStream, "__init__", noting)
    other = Authority.create(["a.test"])
    quick = NetworkLimits(header_s=60, idle_s=60, connect_s=0.1)
    errors = [
        play(client(head()), server(), site(), through()).error,
        play(resets, server(), site(), through()).error,
        play(client(head(), trusting(other)), server(), site(), through()).error,
        play(client(head()), server(), site(), through(authority=Authority.create([]))).error,
        play(client(head()), server(authority=other), site(), through()).error,
        play(client(head()), plainly(ANSWER), site(), through()).error,
        play(client(head()), plainly(b"", resets=True), site(), through()).error,
        play(client(head()), plainly(b""), site(limits=quick), through()).error,
    ]

    assert [None, OSError, *[Refused] * 6] == [
        each if each is None else OSError if isinstance(each, OSError) else type(each)
        for each in errors
    ]
    assert all(-1 == stream.socket.fileno() for stream in made)


def test_no_error_shows_the_secret() -> None:
    errors = []
    for answer in (b"", b"nonsense\r\n\r\n", ANSWER[:-1], SECRET.encode()):
        outcome = play(client(head()), server(answer), site(), through())
        errors.append(f"{outcome.error!r} {outcome.error} {vars(outcome.error or object)}")
        errors.append(repr(outcome.received))

    assert "Refused" in str(errors) or "BrokenOff" in str(errors)
    assert "hunter2" not in str(errors)
