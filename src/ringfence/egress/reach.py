"""Reaching the server that a connection is for, and counting what is said to it."""

from __future__ import annotations

from ..linux.destination import family_of
from .dial import connect
from .http.site import Site
from .io.loop import Deadline
from .io.streams import SocketStream
from .meter import Metered
from .refused import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .connection import Connection
    from .io.streams import Stream


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
    places, reason, rule = [], "the name has no address", ""
    for family, address in found:
        decision = sandbox.judge_address(name, address, connection.port)
        if decision:
            places.append((family, address))
        else:
            reason, rule, connection.address = decision.reason, decision.rule, address
    if not places:
        connection.rule = rule
        if connection.site is not None:
            connection.site.rule = rule  # not the one that allowed the request
        raise Refused(reason)
    connection.address = places[0][1]
    return places


def site_of(connection: Connection, scheme: str = "http") -> Site:
    """Make the site of this connection, which judges its requests."""
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
    """Return a function that connects to the server, to be called once a request is allowed."""

    async def reach() -> Stream:
        stream = server or await dial(connection)
        return Metered(stream, connection.sandbox.meter, connection.count_in)

    return reach


def metered(connection: Connection, client: Stream) -> Stream:
    """The client's side, with the sandbox's limits on it."""
    return Metered(client, connection.sandbox.meter, connection.count_out)
