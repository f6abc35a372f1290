"""A connection on which the server may speak first: the client's data is inspected as it comes."""

from __future__ import annotations

from _socket import MSG_PEEK

from .first import HOLD, HTTP, PASS, RAW, TLS, Opening
from .inspected import serve_kind
from .io.streams import SocketStream
from .meter import SPENT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .connection import Connection
    from .io.loop import Timer
    from .io.relay import Relay

_ANSWER_S = 1.0  # how long a server may take when the client has not waited for it
_PIECE = 16384


class Gate:
    """Passes on what the server says, and looks at what the client says until that is decided.

    Where the port stands for TLS or HTTP, nothing else goes to the server before it has spoken:
    one that speaks first speaks neither.
    """

    def __init__(
        self, connection: Connection, opening: Opening, client: SocketStream, server: SocketStream
    ) -> None:
        self._connection, self._opening = connection, opening
        self._client, self._server = client.socket, server.socket
        self._relay: Relay = connection.join(client, server)
        self._timer: Timer | None = None
        self._patience: Timer | None = None  # while the server is to speak first
        self._waits = False  # for the meter

    def open(self) -> None:
        relay, opening = self._relay, self._opening
        if opening.objection:
            relay.cut(opening.objection)
        elif expected(self._connection):
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
        reason = not_enough(connection) if is_silent else other_than(connection, RAW)
        if not self._relay.is_over:
            connection.refuse(reason)
            self._relay.cut(reason)

    def _be_patient_no_more(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    @property
    def _must_wait(self) -> bool:
        """True while client data must wait for the server to speak first."""
        return self._patience is not None and self._opening.verdict in (PASS, RAW)

    def _look(self) -> None:
        """Read what came, and decide as soon as it can be."""
        relay = self._relay
        while not (relay.is_over or relay.out.prefix or self._must_wait or self._waits):
            meter = self._connection.sandbox.meter
            most = meter.grant(_PIECE, self._look_later)
            self._waits = most <= 0 and not meter.is_spent
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

    def _look_later(self) -> None:
        self._waits = False
        self._look()

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
            # Held data that ends before it became another protocol is plain data.
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
        self._relay.cut("the client's protocol cannot be detected")

    def _pass_on(self, data: bytes) -> None:
        connection = self._connection
        is_ended = connection.sandbox.terminates(connection.host, connection.port)  # by now
        if is_ended or self._patience is not None:
            self._relay.cut(other_than(connection, RAW))
            return
        connection.is_opaque = True
        self._relay.start_out(data)

    def _look_closer(self, kind: str) -> None:
        connection = self._connection
        wanted = expected(connection)
        if wanted and kind not in wanted:
            self._relay.cut(other_than(connection, kind))
        elif not self._relay.release():
            # Where the server speaks first there is neither.
            self._relay.cut(f"{kind.upper()} where the server has spoken first")
        else:
            self._be_patient_no_more()
            connection.relay = None
            client = connection.stream(self._opening.data)
            server = SocketStream(self._server)
            connection.streams.append(server)
            connection.run(serve_kind(connection, kind, client, server))


_ALWAYS_TLS, _ALWAYS_HTTP = frozenset((443, 8443)), frozenset((80,))


def expected(connection: Connection) -> tuple[str, ...]:
    """Return the protocols of which one must be spoken; empty: any may."""
    if connection.sandbox.terminates(connection.host, connection.port):
        return (TLS, HTTP)
    if connection.port in _ALWAYS_TLS:
        return (TLS,)
    if connection.port in _ALWAYS_HTTP:
        return (HTTP,)
    return ()


def not_enough(connection: Connection) -> str:
    """Why a client is refused that has not said enough in time."""
    return f"not enough within {connection.sandbox.limits.header_s:g} s to detect the protocol"


def other_than(connection: Connection, kind: str) -> str:
    wanted = " or ".join(each.upper() for each in expected(connection))
    spoken = kind.upper() if kind in (TLS, HTTP) else "another protocol"
    return f"{spoken} where only {wanted} may be spoken"
