"""Connections of clients and sandboxes that are dropped, or that outlive their event loop."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import trio

from ringfence import AsyncSandbox
from ringfence.client import AsyncClient
from tests.api.conftest import Daemon

PATIENCE_S = 60.0
Run = Callable[[Callable[[], Any]], Any]


def in_asyncio(main: Callable[[], Any]) -> Any:
    return asyncio.run(main())


pytestmark = [pytest.mark.anyone, pytest.mark.parametrize("run", [in_asyncio, trio.run])]


@pytest.fixture(autouse=True)
def _nothing_to_collect() -> Any:
    """What a test left is collected in it: a warning of that is an error here."""
    gc.collect()
    yield
    gc.collect()


def sockets() -> set[str]:
    """Those of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the directory's own
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {name for name in found if name.startswith("socket:")}


async def until_only(before: set[str]) -> None:
    with anyio.fail_after(PATIENCE_S):
        while sockets() - before:
            gc.collect()
            await anyio.lowlevel.checkpoint()


@pytest.mark.full
def test_a_dropped_sandbox_closes_its_connections(daemon: Daemon, run: Run) -> None:
    async def main() -> None:
        async def use() -> str:
            sandbox = await AsyncSandbox.create(server=f"unix:{daemon.socket}")
            assert "sandbox\n" == (await sandbox.exec(["id", "-un"])).stdout_text
            assert sockets() - before
            return sandbox.id

        before = sockets()
        name = await use()
        await until_only(before)
        async with AsyncClient(f"unix:{daemon.socket}") as client:
            found = await client.get(name)  # it lives on
            await found.terminate()

    run(main)


@pytest.mark.full
def test_dropped_while_its_output_is_read(daemon: Daemon, run: Run) -> None:
    if run is trio.run:
        pytest.skip("httpx2 leaves a generator of httpcore2 to trio, which warns of it")

    async def main() -> None:
        async def use() -> str:
            sandbox = await AsyncSandbox.create(server=f"unix:{daemon.socket}")
            process = await sandbox.start(["sh", "-c", "echo begun; exec sleep 600"])
            assert b"begun\n" == await process.stdout.read()
            return sandbox.id

        before = sockets()
        name = await use()
        await until_only(before)
        async with AsyncClient(f"unix:{daemon.socket}") as client:
            await (await client.get(name)).terminate()

    run(main)


def test_dropped_with_the_loops_last_frame(daemon: Daemon, run: Run) -> None:
    before = sockets()

    async def main() -> str:
        sandbox = await AsyncSandbox.create(server=f"unix:{daemon.socket}")
        return sandbox.id

    name = run(main)
    assert set() == sockets() - before

    async def end() -> None:
        async with AsyncClient(f"unix:{daemon.socket}") as client:
            await (await client.get(name)).terminate()

    run(end)


@pytest.mark.full
def test_a_client_serves_one_event_loop_after_another(daemon: Daemon, run: Run) -> None:
    client = AsyncClient(f"unix:{daemon.socket}")
    before = sockets()
    for _ in range(3):
        assert run(client.health).ok
        assert set() == sockets() - before
    run(client.close)
