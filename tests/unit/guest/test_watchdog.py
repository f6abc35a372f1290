"""The watchdog of a guest over time: what it still knows of an earlier look, and when it looks again."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.guest import watchdog as module
from ringfence.guest.execs import LOOK_S, Exec, Execs
from ringfence.guest.tags import Tags
from ringfence.guest.watchdog import Watchdog
from ringfence.launcher import wire

pytestmark = pytest.mark.anyone

LIMIT = 1 << 40  # more than any process here has


class Groups(Tags):
    """Processes and memory as a test says."""

    def __init__(self) -> None:
        super().__init__(0)
        self.inside: dict[int, list[int]] = {}
        self.used = 0

    def count(self) -> int:
        return sum(map(len, self.inside.values()))

    def memory_bytes(self) -> int:
        return self.used

    def own_bytes(self) -> int:
        return self.used

    def members(self, number: int) -> list[int]:
        return self.inside.get(number, [])


class Watched:
    """A watchdog at a time of its own, over execs without processes unless they are added."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, pids: int = 10, **options: Any) -> None:
        self.now, self.groups = 1000.0, Groups()
        self.execs = Execs(self.groups, counts_cpu=False)
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(Watchdog, "file_bytes", lambda _self: 0)
        self.watchdog = Watchdog(self.execs, pids=pids, memory_bytes=LIMIT, **options)
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    def add(self, number: int, *pids: int) -> Exec:
        nobody: Any = None
        run = self.execs.running[number] = Exec(number, "x", 0, nobody, 0.0)
        run.started_ns = int(self.now * 1e9)
        self.groups.inside[number] = list(pids)
        return run

    def look(self, used: int, after_s: float = 1.0) -> list[int]:
        """Numbers of those that were killed by this look."""
        self.now += after_s
        self.groups.used = used
        before = {run.number for run in self.execs.running.values() if run.killed_by}
        self.watchdog.look()
        return [
            run.number
            for run in self.execs.running.values()
            if run.killed_by and run.number not in before
        ]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    made = Watched(monkeypatch)
    yield made
    if made.execs.oom_score._fd >= 0:
        os.close(made.execs.oom_score._fd)


@pytest.mark.parametrize("between", ["below", "nothing runs"])
def test_what_is_freed_has_its_time_again_after_it_was_enough(
    watched: Watched, between: str
) -> None:
    run = watched.add(1)
    assert [] == watched.look(LIMIT + 1)
    if between == "below":
        assert [] == watched.look(LIMIT)
    else:
        del watched.execs.running[1]
        assert [] == watched.look(LIMIT + 1)
        watched.execs.running[1] = run
    assert [] == watched.look(LIMIT + 1, after_s=100.0)
    assert [] == watched.look(LIMIT + 1, after_s=module._FREED_S - 0.1)
    assert [1] == watched.look(LIMIT + 1, after_s=0.1), "without progress it has only so long"
    assert wire.KILLED_BY_MEMORY_WATCHDOG == run.killed_by


def test_progress_is_a_reason_to_wait_and_growth_is_none(watched: Watched) -> None:
    watched.add(1)
    step = module._PROGRESS_BYTES
    assert [] == watched.look(LIMIT + 20 * step)
    for number in range(1, 5):
        assert [] == watched.look(LIMIT + 20 * step - number * (step + 1), after_s=4.9)
    watched.look(LIMIT)
    assert [] == watched.look(LIMIT + 1)
    assert [] == watched.look(LIMIT + 1 + module._SLACK_BYTES)
    assert [1] == watched.look(LIMIT + 2 + module._SLACK_BYTES)


def test_one_that_is_killed_already_is_not_the_largest(watched: Watched) -> None:
    first, second = watched.add(1), watched.add(2)
    first.killed_by = wire.KILLED_BY_REQUEST
    assert [] == watched.look(LIMIT + 1)
    assert [2] == watched.look(LIMIT + 1, after_s=100.0)
    assert [wire.KILLED_BY_REQUEST, wire.KILLED_BY_MEMORY_WATCHDOG] == [
        each.killed_by for each in (first, second)
    ]
    assert [] == watched.look(LIMIT + 1, after_s=100.0), "and nothing is left to kill"


@pytest.mark.parametrize("is_gone", [True, False])
def test_one_that_ended_meanwhile_was_not_one_too_many(
    monkeypatch: pytest.MonkeyPatch, is_gone: bool
) -> None:
    watched = Watched(monkeypatch, pids=1)
    with subprocess.Popen(["sleep", "600"]) as process:
        pid = 2**22 + 1 if is_gone else process.pid
        run = watched.add(1, 1, pid)
        watched.look(0)
        assert (0 if is_gone else wire.CROWDED) == run.crowded
        process.kill()
    if watched.execs.oom_score._fd >= 0:
        os.close(watched.execs.oom_score._fd)


def test_it_looks_soon_at_many_and_seldom_at_few(watched: Watched) -> None:
    assert watched.watchdog.wait_s() is None
    watched.add(1)
    assert LOOK_S == watched.watchdog.wait_s()
    watched.look(0)
    assert pytest.approx(0.05) == watched.watchdog.wait_s()
    watched.groups.inside[1] = [1, 2, 3, 4, 2**22 + 1]
    watched.look(0)
    assert pytest.approx(LOOK_S) == watched.watchdog.wait_s(), "half of what there may be"
    watched.groups.inside[1] = []
    watched.look(LIMIT + 1)
    assert pytest.approx(LOOK_S) == watched.watchdog.wait_s(), "while memory is freed"
    looked: list[int] = []
    watched.groups.count = lambda: looked.append(1) or 0  # type: ignore[method-assign,func-returns-value]
    watched.look(0, after_s=LOOK_S / 2)
    assert [] == looked, "not before it is time"
    watched.look(0, after_s=LOOK_S)
    assert [1] == looked


def test_only_the_first_to_run_puts_the_look_off(watched: Watched) -> None:
    first = watched.add(1)
    watched.execs.unseen_s = 0.02
    watched.watchdog.put_off(first)
    assert pytest.approx(0.03) == watched.watchdog.wait_s(), "less what others ran unseen"
    second = watched.add(2)
    watched.now += 0.02
    watched.watchdog.put_off(second)
    assert pytest.approx(0.01) == watched.watchdog.wait_s()


def test_who_counts_waits_until_there_are_no_more_than_there_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch, pids=1)
    counts = iter([3, 2, 1])
    watched.groups.count = lambda: next(counts)  # type: ignore[method-assign]
    reaped: list[float] = []
    monkeypatch.setattr(watched.execs, "reap", lambda: reaped.append(time.monotonic()))
    watched.watchdog.settle()
    assert ([LOOK_S] * 2, 2) == (watched.slept, len(reaped))
    watched.watchdog._memory_bytes = 0
    watched.watchdog.settle()
    if watched.execs.oom_score._fd >= 0:
        os.close(watched.execs.oom_score._fd)
