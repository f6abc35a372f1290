"""Sandboxes of this process and of a server, by the same name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ringfence import Sandbox
from ringfence.client import Client
from tests.api.conftest import Daemon, _user_namespaces, common_daemon, daemon, start_daemon

__all__ = ["_user_namespaces", "common_daemon", "daemon", "start_daemon"]

Create = Callable[..., Any]


@pytest.fixture(params=["library", "server"])
def create(request: pytest.FixtureRequest) -> Iterator[Create]:
    """Make a sandbox, here or on a server; see `Sandbox.create`."""
    if "library" == request.param:
        made: set[str] = set()

        def make(**parts: Any) -> Sandbox:
            sandbox = Sandbox.create(**parts)
            made.add(sandbox.id)
            return sandbox

        yield make
        for each in Sandbox.snapshots():
            if each.session_id in made:
                Sandbox.delete_snapshot(each.id)
        return
    running: Daemon = request.getfixturevalue("daemon")
    with Client(f"unix:{running.socket}") as client:
        yield client.create
        assert [] == client.list()
        for each in client.snapshots():
            client.delete_snapshot(each.id)


@pytest.fixture
def sandbox(create: Create) -> Iterator[Any]:
    with create() as made:
        yield made
