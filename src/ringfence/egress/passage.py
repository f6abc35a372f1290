"""Letting one connection through: resolve, judge, dial, look at the first bytes, pass on.

The name and the port were judged already. Nothing of the client's is passed on before its first bytes
were looked at; what the server says first is passed on at once, for protocols in which it does.
"""

from __future__ import annotations

from _socket import MSG_PEEK

from ..linux.destination import family_of
from . import answers, tls
from .dial import connect
from .first import HOLD, HTTP, PASS, RAW, TLS, Opening
from .http import exchange
from .loop import Deadline
from .meter import SPENT, Metered
from .refused import Refused
from .site import Site
from .streams import SocketStream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .connection import Connection
    from .loop import Timer
    from .relay import Relay
    from .streams import Stream

_ALWAYS_TLS, _ALWAYS_HTTP = frozenset((443, 8443)), frozenset((80,))
_SILENCE_S = 0.2  # after which a client may be waiting for a server that speaks first
_ANSWER_S = 1.0  # how long such a server may take when the client has not waited for it
_PIECE = 16384
_MOST_EARLY = 1 << 16  # bytes a client may send behind its first message before it is answered


async def resolve(connection: Connection) -> None:
    """Answer queries for names that come over TCP."""
    connection.is_recorded = False  # each query is
    stream = connection.stream()
    with Deadline(connection.sandbox.limits.idle_s):
        await answers.serve(connection.sandbox, stream)
    stream.close()


async def serve(
    connection: Connection, client: SocketStream, server: SocketStream | None = None
) -> None:
    """Let a connection through that was judged.

    Args:
        server: Where it leads, when it was dialled already.
    """
    if not connection.host:
        # A rule about addresses allows whatever is said there.
        connection.is_opaque = True
        server = server or await dial(connection)
        connection.join(client, server).start()
        return
    if _expected(connection):
        opening = await _begin(connection, client)
        kind = _kind(connection, opening)
    else:
        server, opening = server or await dial(connection), Opening()
        kind = opening.feed(_at_hand(connection, client))
    if kind in (TLS, HTTP):
        client.first = opening.data
        await _serve_kind(connection, kind, client, server)
    else:
        Gate(connection, opening, client, server or await dial(connection)).open()


async def dial(connection: Connection) -> SocketStream:
    """Connect to where the connection leads; only addresses that were judged are dialled.

    Raises:
        Refused: No address of the name may be dialled.
        TimeoutError, OSError: It cannot be reached.
    """
    port = connection.port
    with Deadline(connection.sandbox.limits.connect_s):
        if connection.host:
            places = await _places(connection)
        else:
            places = [(family_of(connection.address), connection.address)]
        sock, connection.address = await connect(places, port)
    stream = SocketStream(sock)
    connection.streams.append(stream)
    # The policy may have changed while we waited for the network.
    decision = connection.sandbox.judge_address(connection.host or None, connection.address, port)
    if not decision:
        raise Refused(decision.reason)
    return stream


async def _places(connection: Connection) -> list[tuple[int, str]]:
    """The addresses of the name that may be dialled.

    What is judged here is what is dialled: the name is not looked up again.
    """
    sandbox, name = connection.sandbox, connection.host
    found = await sandbox.commons.resolver.resolve(sandbox.id, name)
    places, reason, rule = [], "it has no address", ""
    for family, address in found:
        decision = sandbox.judge_address(name, address, connection.port)
        if decision:
            places.append((family, address))
        else:
            reason, rule, connection.address = decision.reason, decision.rule, address
    if not places:
        connection.rule = rule
        raise Refused(reason)
    connection.address = places[0][1]
    return places


# -- the first bytes ----------------------------------------------------------------------------


def _expected(connection: Connection) -> tuple[str, ...]:
    """What must be spoken there; anything may when it is empty."""
    if connection.sandbox.terminates(connection.host, connection.port):
        return (TLS, HTTP)
    if connection.port in _ALWAYS_TLS:
        return (TLS,)
    if connection.port in _ALWAYS_HTTP:
        return (HTTP,)
    return ()


