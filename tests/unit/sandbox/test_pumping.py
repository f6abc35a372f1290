"""Bytes of an exec: what is read when it ends, deadlines, input, and what is closed however it ends."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from ringfence.backends.optional import DrivenExec
from ringfence.errors import InvalidRequest, SandboxLost
from ringfence.model.execs.exec import ExecRequest, ExecStatus
from ringfence.model.limits import Limits
from ringfence.sandbox import pump as module
from ringfence.sandbox import reactor as reactors
from ringfence.sandbox import waiting
from ringfence.sandbox.pump import Pump, run_for, run_to_end
from ringfence.sandbox.reactor import Reactor

pytestmark = pytest.mark.anyone
PATIENCE_S = 30.0


class Run(DrivenExec):
    """An exec whose ends a test holds.

    Attributes:
        out: Written by the program; `end` closes it.
    """

    grace_s = 0.01

    stdin: int | None

    def __init__(self, *, stdin: bool = False) -> None:
        self.stdout, self.out = os.pipe()
        self.stderr: int | None = None
        self.done, self._end = os.pipe()
        self.input, self.stdin = -1, None
        if stdin:
            self.input, self.stdin = os.pipe()
        for fd in (self.stdout, self.stdin):
            if fd is not None:
                os.set_blocking(fd, False)
        self.killed = self.told_late = 0
        self.is_closed = self.is_abandoned = False
        self.can_abandon = True

    def end(self) -> None:
        os.write(self._end, b"x")

    def status(self) -> ExecStatus:
        return ExecStatus(exit_code=3, signal=None, timed_out=False, duration_s=1.0)

    def close_stdin(self) -> None:
        if self.stdin is not None:
            if self.stdin != self.stdout:
                os.close(self.stdin)
            self.stdin = None

    def kill(self) -> None:
        self.killed += 1

    def overdue(self) -> None:
        self.told_late += 1

    def abandon(self) -> bool:
        self.is_abandoned = True
        return self.can_abandon

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True
        os.close(self.stdout)
        os.close(self.done)
        self.close_stdin()

    def drop(self) -> None:
        for fd in (self.out, self._end, self.input):
            if fd >= 0:
                os.close(fd)


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run()
    yield made
    made.drop()


def pump_of(run: Any, limits: Limits | None = None, **request: Any) -> Pump:
    return Pump(run, ExecRequest(argv=("x",), **request), limits or Limits())


def test_what_is_in_the_pipe_at_the_end_is_read_and_no_more_waited_for(run: Run) -> None:
    """A child in the background may keep the pipe open."""
    pump = pump_of(run)
    os.write(run.out, b"last words")
    run.end()

    result = run_to_end(pump)

    assert (b"last words", 3, False) == (result.stdout, result.exit_code, result.truncated)
    assert run.is_closed
    assert 0 == run.killed


def test_a_writer_that_goes_on_for_ever_is_cut(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DRAIN_BYTES", 10)
    pump = pump_of(run)
    os.write(run.out, bytes(50))
    assert pump.ready(run.done, select.POLLIN)
    assert pump.result().truncated


@pytest.mark.parametrize("first_is_cut", [True, False])
def test_one_stream_that_was_cut_is_enough(
    run: Run, first_is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_DRAIN_BYTES", 10)
    run.stderr, errors = os.pipe()
    os.set_blocking(run.stderr, False)
    pump = pump_of(run)
    os.write(run.out if first_is_cut else errors, bytes(50))
    assert pump.ready(run.done, select.POLLIN)
    assert pump.result().truncated
    os.close(run.stderr)
    os.close(errors)


def test_a_stream_that_rests_is_read_at_the_end_all_the_same(run: Run) -> None:
    pump = pump_of(run)
    del pump.wants[run.stdout]
    pump.resting[run.stdout] = time.monotonic() + 3600
    os.write(run.out, b"last words")
    assert pump.ready(run.done, select.POLLIN)
    assert b"last words" == pump.result().stdout


@pytest.mark.parametrize(
    ("request_bytes", "limit", "kept"), [(8, 4, 8), (None, 4, 4), (None, None, 16)]
)
def test_output_is_bounded_by_the_request_before_the_sandbox(
    run: Run, request_bytes: int | None, limit: int | None, kept: int
) -> None:
    pump = pump_of(run, Limits(output_bytes=limit), max_output_bytes=request_bytes)
    os.write(run.out, b"0123456789abcdef")
    run.end()
    result = run_to_end(pump)
    assert (kept, 16 - kept) == (len(result.stdout), result.stdout_dropped_bytes)


@pytest.mark.parametrize(
    ("own", "wall", "expected"), [(5.0, 9.0, 5.0), (None, 9.0, 9.0), (None, None, None)]
)
def test_the_deadline_is_the_requests_or_the_sandboxes(
    run: Run, own: float | None, wall: float | None, expected: float | None
) -> None:
    pump = pump_of(run, Limits(wall_time_s=wall), timeout_s=own)
    if expected is None:
        assert pump.deadline is None
    else:
        assert pump.deadline is not None
        assert expected - 1 < pump.deadline - time.monotonic() <= expected
    pump.fail()


def test_after_its_deadline_it_is_told_then_abandoned_then_lost(run: Run) -> None:
    pump = pump_of(run, timeout_s=5.0)
    pump.passed_deadline()
    assert (1, False) == (run.told_late, run.is_abandoned)
    pump.passed_deadline()
    assert (1, True) == (run.told_late, run.is_abandoned)
    with pytest.raises(SandboxLost):
        pump.passed_deadline()
    pump.fail()


def test_one_that_cannot_be_abandoned_is_lost(run: Run) -> None:
    run.can_abandon = False
    pump = pump_of(run, timeout_s=5.0)
    pump.passed_deadline()
    with pytest.raises(SandboxLost):
        pump.passed_deadline()
    pump.fail()


def test_the_clock_stands_still_with_a_paused_one(run: Run, monkeypatch: Any) -> None:
    monkeypatch.setattr(Run, "paused", True, raising=False)
    pump = pump_of(run, timeout_s=5.0)
    for _ in range(3):
        pump.passed_deadline()
    assert (0, False) == (run.told_late, run.is_abandoned)
    pump.fail()


def test_an_exec_that_is_lost_is_closed_and_not_killed(run: Run) -> None:
    run.can_abandon = False
    with pytest.raises(SandboxLost):
        run_to_end(pump_of(run, timeout_s=0.001))
    assert run.is_closed
    assert 0 == run.killed


def test_one_that_is_interrupted_is_killed_and_closed(run: Run) -> None:
    def on_stdout(_data: bytes) -> None:
        raise KeyboardInterrupt

    running: Any = run
    pump = Pump(running, ExecRequest(argv=("x",)), Limits(), on_stdout)
    os.write(run.out, b"x")
    with pytest.raises(KeyboardInterrupt):
        run_to_end(pump)
    assert (1, True) == (run.killed, run.is_closed)


def test_a_while_is_over_without_an_end(run: Run) -> None:
    pump = pump_of(run)
    assert run_for(pump, 0.001) is None
    assert not run.is_closed
    run.end()
    assert run_for(pump, PATIENCE_S) is not None


class TestInput:
    def test_it_is_written_whole_and_closed(self) -> None:
        run, data = Run(stdin=True), os.urandom(1 << 20)
        pump = pump_of(run, stdin=data)
        found: list[bytes] = []

        def read() -> None:
            with open(run.input, "rb", closefd=False) as file:
                found.append(file.read())
            run.end()

        thread = threading.Thread(target=read)
        thread.start()
        run_to_end(pump)
        thread.join(PATIENCE_S)
        assert [data] == found
        run.drop()

    def test_what_a_terminal_says_is_read_once_its_input_is_written(self) -> None:
        """Its input and its output are one descriptor."""
        run = Run()
        ours, theirs = socket.socketpair()
        with ours:
            os.dup2(ours.fileno(), run.stdout)
        os.set_blocking(run.stdout, False)
        run.stdin = run.stdout
        pump = pump_of(run, stdin=b"typed")
        pump.ready(run.stdout, select.POLLOUT)
        assert b"typed" == theirs.recv(100)
        assert select.POLLIN == pump.wants[run.stdout]
        theirs.send(b"said")
        pump.ready(run.stdout, select.POLLIN)
        run.end()
        assert b"said" == run_to_end(pump).stdout
        theirs.close()
        run.drop()

    @pytest.mark.parametrize("data", [b"", None])
    def test_without_any_it_is_closed_at_once_where_it_was_given(self, data: bytes | None) -> None:
        run = Run(stdin=True)
        pump = pump_of(run, stdin=data)
        assert (data is not None) == (run.stdin is None)
        pump.fail()
        run.drop()

    def test_a_program_that_reads_none_ends_all_the_same(self) -> None:
        run = Run(stdin=True)
        pump = pump_of(run, stdin=b"x" * 100)
        os.close(run.input)
        run.input = -1
        assert run.stdin is not None
        pump.ready(run.stdin, select.POLLOUT)
        assert run.stdin is None
        run.end()
        run_to_end(pump)
        run.drop()


class TestReactor:
    @pytest.fixture
    def reactor(self) -> Iterator[Reactor]:
        made = Reactor()
        yield made
        made.close()
        made.close()

    def test_the_result_is_the_futures(self, reactor: Reactor, run: Run) -> None:
        future = reactor.drive(pump_of(run))
        os.write(run.out, b"abc")
        run.end()
        assert b"abc" == future.result(PATIENCE_S).stdout
        assert run.is_closed
        assert ({}, {}, {}) == (reactor._pumps, reactor._events, reactor._futures)

    def test_one_that_ends_while_it_rests_is_forgotten(self, reactor: Reactor, run: Run) -> None:
        pump = pump_of(run)
        future = reactor.drive(pump)
        reactor._resting.add(pump)
        run.end()
        assert 3 == future.result(PATIENCE_S).exit_code
        assert set() == reactor._resting

    def test_an_error_of_one_kills_it_and_no_other(self, reactor: Reactor, run: Run) -> None:
        other = Run()

        def on_stdout(_data: bytes) -> None:
            raise ValueError("the caller's")

        running: Any = run
        bad = reactor.drive(Pump(running, ExecRequest(argv=("x",)), Limits(), on_stdout))
        good = reactor.drive(pump_of(other))
        os.write(run.out, b"x")
        with pytest.raises(ValueError, match="the caller's"):
            bad.result(PATIENCE_S)
        assert (1, True) == (run.killed, run.is_closed)
        other.end()
        assert 3 == good.result(PATIENCE_S).exit_code
        other.drop()

    def test_a_deadline_passes_without_any_event(self, reactor: Reactor, run: Run) -> None:
        run.can_abandon = False
        future = reactor.drive(pump_of(run, timeout_s=0.01))
        with pytest.raises(SandboxLost):
            future.result(PATIENCE_S)
        assert (1, 0, True) == (run.told_late, run.killed, run.is_closed)

    def test_a_forked_child_has_a_reactor_of_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reactors, "_reactor", None)
        first = reactors.reactor()
        assert first is reactors.reactor()
        first.owner = 1  # as in a child, which has another pid
        second = reactors.reactor()
        assert first is not second
        for each in (first, second):
            each.close()

    def test_it_ends_once_all_have_ended_and_closes_its_descriptors(self, run: Run) -> None:
        reactor = Reactor()
        own = reactor._wake_read, reactor._wake_write
        future = reactor.drive(pump_of(run))
        reactor.close()
        run.end()
        assert 3 == future.result(PATIENCE_S).exit_code
        until = time.monotonic() + PATIENCE_S
        while not reactor._epoll.closed:
            assert time.monotonic() < until
            os.sched_yield()
        reactor._lock.acquire()  # which its thread holds until all are closed
        assert [False, False] == [os.path.exists(f"/proc/self/fd/{fd}") for fd in own]
        reactor._lock.release()


class TestWaiting:
    async def test_what_is_made_for_who_left_is_ended(self) -> None:
        goes_on, ended = threading.Event(), threading.Event()
        pool = ThreadPoolExecutor(1)

        def make() -> str:
            goes_on.wait(PATIENCE_S)
            return "made"

        def end(made: str) -> None:
            assert made == "made"
            ended.set()

        task = asyncio.ensure_future(waiting.owned(make, end, pool))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not ended.is_set()
        goes_on.set()
        assert await asyncio.to_thread(ended.wait, PATIENCE_S)
        pool.shutdown()

    async def test_what_is_made_for_who_waits_is_not(self) -> None:
        ended: list[int] = []
        pool = ThreadPoolExecutor(1)
        assert 5 == await waiting.owned(lambda: 5, ended.append, pool)

        def fail() -> int:
            raise InvalidRequest("no")

        with pytest.raises(InvalidRequest):
            await waiting.owned(fail, ended.append, pool)
        pool.shutdown()
        assert [] == ended

    async def test_a_result_in_time_is_told_and_a_late_one_times_out(self) -> None:
        future: Future[int] = Future()
        with pytest.raises(TimeoutError):
            await waiting.resolve(waiting.shield(future), 0.001)
        assert not future.cancelled()
        future.set_result(7)
        assert 7 == await waiting.resolve(future, 0)
        assert 7 == await waiting.resolve(future)

    async def test_an_error_reaches_who_waits_behind_a_shield(self) -> None:
        future: Future[int] = Future()
        shielded = waiting.shield(future)
        future.set_exception(InvalidRequest("no"))
        with pytest.raises(InvalidRequest):
            await waiting.resolve(shielded)

    async def test_a_descriptor_is_watched_only_while_it_is_waited_for(self) -> None:
        read, write = os.pipe()
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(waiting.ready(read, "reader"))
        await asyncio.sleep(0)
        os.write(write, b"x")
        await asyncio.wait_for(task, PATIENCE_S)
        assert not loop.remove_reader(read)
        task = asyncio.ensure_future(waiting.ready(read, "reader"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert not loop.remove_reader(read)
        os.close(read)
        os.close(write)

    async def test_the_end_of_what_was_killed_is_waited_for_however_often_one_cancels(self) -> None:
        future: Future[int] = Future()
        task = asyncio.ensure_future(waiting.see_through(future, asyncio.CancelledError()))
        for _ in range(3):
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        future.set_exception(InvalidRequest("how it ended matters to nobody"))
        await asyncio.wait_for(asyncio.wait([task]), PATIENCE_S)
        await waiting.see_through(Future(), ValueError("no cancellation"))
