"""Waiting under asyncio and trio: what is cancelled, what is seen through, and what is given back."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio

from ringfence.client import AsyncClient
from ringfence.client._async import pauses
from ringfence.client._async.contexts import default_context
from ringfence.client._async.transport import AsyncTransport
from ringfence.errors import LifecycleError
from tests.client.scripted import Answer, Request, as_json, served
from tests.client.test_asked_again import sandbox_view

pytestmark = pytest.mark.anyone

Run = Callable[[Callable[[], Any]], Any]


def in_asyncio(main: Callable[[], Any]) -> Any:
    return asyncio.run(main())


@pytest.mark.parametrize("run", [in_asyncio, trio.run])
def test_who_waits_for_what_blocks_goes_when_cancelled(run: Run) -> None:
    goes_on = threading.Event()
    ways: tuple[Callable[[], Any], ...] = (
        partial(pauses.blocking, goes_on.wait, 2),
        partial(pauses.in_own_thread, partial(goes_on.wait, 2)),
    )

    async def main() -> None:
        for way in ways:
            with anyio.move_on_after(0.001) as scope:
                await way()
            assert scope.cancelled_caught

    try:
        run(main)
    finally:
        goes_on.set()


def test_what_may_last_for_hours_keeps_nothing_else_from_a_thread() -> None:
    """More of it than threads that anyio lends out at once."""
    count = 45
    meeting = threading.Barrier(count, timeout=10)

    async def main() -> None:
        async with anyio.create_task_group() as group:
            for _ in range(count):
                group.start_soon(pauses.in_own_thread, meeting.wait)
            await pauses.blocking(int)

    asyncio.run(main())


@pytest.mark.parametrize("fails", [False, True])
async def test_what_a_cancelled_caller_makes_is_ended_and_nothing_else(fails: bool) -> None:
    goes_on, done = asyncio.Event(), list[str]()

    async def make() -> str:
        done.append("begun")
        await goes_on.wait()
        if fails:
            raise LifecycleError("no")
        return "it"

    async def end(found: str) -> None:
        await asyncio.sleep(0)
        done.append(f"ended {found}")

    task = asyncio.ensure_future(pauses.made(make, end))
    while not done:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done(), "only the answer says what there is to end"
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ["begun", *([] if fails else ["ended it"])] == done


def test_so_it_is_under_trio() -> None:
    done: list[str] = []

    async def make() -> str:
        await trio.lowlevel.checkpoint()
        done.append("made")
        return "it"

    async def end(found: str) -> None:
        await trio.lowlevel.checkpoint()
        done.append(f"ended {found}")

    async def main() -> None:
        assert "it" == await pauses.made(make, end)
        with trio.CancelScope() as scope:
            scope.cancel()
            await pauses.made(make, end)
        assert scope.cancelled_caught
        with trio.CancelScope() as scope:
            scope.cancel()
            done.append(await pauses.to_the_end(make))

    trio.run(main)
    assert ["made", "made", "ended it", "made", "it"] == done


async def test_connections_of_an_earlier_loop_close_without_those_of_a_later_one() -> None:
    closed: list[str] = []

    class Client:
        async def aclose(self) -> None:
            closed.append("closed")

    earlier, later = Client(), Client()
    transport: Any = AsyncTransport("unix:/none", "", 1.0, 0)
    transport._client = later
    for client, kept in ((earlier, later), (later, None)):
        await pauses._close(weakref.ref(transport), client)  # type: ignore[arg-type]
        assert kept is transport._client
    assert 2 == len(closed)


def contexts(request: Request) -> Answer:
    if "/contexts" not in request.path:
        return as_json(sandbox_view().to_json())
    return as_json({"id": "ctx-a", "language": "python", "running": True})


async def test_what_blocks_is_closed_with_what_awaits(tmp_path: Path) -> None:
    with served(tmp_path / "s", contexts) as (_, server):
        async with AsyncClient(f"unix:{tmp_path / 's'}") as client:
            box = await client.get("sbx-a")
            transport = box._transport.blocking
            assert transport is box._transport.blocking
            transport.json("GET", "/x")
            assert transport._client is not None
        assert transport._client is None
        assert 2 == len(server.requests)


async def test_contexts_of_a_fork_go_on_where_it_is_awaited_and_are_found_once(
    tmp_path: Path,
) -> None:
    with served(tmp_path / "s", contexts) as (_, server):
        async with AsyncClient(f"unix:{tmp_path / 's'}") as client:
            box = await client.get("sbx-a")
            box._carried = ["ctx-a"]
            found = [await default_context(box, "python") for _ in range(2)]
            known = await box.context(id="ctx-a")
        assert {"ctx-a"} == {each.id for each in (*found, known)}
        assert ["GET sbx-a", "GET ctx-a"] == server.asked