async def _begin(connection: Connection, client: SocketStream) -> Opening:
    """The beginning of what the client says; empty when it may be waiting for the server to speak.

    Raises:
        Refused: It does not say enough to tell.
    """
    limits, opening = connection.sandbox.limits, Opening()
    if await _is_silent(connection, client):
        return opening
    try:
        with Deadline(limits.header_s):
            while opening.verdict == HOLD:
                more = await client.read(_PIECE)
                if not more:
                    raise Refused("the client ended before it had said what it speaks")
                opening.feed(more)
    except TimeoutError:
        raise Refused(_not_enough(connection)) from None
    return opening


async def _is_silent(connection: Connection, client: SocketStream) -> bool:
    """Whether nothing comes for a while, where the server may speak first."""
    if connection.sandbox.terminates(connection.host, connection.port):
        return False
    try:
        with Deadline(_SILENCE_S):
            client.unread(await client.read(_PIECE))
    except TimeoutError:
        return True
    return False


def _kind(connection: Connection, opening: Opening) -> str:
    """What the client speaks, where it is to be TLS or HTTP; anything else is up to the server.

    Raises:
        Refused: It is not what is expected.
    """
    expected, verdict = _expected(connection), opening.verdict
    if HTTP in expected and verdict not in (HOLD, TLS):
        return HTTP  # its parser tells the client what is wrong with anything else
    if verdict in (HTTP, TLS) and verdict not in expected:
        raise Refused(_other_than(connection, verdict))
    return verdict


def _not_enough(connection: Connection) -> str:
    return f"not enough within {connection.sandbox.limits.header_s:g} s to tell what is spoken"


def _other_than(connection: Connection, kind: str) -> str:
    expected = " or ".join(each.upper() for each in _expected(connection))
    spoken = kind.upper() if kind in (TLS, HTTP) else "something else"
    return f"{spoken} where only {expected} may be spoken"


def _at_hand(connection: Connection, client: SocketStream) -> bytes:
    """What has come already: most clients speak at once."""
    data, client.first = client.first, b""
    most = connection.sandbox.meter.at_once(_PIECE)
    try:
        data += client.socket.recv(most) if most else b""
    except OSError:
        pass  # nothing yet; whatever else it may be comes again
    return data


async def _serve_kind(
    connection: Connection, kind: str, client: SocketStream, server: SocketStream | None
) -> None:
    if kind == HTTP:
        await _serve_http(connection, client, server)
    else:
        await _serve_tls(connection, client, server)


