"""For programs that know of proxies: HTTP CONNECT, requests by URL, and SOCKS 5, at one address.

They say by name where they want to go; from there on all is as for programs that do not know.
"""

from __future__ import annotations

import errno

from ..errors import InvalidRequest
from ..linux.destination import packed, shown
from ..model.net import hosts
from . import passage, reach, socks
from .http.exchange import part, pass_on, read_request, tell
from .http.reader import Reader
from .io.loop import Deadline
from .io.streams import SocketStream
from .refused import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .connection import Connection
    from .http.head import RequestHead

_ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"
_PIECE = 16384
_REPLIES = {
    errno.ECONNREFUSED: socks.NOT_ANSWERED,
    errno.ENETUNREACH: socks.UNREACHABLE,
    errno.EHOSTUNREACH: socks.UNREACHABLE,
}


async def serve(connection: Connection) -> None:
    """Ask the client where it wants to go, and let it through if it may."""
    client = connection.stream()
    limits = connection.sandbox.limits
    connection.port = 0  # the proxy's own says nothing
    with Deadline(limits.idle_s):  # some keep a connection ready
        first = await client.read(_PIECE)
    if not first:
        connection.is_recorded = False
        client.close()
        return
    client.unread(first)
    if first[0] == socks.VERSION:
        await _serve_socks(connection, client)
    else:
        await _serve_http(connection, client)


async def _serve_socks(connection: Connection, client: SocketStream) -> None:
    connection.kind = "socks"
    limits = connection.sandbox.limits
    try:
        with Deadline(limits.header_s):
            host, port = await socks.target(client)
    except TimeoutError:
        raise Refused(f"no SOCKS request within {limits.header_s:g} s") from None
    try:
        aim(connection, host, port)
        server = await reach.dial(connection)
    except Refused:
        await socks.reply(client, socks.NOT_ALLOWED)
        raise
    except TimeoutError:
        await socks.reply(client, socks.UNREACHABLE)
        raise
    except OSError as exc:
        await socks.reply(client, _REPLIES.get(exc.errno or 0, socks.FAILED))
        raise
    await socks.reply(client, socks.GRANTED)
    await passage.serve(connection, client, server)


async def _serve_http(connection: Connection, client: SocketStream) -> None:
    connection.kind = "http"
    reader = Reader(reach.metered(connection, client))
    method = ""
    try:
        head = await read_request(reader, connection.sandbox.limits)
        if head is None:
            connection.is_recorded = False
            client.close()
            return
        method = head.method
        if method == "CONNECT":
            server = await _tunnel(connection, head)
        elif head.is_absolute:
            await _request(connection, reader, head)
            return
        else:
            raise Refused("this is a proxy: use CONNECT or an absolute URL", status=400)
    except Refused as refused:
        await tell(reader, refused, method=method)
        raise
    client.first = reader.left
    await client.write(_ESTABLISHED)
    await passage.serve(connection, client, server)


async def _tunnel(connection: Connection, head: RequestHead) -> SocketStream:
    connection.kind = "connect"
    aim(connection, head.authority.host, head.authority.port)
    try:
        return await reach.dial(connection)
    except TimeoutError:
        raise Refused("the server cannot be reached in time", status=504) from None
    except OSError as exc:
        raise Refused(f"the server cannot be reached: {exc.strerror or exc}", status=502) from exc


async def _request(connection: Connection, reader: Reader, head: RequestHead) -> None:
    aim(connection, head.authority.host, head.authority.port)
    site = reach.site_of(connection)
    await pass_on(reader, head, site, reach.reaching(connection))
    await part(reader)


def aim(connection: Connection, host: str, port: int) -> None:
    """Judge whom the client asked for.

    Raises:
        Refused: It may not go there, or `host` can be read in more than one way.
    """
    connection.port = port
    if not 0 < port < 65536:
        raise Refused("an invalid port")
    try:
        name, address = _read(host)
    except (InvalidRequest, OSError):
        raise Refused(f"{host!a} is neither a host name nor an address") from None
    connection.aim(name, address)


def _read(host: str) -> tuple[str | None, str]:
    """A name, or an address, in the one spelling of each."""
    if ":" in host or _is_dotted(host):
        return None, shown(packed(host))
    return hosts.read_name(host, "host"), ""


def _is_dotted(host: str) -> bool:
    """Return whether it looks like a dotted IPv4 address; other spellings are refused."""
    parts = host.split(".")
    return len(parts) == 4 and all(part.isdigit() for part in parts)
