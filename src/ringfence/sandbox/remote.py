"""`server=`: the same calls, answered by a Ringfence server."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from typing import Any

    from ..client import AsyncClient, Client


def make(server: str | Client, method: str, *args: object, **options: object) -> Any:
    """A sandbox of the server, by `method` of its client.

    A client that is made for it here closes its connections when the sandbox is terminated.
    """
    client, is_ours = _client(server)
    try:
        made = getattr(client, method)(*args, **options)
    except BaseException:
        if is_ours:
            client.close()
        raise
    made.owns_transport = is_ours
    return made


async def make_async(
    server: str | AsyncClient, method: str, *args: object, **options: object
) -> Any:
    """As `make`."""
    client, is_ours = _client_async(server)
    try:
        made = await getattr(client, method)(*args, **options)
    except BaseException:
        if is_ours:
            await client.close()
        raise
    made.owns_transport = is_ours
    return made


@contextmanager
def opened(server: str | Client) -> Iterator[Client]:
    """The client of an address, closed at the end of the block unless it is the caller's."""
    client, is_ours = _client(server)
    try:
        yield client
    finally:
        if is_ours:
            client.close()


@asynccontextmanager
async def opened_async(server: str | AsyncClient) -> AsyncIterator[AsyncClient]:
    """As `opened`."""
    client, is_ours = _client_async(server)
    try:
        yield client
    finally:
        if is_ours:
            await client.close()


def _client(server: str | Client) -> tuple[Client, bool]:
    from ..client import Client

    return (server, False) if isinstance(server, Client) else (Client(server), True)


def _client_async(server: str | AsyncClient) -> tuple[AsyncClient, bool]:
    from ..client import AsyncClient

    return (server, False) if isinstance(server, AsyncClient) else (AsyncClient(server), True)


def name_of(backend: object) -> str:
    """None means: whichever the server has."""
    if backend is None:
        return ""
    if not isinstance(backend, str):
        from ..errors import InvalidRequest

        raise InvalidRequest("with server= the backend must be a name", field="backend")
    return backend
