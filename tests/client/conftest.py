"""A daemon for each module, and both clients on it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from ringfence.client import AsyncClient, Client, RemoteSandbox
from tests.api.conftest import Daemon, _user_namespaces, common_daemon, daemon, start_daemon

__all__ = ["_user_namespaces", "common_daemon", "daemon", "start_daemon"]


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(f"unix:{daemon.socket}") as found:
        yield found


@pytest.fixture
def sandbox(client: Client) -> Iterator[RemoteSandbox]:
    with client.create() as found:
        yield found


@pytest.fixture
async def async_client(daemon: Daemon) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(f"unix:{daemon.socket}") as found:
        yield found
