"""OpenAI Agents with its own client for E2B, unmodified, on a Ringfence server."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.suites.remote import serving_e2b

pytest.importorskip("agents", reason="the newest E2B has no OpenAI Agents beside it")

from agents.extensions.sandbox.e2b import E2BSandboxClient, E2BSandboxClientOptions
from agents.sandbox import Manifest
from agents.sandbox.entries import File
from agents.sandbox.errors import ExecTimeoutError

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
KINDS = ("e2b", "e2b_code_interpreter")


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    with serving_e2b():
        yield


@asynccontextmanager
async def _session(kind: str) -> AsyncIterator[tuple[E2BSandboxClient, Any]]:
    client = E2BSandboxClient()
    options: Any = E2BSandboxClientOptions(sandbox_type=kind, timeout=120)
    manifest = Manifest(entries={"notes.txt": File(content=b"hello")})
    session = await client.create(manifest=manifest, options=options)
    try:
        async with session:
            yield client, session
    finally:
        await client.delete(session)


@pytest.mark.parametrize("kind", KINDS)
def test_commands_files_and_time_limits(kind: str) -> None:
    async def work() -> None:
        async with _session(kind) as (_client, session):
            result = await session.exec("cat notes.txt; pwd")
            assert (b"hello/workspace\n", 0) == (result.stdout, result.exit_code)
            assert 3 == (await session.exec("exit 3")).exit_code
            with pytest.raises(ExecTimeoutError):
                await session.exec("sleep 60", timeout=1)
            await session.write("deep/file", io.BytesIO(b"\0\1"))
            assert b"\0\1" == (await session.read("deep/file")).read()

    asyncio.run(work())


def test_terminals_take_input() -> None:
    async def work() -> None:
        async with _session("e2b") as (_client, session):
            begun = await session.pty_exec_start("cat", tty=True, yield_time_s=0.2)
            seen, written = b"", "line\n"
            while seen.count(b"line") < 2:  # as typed, and as cat says it
                told = await session.pty_write_stdin(
                    session_id=begun.process_id, chars=written, yield_time_s=0.2
                )
                seen, written = seen + told.output, ""
            await session.pty_terminate_all()

    asyncio.run(work())


@pytest.mark.parametrize("kind", KINDS)
def test_a_workspace_is_saved_filled_and_resumed(kind: str) -> None:
    async def work() -> None:
        async with _session(kind) as (client, session):
            saved = (await session.persist_workspace()).read()
            await session.exec("rm notes.txt")
            await session.hydrate_workspace(io.BytesIO(saved))
            assert b"hello" == (await session.exec("cat notes.txt")).stdout
            await session.stop()
            state = client.deserialize_session_state(client.serialize_session_state(session.state))
            async with await client.resume(state) as again:
                assert b"hello" == (await again.exec("cat notes.txt")).stdout

    asyncio.run(work())
