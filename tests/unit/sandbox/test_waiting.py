"""Waiting under asyncio and trio: results, errors, time limits, and callers that are cancelled meanwhile."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import trio
import trio.testing

from ringfence.client._async import pauses
from ringfence.errors import ExecError, ServerUnreachable
from ringfence.sandbox import waiting
from ringfence.sandbox.aio_process import AsyncStdin, AsyncStream
from ringfence.sandbox.process import StdinWriter
from ringfence.sandbox.stream import Stream

pytestmark = pytest.mark.anyone

PATIENCE_S = 60.0
Run = Callable[[Callable[[], Awaitable[Any]]], Any]


def in_asyncio(main: Callable[[], Any]) -> Any:
    return asyncio.run(main())


both = pytest.mark.parametrize("run", [in_asyncio, trio.run])


@both
def test_a_future_gives_its_result_or_its_error_in_time(run: Run) -> None:
    async def main() -> None:
        done: Future[int] = Future()
        done.set_result(3)
        for limit in (None, 0, -1.0, 5.0):
            assert 3 == await waiting.resolve(done, limit)
        failed: Future[int] = Future()
        failed.set_exception(KeyError("x"))
        for limit in (None, 0, 5.0):
            with pytest.raises(KeyError):
                await waiting.resolve(failed, limit)
        for limit in (0, 0.001):
            late: Future[int] = Future()
            with pytest.raises(TimeoutError):
                await waiting.resolve(waiting.shield(late), limit)
            assert not late.cancelled(), "it goes on"
            threading.Timer(0.001, late.set_result, [4]).start()
            assert 4 == await waiting.resolve(late)

    run(main)


def test_a_shield_is_cancelled_without_what_is_behind_it() -> None:
    inner: Future[int] = Future()
    outer, other = waiting.shield(inner), waiting.shield(inner)
    assert outer.cancel()
    inner.set_result(1)
    assert (1, True) == (other.result(0), outer.cancelled())
    failed: Future[int] = Future()
    shielded = waiting.shield(failed)
    failed.set_exception(KeyError("x"))
    with pytest.raises(KeyError):
        shielded.result(0)
    with pytest.raises(CancelledError):
        outer.result(0)


class Slow:
    """Something that is made while nobody may wait for it any more."""

    def __init__(self, error: Exception | None = None) -> None:
        self.may_go, self.begun, self.ended = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self.error = error
        self.was_ended: list[str] = []

    def make(self) -> str:
        self.begun.set()
        assert self.may_go.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        return "made"

    def end(self, made: str) -> None:
        self.was_ended.append(made)
        self.ended.set()


@both
def test_what_is_made_for_a_caller_who_is_gone_is_ended_once(run: Run) -> None:
    async def main() -> None:
        slow = Slow()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(waiting.owned, slow.make, slow.end)
                await anyio.to_thread.run_sync(slow.begun.wait, PATIENCE_S)
                scope.cancel()
        assert [] == slow.was_ended
        slow.may_go.set()
        assert await anyio.to_thread.run_sync(slow.ended.wait, PATIENCE_S)
        assert ["made"] == slow.was_ended
        slow.may_go.set()
        assert "made" == await waiting.owned(slow.make, slow.end)
        assert ["made"] == slow.was_ended, "one that arrived is its caller's"
        failing = Slow(KeyError("x"))
        failing.may_go.set()
        with pytest.raises(KeyError):
            await waiting.owned(failing.make, failing.end)
        assert [] == failing.was_ended
        gone: Future[str] = Future()
        gone.set_exception(KeyError("x"))
        waiting._end_made(failing.end, gone)
        assert [] == failing.was_ended, "nothing was made"

    run(main)


@both
def test_a_call_of_hours_is_not_waited_for_by_a_caller_who_is_gone(run: Run) -> None:
    async def main() -> None:
        slow = Slow()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(waiting.in_own_thread, slow.make)
                await anyio.to_thread.run_sync(slow.begun.wait, PATIENCE_S)
                scope.cancel()
        slow.may_go.set()
        assert "made" == await waiting.in_own_thread(slow.make)
        slow.error = KeyError("x")
        with pytest.raises(KeyError):
            await waiting.in_own_thread(slow.make)

    run(main)


@both
def test_an_end_is_seen_through_by_a_caller_who_was_cancelled(run: Run) -> None:
    """However often; and not by one who failed for another reason, nor for ever."""

    async def main() -> None:
        order: list[str] = []
        dying: Future[None] = Future()

        async def caller() -> None:
            try:
                await anyio.sleep_forever()
            except BaseException as exc:
                order.append("cancelled")
                await waiting.see_through(dying, exc, PATIENCE_S)
                order.append("seen")
                raise

        if run is in_asyncio:
            task = asyncio.ensure_future(caller())
            await asyncio.sleep(0)
            for _ in range(3):
                task.cancel()
                for _ in range(3):
                    await asyncio.sleep(0)
            assert ["cancelled"] == order
            dying.set_exception(KeyError("how it ended is nobody's business"))
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(caller)
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
                with trio.CancelScope(shield=True):
                    await trio.testing.wait_all_tasks_blocked()
                    assert ["cancelled"] == order
                    dying.set_exception(KeyError("how it ended is nobody's business"))
        assert ["cancelled", "seen"] == order
        never: Future[None] = Future()
        await waiting.see_through(never, KeyError("another"), PATIENCE_S)
        assert not never.done()

    run(main)


# -- the client's own ------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("error", [None, ServerUnreachable("gone")])
def test_what_a_server_makes_for_a_caller_who_is_gone_is_ended(
    run: Run, error: Exception | None
) -> None:
    async def main() -> None:
        begun, may_go, order = anyio.Event(), anyio.Event(), list[str]()

        async def make() -> str:
            begun.set()
            await may_go.wait()
            order.append("made")
            if error is not None:
                raise error
            return "it"

        async def end(made: str) -> None:
            await anyio.sleep(0)
            order.append(f"ended {made}")

        async def call() -> None:
            try:
                await pauses.made(make, end)
            except BaseException as exc:
                order.append(type(exc).__name__)
                raise

        if run is in_asyncio:
            task = asyncio.ensure_future(call())
            await begun.wait()
            for _ in range(3):
                task.cancel()
                await asyncio.sleep(0)
            may_go.set()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(call)
                    await begun.wait()
                    scope.cancel()
                    with anyio.CancelScope(shield=True):
                        await anyio.lowlevel.checkpoint()
                    may_go.set()
        if error is None:
            assert ["made", "ended it"] == order[:2]
        else:
            assert ["made"] == order[:1]
            assert not any(each.startswith("ended") for each in order)
        assert 1 == sum(each == "made" for each in order)

    if run is in_asyncio or error is None:
        run(main)
    else:  # the server's own error is not lost
        with pytest.raises(BaseExceptionGroup) as raised:
            run(main)
        assert raised.value.subgroup(ServerUnreachable) is not None


@both
def test_what_is_seen_through_has_its_result_and_its_error(run: Run) -> None:
    async def give() -> int:
        await anyio.sleep(0)
        return 7

    async def fail() -> int:
        await anyio.sleep(0)
        raise KeyError("x")

    async def main() -> None:
        assert 7 == await pauses.to_the_end(give)
        with pytest.raises(KeyError):
            await pauses.to_the_end(fail)
        assert 7 == await pauses.made(give, lambda _: give())  # type: ignore[arg-type, return-value]
        with pytest.raises(KeyError):
            await pauses.made(fail, lambda _: give())  # type: ignore[arg-type, return-value]

    run(main)


# -- streams ---------------------------------------------------------------------------------------


@both
def test_two_readers_of_one_stream_have_each_byte_once(run: Run) -> None:
    async def main() -> None:
        stream = Stream()
        reader, found = AsyncStream(stream), list[bytes]()

        async def read() -> None:
            async for chunk in reader:
                found.append(chunk)

        with pytest.raises(TimeoutError):
            await reader.read(0.001)
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(read)
            for data in (b"a", b"bc", b"d"):
                await anyio.sleep(0)
                stream.feed(data)
            stream.close()
        assert b"abcd" == b"".join(found)
        assert b"" == await reader.read()

    run(main)


def writer_of(fd: int | None) -> Any:
    run = SimpleNamespace(stdin=fd)

    def close_stdin() -> None:
        run.stdin = None

    run.close_stdin = close_stdin
    return SimpleNamespace(open=threading.Lock(), run=run, is_asked=False)


@both
def test_input_waits_for_a_process_that_does_not_read_and_keeps_nothing_open(run: Run) -> None:
    data = os.urandom(1 << 20)

    async def main() -> None:
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        pump = writer_of(writing)
        blocking = StdinWriter(pump)
        stdin = AsyncStdin(SimpleNamespace(stdin=blocking))  # type: ignore[arg-type]
        before = len(os.listdir("/proc/self/fd"))
        found = bytearray()

        def read(count: int) -> None:
            while len(found) < count:
                found.extend(os.read(reading, 1 << 16))

        async with anyio.create_task_group() as group:
            group.start_soon(anyio.to_thread.run_sync, read, len(data))
            await stdin.write(data)
        assert data == bytes(found)
        thread = threading.Thread(target=read, args=(2 * len(data),))
        thread.start()
        await anyio.to_thread.run_sync(blocking.write, data)
        await anyio.to_thread.run_sync(thread.join)
        assert data * 2 == bytes(found)
        with anyio.move_on_after(
            0.01
        ) as scope:  # nobody reads: it waits, and holds a descriptor meanwhile
            await stdin.write(data)
        assert scope.cancelled_caught
        assert before == len(os.listdir("/proc/self/fd"))
        os.close(reading)
        for write in (blocking.write, lambda data: anyio.from_thread.run(stdin.write, data)):
            with pytest.raises(ExecError, match="no longer reads"):
                await anyio.to_thread.run_sync(write, b"x")
        await stdin.close()
        with pytest.raises(ExecError, match="closed"):
            await stdin.write(b"x")
        assert pump.is_asked
        os.close(writing)

    run(main)
