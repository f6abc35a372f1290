"""`server=`: the same calls, answered by a Ringfence server."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping
    from contextlib import AbstractAsyncContextManager, AbstractContextManager
    from typing import Any

    from ..client import AsyncClient, Client
    from ..model.session import Snapshot
    from ..model.spec import SandboxSpec
    from .aio import AsyncSandbox
    from .sync import Sandbox


def create(
    server: str | Client, spec: SandboxSpec | None, backend: object, parts: dict[str, Any]
) -> Sandbox:
    """A sandbox of the server. One of its own connections ends them with it."""
    client, is_ours = _client(server)
    try:
        made = client.create(spec, backend=_name(backend), **parts)
    except BaseException:
        if is_ours:
            client.close()
        raise
    made.owns_transport = is_ours
    return made  # type: ignore[return-value]  # the same methods: tests/client compares them


def restore(
    server: str | Client,
    snapshot_id: str,
    spec: SandboxSpec | None,
    secrets: Mapping[str, str] | None,
) -> Sandbox:
    """A sandbox of the server with the files of a snapshot."""
    client, is_ours = _client(server)
    try:
        made = client.restore(snapshot_id, spec, secrets=secrets)
    except BaseException:
        if is_ours:
            client.close()
        raise
    made.owns_transport = is_ours
    return made  # type: ignore[return-value]


def snapshots(server: str | Client) -> list[Snapshot]:
    """Every snapshot that the server keeps."""
    with _opened(server) as client:
        return client.snapshots()


def delete_snapshot(server: str | Client, snapshot_id: str) -> None:
    """Remove a snapshot of the server's."""
    with _opened(server) as client:
        client.delete_snapshot(snapshot_id)


async def create_async(
    server: str | AsyncClient, spec: SandboxSpec | None, backend: object, parts: dict[str, Any]
) -> AsyncSandbox:
    """As `create`."""
    client, is_ours = _client_async(server)
    try:
        made = await client.create(spec, backend=_name(backend), **parts)
    except BaseException:
        if is_ours:
            await client.close()
        raise
    made.owns_transport = is_ours
    return made  # type: ignore[return-value]


async def restore_async(
    server: str | AsyncClient,
    snapshot_id: str,
    spec: SandboxSpec | None,
    secrets: Mapping[str, str] | None,
) -> AsyncSandbox:
    """As `restore`."""
    client, is_ours = _client_async(server)
    try:
        made = await client.restore(snapshot_id, spec, secrets=secrets)
    except BaseException:
        if is_ours:
            await client.close()
        raise
    made.owns_transport = is_ours
    return made  # type: ignore[return-value]


def client_async(server: str | AsyncClient) -> AbstractAsyncContextManager[AsyncClient]:
    """The client of an address, closed at the end of the block unless it is the caller's."""
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def opened() -> AsyncIterator[AsyncClient]:
        client, is_ours = _client_async(server)
        try:
            yield client
        finally:
            if is_ours:
                await client.close()

    return opened()


def _opened(server: str | Client) -> AbstractContextManager[Client]:
    from contextlib import contextmanager

    @contextmanager
    def opened() -> Iterator[Client]:
        client, is_ours = _client(server)
        try:
            yield client
        finally:
            if is_ours:
                client.close()

    return opened()


def _client(server: str | Client) -> tuple[Client, bool]:
    from ..client import Client

    return (server, False) if isinstance(server, Client) else (Client(server), True)


def _client_async(server: str | AsyncClient) -> tuple[AsyncClient, bool]:
    from ..client import AsyncClient

    return (server, False) if isinstance(server, AsyncClient) else (AsyncClient(server), True)


def _name(backend: object) -> str:
    """None means: whichever the server has."""
    if backend is None:
        return ""
    if not isinstance(backend, str):
        from ..errors import InvalidRequest

        raise InvalidRequest("a server takes the name of a backend", field="backend")
    return backend
