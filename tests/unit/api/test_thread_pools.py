"""Calls in threads: so many of one sandbox at once, and nothing counted of what has ended."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.api import exec_bodies, thread_pools
from ringfence.api.thread_pools import BODIES, CONTROL, COPIES, ENDING, PARSING, ThreadPools
from ringfence.errors import InvalidRequest, TooManyRequests

pytestmark = pytest.mark.anyone


@pytest.fixture
def pools() -> Iterator[ThreadPools]:
    made = ThreadPools()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("pool", "width"), [(CONTROL, 4), (COPIES, 8), (ENDING, 1), (BODIES, 1), (PARSING, 1)]
)
async def test_so_many_calls_of_one_sandbox_run_at_once(
    pools: ThreadPools, pool: str, width: int
) -> None:
    """The others wait for their turn, and another sandbox's do not."""
    go, running, lock = threading.Event(), [0], threading.Lock()

    def work() -> None:
        with lock:
            running[0] += 1
        go.wait(30)

    calls = [
        asyncio.ensure_future(pools.call(work, key="one", pool=pool)) for _ in range(width + 2)
    ]
    async with asyncio.timeout(30):
        while running[0] < width:
            await asyncio.sleep(0.001)
    if pool not in (BODIES, PARSING):
        await pools.call(int, key="other", pool=pool)
    assert width == running[0]
    assert width + 2 == pools._queues[pool, "one"].users
    go.set()
    await asyncio.gather(*calls)
    assert {} == pools._queues


async def test_what_fails_or_is_given_up_is_counted_no_longer(pools: ThreadPools) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await pools.call(fail, key="one")
    go = threading.Event()
    calls = [asyncio.ensure_future(pools.call(go.wait, 30, key="one")) for _ in range(6)]
    await asyncio.sleep(0)
    for each in calls:
        each.cancel()
    go.set()
    await asyncio.wait(calls)
    assert {} == pools._queues
    assert 0 == await pools.call(int, key="one")


async def test_so_many_calls_of_one_sandbox_wait(
    pools: ThreadPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 256 == thread_pools._MOST_WAITING
    monkeypatch.setattr(thread_pools, "_MOST_WAITING", 3)
    go = threading.Event()
    calls = [asyncio.ensure_future(pools.call(go.wait, 30, key="one")) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(TooManyRequests):
        await pools.call(int, key="one")
    assert 0 == await pools.call(int, key="other")
    assert 0 == await pools.call(int, key="one", pool=COPIES)
    go.set()
    await asyncio.gather(*calls)
    assert {} == pools._queues


def test_a_sandbox_has_so_many_helpers(pools: ThreadPools) -> None:
    for _ in range(2):
        for _ in range(16):
            pools.begin_task("one")
        with pytest.raises(TooManyRequests):
            pools.begin_task("one")
        pools.begin_task("other")
        pools.end_task("other")
        for _ in range(16):
            pools.end_task("one")
        assert 0 == len(pools._tasks)


async def test_a_call_alone_tells_its_result_or_its_error(pools: ThreadPools) -> None:
    assert 7 == await pools.alone(int, "7")
    with pytest.raises(ValueError, match="invalid literal"):
        await pools.alone(int, "x")


@pytest.mark.parametrize(
    ("given", "number"),
    [(1, 1), (15, 15), (64, 64), ("TERM", 15), ("sigterm", 15), ("SIGKILL", 9), ("KILL", 9)],
)
def test_a_signal_has_a_number_or_a_name(given: object, number: int) -> None:
    assert number == exec_bodies.signal_number(given)


@pytest.mark.parametrize(
    "given",
    [0, -1, signal.NSIG, True, False, 1.5, None, "", "SIG", "NONE", "15", "SIG_DFL", "SIG_BLOCK"],
)
def test_what_is_no_signal_is_refused(given: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        exec_bodies.signal_number(given)
    assert "signal" == refused.value.field


@pytest.mark.parametrize("is_read", [False, True])
async def test_input_waits_for_its_process_for_so_long_and_leaves_no_descriptor(
    is_read: bool,
) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    taken: list[int] = []

    def give(offset: int, left: memoryview) -> int:
        assert offset == sum(taken)
        try:
            count = os.write(writing, left)
        except BlockingIOError:
            count = 0
        taken.append(count)
        return offset + count

    run: Any = SimpleNamespace(give=give, input_place=lambda: os.dup(writing))
    data = bytes(200_000)
    before = len(os.listdir("/proc/self/fd"))
    giving = asyncio.ensure_future(exec_bodies.give(run, 0, data, 30.0 if is_read else 0.01))
    heard = 0
    while is_read and heard < len(data):
        heard += len(await asyncio.to_thread(os.read, reading, 1 << 16))
    reached = await giving
    assert is_read == (reached == len(data))
    assert sum(taken) == reached
    assert before == len(os.listdir("/proc/self/fd"))
    os.close(reading)
    os.close(writing)
