"""`AsyncSandbox` under asyncio and trio: whatever waits inside, nothing else waits with it."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import trio

from ringfence import AsyncSandbox, Limits, Sandbox
from ringfence.errors import ExecError
from tests.native.outside import PATIENCE_S

pytestmark = pytest.mark.anyone

Main = Callable[[], Coroutine[Any, Any, None]]
Run = Callable[[Main], None]

_MORE_THAN_THREADS = 40
_RACES = 100


@pytest.fixture(params=["asyncio", "trio"])
def run(request: pytest.FixtureRequest) -> Run:
    if request.param == "trio":
        return trio.run
    return lambda main: asyncio.run(main())


async def together(*tasks: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """All at once, under the loop that runs."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        async with trio.open_nursery() as nursery:
            for task in tasks:
                nursery.start_soon(task)
    else:
        await asyncio.gather(*(task() for task in tasks))


@contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def test_the_whole_surface(run: Run) -> None:
    async def main() -> None:
        async with await AsyncSandbox.create() as sandbox:
            assert b"hi\n" == (await sandbox.exec(["echo", "hi"])).stdout
            await sandbox.files.write("note", b"text")
            assert b"text" == await sandbox.files.read("note")
            process = await sandbox.start(["cat"], stream_stdin=True)
            assert process.stdin is not None
            await process.stdin.write(b"through")
            assert b"through" == await process.stdout.read(PATIENCE_S)
            await process.stdin.close()
            assert 0 == (await process.wait(PATIENCE_S)).exit_code
            await sandbox.suspend()
            await sandbox.resume()
            assert (await sandbox.stats()).execs

    run(main)


def test_idle_readers_hold_nobody_up(run: Run) -> None:
    """More readers of silent processes than there are threads; the sandbox still answers and ends."""

    async def main() -> None:
        async with await AsyncSandbox.create() as sandbox:
            silent = [await sandbox.start(["sleep", "1000"]) for _ in range(_MORE_THAN_THREADS)]

            async def read(number: int) -> None:
                assert b"" == await silent[number].stdout.read()

            async def work() -> None:
                with within(PATIENCE_S):
                    assert (await sandbox.stats()).execs
                    for process in silent:
                        await process.kill()

            await together(*[lambda n=n: read(n) for n in range(len(silent))], work)

    run(main)


def test_a_read_and_a_wait_time_out(run: Run) -> None:
    async def main() -> None:
        async with await AsyncSandbox.create() as sandbox:
            process = await sandbox.start(["sleep", "1000"])
            with pytest.raises(TimeoutError):
                await process.stdout.read(0.01)
            with pytest.raises(TimeoutError):
                await process.wait(0.01)
            assert process.running

    run(main)


def test_a_write_waits_for_its_reader(run: Run) -> None:
    """Far more than a pipe holds, to a process that begins to read late."""

    async def main() -> None:
        data = b"x" * (4 << 20)
        async with await AsyncSandbox.create() as sandbox:
            process = await sandbox.start(["sh", "-c", "read -r _; exec wc -c"], stream_stdin=True)
            assert process.stdin is not None
            await process.stdin.write(b"go\n" + data)
            await process.stdin.close()
            assert b"%d" % len(data) == (await process.wait(PATIENCE_S)).stdout.strip()

    run(main)


def test_a_write_to_nobody_is_an_error(run: Run) -> None:
    async def main() -> None:
        async with await AsyncSandbox.create() as sandbox:
            process = await sandbox.start(["sleep", "0.2"], stream_stdin=True)
            assert process.stdin is not None
            with pytest.raises(ExecError), within(PATIENCE_S):
                await process.stdin.write(b"x" * (4 << 20))

    run(main)


def test_a_cancelled_exec_is_killed(run: Run) -> None:
    async def main() -> None:
        async with await AsyncSandbox.create() as sandbox:
            with within(PATIENCE_S):
                await cancelled_after(0.3, lambda: sandbox.exec(["sleep", "1000"]))
            seen = (await sandbox.shell("cat /proc/[0-9]*/comm")).stdout
            assert b"sleep" not in seen
            assert b"sh\n" in seen

    run(main)


@pytest.mark.full
def test_a_cancelled_exec_leaves_its_place_to_the_next(run: Run) -> None:
    """Killed is not yet gone: whoever was told that it was cancelled has the one process there may be."""

    async def main() -> None:
        limits = Limits(pids=1)
        async with await AsyncSandbox.create(limits=limits, allow_degraded=("*",)) as sandbox:
            for turn in range(_RACES):
                seconds = 0.002 + turn % 10 / 1000
                await cancelled_after(seconds, lambda: sandbox.exec(["sleep", "1000"]))
                assert (await sandbox.exec(["true"])).ok
            await sandbox.start(["sleep", "1000"])
            with pytest.raises(ExecError, match="limit"):  # the control: there is but one place
                await sandbox.exec(["true"])

    run(main)


def test_an_exec_is_gone_however_often_it_is_cancelled() -> None:
    async def main() -> None:
        async with await AsyncSandbox.create(
            limits=Limits(pids=1), allow_degraded=("*",)
        ) as sandbox:
            for _ in range(_RACES):
                task = asyncio.create_task(sandbox.exec(["sleep", "1000"]))
                while not task.done():
                    await asyncio.sleep(0.001)
                    task.cancel()
                assert task.cancelled()
                assert (await sandbox.exec(["true"])).ok

    asyncio.run(main())


async def cancelled_after(seconds: float, task: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with trio.move_on_after(seconds) as scope:
            await task()
        assert scope.cancelled_caught
    else:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(task(), seconds)


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads that spin hand the interpreter on a hundred times as often: more races, and sooner."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(before / 100)
    yield
    sys.setswitchinterval(before)


@pytest.mark.full
@pytest.mark.usefixtures("restless")
def test_input_closed_as_the_process_ends_closes_nothing_else() -> None:
    """Two threads may end one stream at the same moment; a descriptor closed twice is another's."""
    broken: list[str] = []
    enough = threading.Event()

    def pipes_of_another_thread() -> None:
        while not enough.is_set():
            read, write = os.pipe()
            try:
                os.write(write, b"x")
                os.read(read, 1)
                os.close(read)
                os.close(write)
            except OSError as exc:
                broken.append(repr(exc))

    def race(sandbox: Sandbox) -> None:
        for _ in range(_RACES):
            process = sandbox.start(["true"], stream_stdin=True)
            assert process.stdin is not None
            while process.running:
                pass
            process.stdin.close()
            assert 0 == process.wait(PATIENCE_S).exit_code

    with Sandbox.create() as sandbox, ThreadPoolExecutor(4) as pool:
        watching = pool.submit(pipes_of_another_thread)
        racing = [pool.submit(race, sandbox) for _ in range(3)]
        for each in racing:
            each.result()
        enough.set()
        watching.result()

    assert [] == broken
