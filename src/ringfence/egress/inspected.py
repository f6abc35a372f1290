"""Connections that are read: TLS to the name it is for, or to its end, and HTTP request by request."""

from __future__ import annotations

from .first import HTTP
from .http.exchange import exchange
from .io.loop import Deadline
from .io.streams import SocketStream
from .reach import dial, metered, reaching, site_of
from .refused import Refused
from .tls import hello as tls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .connection import Connection

_PIECE = 16384
_MOST_EARLY = 1 << 16  # bytes a client may send behind its first message before it is answered


async def serve_kind(
    connection: Connection, kind: str, client: SocketStream, server: SocketStream | None
) -> None:
    """Serve what is TLS or HTTP, as `kind` says."""
    if kind == HTTP:
        await _serve_http(connection, client, server)
    else:
        await _serve_tls(connection, client, server)


async def _serve_http(
    connection: Connection, client: SocketStream, server: SocketStream | None
) -> None:
    site = site_of(connection)
    await exchange(metered(connection, client), site, reaching(connection, server))


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
    """Read the server's first message, far enough to see whether it asks for a second ClientHello."""
    said = b""
    with Deadline(connection.sandbox.limits.connect_s):
        while tls.asks_again(said) is None:
            more = await server.read(await connection.sandbox.meter.allowance(_PIECE))
            if not more:
                break
            said += more
    return said


async def _terminate(
    connection: Connection, hello: tls.Hello, client: SocketStream, server: SocketStream | None
) -> None:
    terminator = connection.sandbox.commons.terminator
    authority = connection.sandbox.authority
    if terminator is None or authority is None:
        raise Refused(
            "the policy checks each request to it, and this sandbox has no certificate authority to end TLS"
        )
    site = site_of(connection, "https")
    stream, reach = metered(connection, client), reaching(connection, server)
    await terminator.serve(stream, hello, site, authority, reach)