class Gate:
    """Passes on what the server says, and looks at what the client says until that is decided.

    Where the port stands for TLS or HTTP, nothing else goes to the server before it has spoken:
    one that speaks first speaks neither.
    """

    def __init__(
        self,
        connection: Connection,
        opening: Opening,
        client: SocketStream,
        server: SocketStream,
    ) -> None:
        self._connection, self._opening = connection, opening
        self._client, self._server = client.socket, server.socket
        self._relay: Relay = connection.join(client, server)
        self._timer: Timer | None = None
        self._patience: Timer | None = None  # while the server is to speak first

    def open(self) -> None:
        """Begin."""
        relay, opening = self._relay, self._opening
        if opening.objection:
            relay.cut(opening.objection)
        elif _expected(self._connection):
            self._listen()
        elif opening.verdict == RAW:
            self._connection.is_opaque = True
            relay.out.put(opening.data)
            relay.start()
        else:
            relay.start(on_held=self._look)
            if opening.verdict == PASS:
                relay.hand_over(opening.data)
            self._limit()

    def _listen(self) -> None:
        """Wait for the server, or for TLS or HTTP of a client that was slow."""
        limits, is_silent = self._connection.sandbox.limits, self._opening.verdict == HOLD
        seconds = limits.header_s if is_silent else min(limits.header_s, _ANSWER_S)
        self._patience = self._connection.loop.later(seconds, self._refuse)
        self._relay.on_heard = self._heard
        self._relay.start(on_held=self._look)

    def _heard(self) -> None:
        """The server speaks first: from here on as on any other port."""
        opening = self._opening
        self._be_patient_no_more()
        if self._relay.is_over:
            return
        if opening.verdict == RAW:
            self._pass_on(opening.data)
        elif opening.verdict == PASS:
            self._relay.hand_over(opening.data)
            self._look()

    def _refuse(self) -> None:
        connection, is_silent = self._connection, self._opening.verdict == HOLD
        reason = _not_enough(connection) if is_silent else _other_than(connection, RAW)
        if not self._relay.is_over:
            connection.refuse(reason)
            self._relay.cut(reason)

    def _be_patient_no_more(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    @property
    def _must_wait(self) -> bool:
        """Whether there is something that must not be passed on before the server has spoken."""
        return self._patience is not None and self._opening.verdict in (PASS, RAW)

    def _look(self) -> None:
        """Read what came, and decide as soon as it can be."""
        relay = self._relay
        while not (relay.is_over or relay.out.prefix or self._must_wait):
            most = self._connection.sandbox.meter.grant(_PIECE, self._look)
            try:
                more = self._client.recv(most or 1, 0 if most else MSG_PEEK)
            except BlockingIOError:
                return
            except OSError as exc:
                relay.cut(exc.strerror or "the client is gone")
                return
            if most <= 0:
                self._wait_or_cut(more)
                return
            if self._decide(more):
                return

    def _wait_or_cut(self, more: bytes) -> None:
        """Nothing may be moved now; if that is for good, only an end is let through."""
        if not self._connection.sandbox.meter.is_spent:
            return
        if more:
            self._relay.cut(SPENT)
        else:
            self._pass_on(b"")

    def _decide(self, more: bytes) -> bool:
        """Do what is to be done with what came; whether that was decided for good."""
        relay, opening = self._relay, self._opening
        held = opening.verdict == HOLD
        kind = opening.feed(more)
        self._limit()
        if not more:
            # What ends before it could be anything else is nothing else.
            self._pass_on(opening.data if held else b"")
        elif kind in (TLS, HTTP):
            self._look_closer(kind)
        elif opening.objection:
            relay.cut(opening.objection)
        elif self._must_wait:
            return False
        elif kind == RAW:
            self._pass_on(opening.data if held else more)
        elif kind == PASS:
            relay.hand_over(opening.data if held else more)
            return False
        else:
            return False
        return True

    def _limit(self) -> None:
        """A client may say nothing for long, but not half of something."""
        is_half = self._opening.verdict == HOLD and bool(self._opening.data)
        if is_half and self._timer is None:
            seconds = self._connection.sandbox.limits.header_s
            self._timer = self._connection.loop.later(seconds, self._expire)
        elif not is_half and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._relay.cut("the client does not say what it speaks")

    def _pass_on(self, data: bytes) -> None:
        connection = self._connection
        is_ended = connection.sandbox.terminates(connection.host, connection.port)  # by now
        if is_ended or self._patience is not None:
            self._relay.cut(_other_than(connection, RAW))
            return
        connection.is_opaque = True
        self._relay.start_out(data)

    def _look_closer(self, kind: str) -> None:
        connection = self._connection
        expected = _expected(connection)
        if expected and kind not in expected:
            self._relay.cut(_other_than(connection, kind))
        elif not self._relay.release():
            # Where the server speaks first there is neither.
            self._relay.cut(f"{kind.upper()} where the server has spoken first")
        else:
            self._be_patient_no_more()
            connection.relay = None
            client = connection.stream(self._opening.data)
            server = SocketStream(self._server)
            connection.streams.append(server)
            connection.run(_serve_kind(connection, kind, client, server))


# -- TLS ----------------------------------------------------------------------------------------


async def _serve_tls(
    connection: Connection, client: SocketStream, server: SocketStream | None
) -> None:
    hello, data = await _hello(connection, client, b"")
    is_ended = connection.sandbox.terminates(connection.host, connection.port)
    _check_name(connection, hello, is_ended=is_ended)
    if is_ended:
        client.unread(data)
        await _terminate(connection, hello, client, server)
        return
    connection.is_opaque = True
    server = server or await dial(connection)
    await _pass_hello(connection, server, data[: hello.size])
    client.unread(data[hello.size :])
    said = await _first_answer(connection, server)
    if tls.asks_again(said):
        # Servers are expected to compare both hellos; that they do is not taken on trust.
        await client.write(said)
        connection.count_in(len(said))
        connection.sandbox.meter.count(len(said))
        again, data = await _hello(connection, client, _take_first(client), second=True)
        _check_name(connection, again)
        client.unread(data)
        said = b""
    server.unread(said)
    connection.join(client, server).start()


def _take_first(client: SocketStream) -> bytes:
    data, client.first = client.first, b""
    return data


async def _pass_hello(connection: Connection, server: SocketStream, data: bytes) -> None:
    await connection.sandbox.meter.allowance(1)
    connection.sandbox.meter.count(len(data))
    connection.count_out(len(data))
    await server.write(data)


async def _hello(
    connection: Connection, client: SocketStream, data: bytes, *, second: bool = False
) -> tuple[tls.Hello, bytes]:
    """The ClientHello, and everything that was read with it."""
    limits = connection.sandbox.limits
    try:
        with Deadline(limits.header_s):
            while (hello := tls.client_hello(data, second=second)) is None:
                if len(data) > limits.header_bytes + _MOST_EARLY:
                    raise Refused("a TLS ClientHello that does not end")
                more = await client.read(_PIECE)
                if not more:
                    raise Refused("the client ended within its TLS ClientHello")
                data += more
    except TimeoutError:
        raise Refused(f"no TLS ClientHello within {limits.header_s:g} s") from None
    return hello, data


def _check_name(connection: Connection, hello: tls.Hello, *, is_ended: bool = False) -> None:
    """The name inside must be the name that was authorised, and the only one there is.

    Args:
        is_ended: TLS ends here. Then an encrypted name goes nowhere: we have no key for it, and read
            the request itself. Browsers send one that means nothing (GREASE) with every hello.
    """
    if hello.is_encrypted and not is_ended:
        raise Refused("an encrypted ClientHello (ECH), whose real name cannot be read")
    if hello.server_name is None:
        raise Refused("a TLS ClientHello without a server name")
    if hello.server_name != connection.host:
        raise Refused(f"TLS for {hello.server_name!a} in a connection for {connection.host}")


async def _first_answer(connection: Connection, server: SocketStream) -> bytes:
    """What the server says to the hello, as far as it takes to see whether it asks again."""
    said = b""
    with Deadline(connection.sandbox.limits.connect_s):
        while tls.asks_again(said) is None:
            more = await server.read(await connection.sandbox.meter.allowance(_PIECE))
            if not more:
                break
            said += more
    return said


# -- HTTP, and HTTP in TLS ------------------------------------------------------------------------


def site_of(connection: Connection, scheme: str = "http") -> Site:
    """What may be asked over this connection."""
    sandbox = connection.sandbox
    site = Site(
        connection.host or connection.address,
        connection.port,
        sandbox.judge,
        scheme=scheme,
        secrets=sandbox.secrets,
    )
    connection.site = site
    return site


def reaching(
    connection: Connection, server: SocketStream | None = None
) -> Callable[[], Awaitable[Stream]]:
    """What connects to the server once a request is allowed."""

    async def reach() -> Stream:
        stream = server or await dial(connection)
        return Metered(stream, connection.sandbox.meter, connection.count_in)

    return reach


def metered(connection: Connection, client: Stream) -> Stream:
    """The client's side, with the sandbox's limits on it."""
    return Metered(client, connection.sandbox.meter, connection.count_out)


async def _serve_http(
    connection: Connection, client: SocketStream, server: SocketStream | None
) -> None:
    site = site_of(connection)
    await exchange(metered(connection, client), site, reaching(connection, server))


async def _terminate(
    connection: Connection, hello: tls.Hello, client: SocketStream, server: SocketStream | None
) -> None:
    terminator = connection.sandbox.commons.terminator
    authority = connection.sandbox.authority
    if terminator is None or authority is None:
        raise Refused(
            "requests to it are judged one by one, and this sandbox trusts nobody to end TLS"
        )
    site = site_of(connection, "https")
    stream, reach = metered(connection, client), reaching(connection, server)
    await terminator.serve(stream, hello, site, authority, reach)
