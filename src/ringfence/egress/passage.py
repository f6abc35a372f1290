"""Letting one connection through: resolve, judge, dial, look at the first bytes, pass on.

The name and the port were judged already. Nothing of the client's is passed on before its first bytes
were looked at; what the server says first is passed on at once, for protocols in which it does.
"""

from __future__ import annotations

from .dns import answers
from .first import HOLD, HTTP, TLS, Opening
from .gate import Gate, expected, not_enough, other_than
from .inspected import serve_kind
from .io.loop import Deadline
from .reach import dial
from .refused import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .connection import Connection
    from .io.streams import SocketStream

_SILENCE_S = 0.2  # after which a client may be waiting for a server that speaks first
_PIECE = 16384


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
    if expected(connection):
        opening = await _begin(connection, client)
        kind = _kind(connection, opening)
    else:
        server, opening = server or await dial(connection), Opening()
        kind = opening.feed(_at_hand(connection, client))
    if kind in (TLS, HTTP):
        client.first = opening.data
        await serve_kind(connection, kind, client, server)
    else:
        Gate(connection, opening, client, server or await dial(connection)).open()


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
                    raise Refused("the client ended before its protocol was known")
                opening.feed(more)
    except TimeoutError:
        raise Refused(not_enough(connection)) from None
    return opening


async def _is_silent(connection: Connection, client: SocketStream) -> bool:
    """Return whether the client sends nothing for a while, where the server may speak first."""
    if connection.sandbox.terminates(connection.host, connection.port):
        return False
    try:
        with Deadline(_SILENCE_S):
            client.unread(await client.read(_PIECE))
    except TimeoutError:
        return True
    return False


def _kind(connection: Connection, opening: Opening) -> str:
    """Return the client's protocol where it must be TLS or HTTP; any other is up to the server.

    Raises:
        Refused: It is not the expected one.
    """
    wanted, verdict = expected(connection), opening.verdict
    if HTTP in wanted and verdict not in (HOLD, TLS):
        return HTTP  # its parser answers the client with an error
    if verdict in (HTTP, TLS) and verdict not in wanted:
        raise Refused(other_than(connection, verdict))
    return verdict


def _at_hand(connection: Connection, client: SocketStream) -> bytes:
    """Read the data that has come already: most clients send at once."""
    data, client.first = client.first, b""
    most = connection.sandbox.meter.at_once(_PIECE)
    try:
        data += client.socket.recv(most) if most else b""
    except OSError:
        pass  # nothing yet; a real error comes again
    return data
