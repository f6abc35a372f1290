"""Threads that make calls for the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest

from ringfence.api.workers import Workers

pytestmark = pytest.mark.anyone


@contextlib.contextmanager
def workers(most: int) -> Iterator[Workers]:
    made = Workers(most, "of-a-test")
    try:
        yield made
    finally:
        made.close()


def test_a_call_is_made_in_a_thread_and_its_result_comes_back() -> None:
    def add(one: int, *, other: int) -> tuple[int, bool]:
        return one + other, threading.current_thread() is threading.main_thread()

    async def main() -> tuple[int, bool]:
        with workers(1) as made:
            return await made.do(add, (1,), {"other": 2})

    assert (3, False) == asyncio.run(main())


def test_its_error_comes_back() -> None:
    def fail() -> None:
        raise KeyError("x")

    async def main() -> None:
        with workers(1) as made:
            with pytest.raises(KeyError):
                await made.do(fail)
            assert 1 == await made.do(lambda: 1)  # the thread is there for the next one

    asyncio.run(main())


def test_no_more_threads_than_may_be_and_each_call_has_its_turn() -> None:
    """Control: as many as may be run at once, or the barrier would break."""
    barrier = threading.Barrier(2)

    def meet() -> int:
        barrier.wait(30)
        return threading.get_ident()

    async def main() -> list[int]:
        with workers(2) as made:
            return await asyncio.gather(*(made.do(meet) for _ in range(20)))

    assert 2 == len(set(asyncio.run(main())))


def test_what_is_given_up_before_it_begins_is_not_made() -> None:
    go, made_calls = threading.Event(), list[str]()

    async def main() -> None:
        with workers(1) as made:
            first = asyncio.ensure_future(made.do(go.wait, (30,)))
            second = asyncio.ensure_future(made.do(made_calls.append, ("second",)))
            third = asyncio.ensure_future(made.do(made_calls.append, ("third",)))
            await asyncio.sleep(0)
            second.cancel()
            await asyncio.sleep(0)
            go.set()
            await first
            await third

    asyncio.run(main())

    assert ["third"] == made_calls


def test_closing_gives_up_what_waits_and_lets_what_runs_end() -> None:
    go, began = threading.Event(), threading.Event()

    def run() -> str:
        began.set()
        go.wait(30)
        return "done"

    async def main() -> tuple[str, bool]:
        made = Workers(1, "of-a-test")
        first = asyncio.ensure_future(made.do(run))
        second = asyncio.ensure_future(made.do(str))
        await asyncio.to_thread(began.wait, 30)
        made.close()
        with pytest.raises(RuntimeError):
            await made.do(str)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await second
        return await first, second.cancelled()

    assert ("done", True) == asyncio.run(main())
