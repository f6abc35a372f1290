"""In gVisor the newest processes die where there are more than there may be, and their exec says so."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ringfence.guest import looking
from ringfence.guest import watchdog as watchdogs
from ringfence.guest.execs import Exec, Execs
from ringfence.guest.watchdog import Watchdog
from ringfence.launcher import wire

pytestmark = pytest.mark.anyone


class _Groups:
    """As `guest.groups.Groups`: who is in which exec."""

    def __init__(self, members: dict[int, list[int]]) -> None:
        self._members = members
        self.used = -(1 << 60)

    def count(self) -> int:
        return sum(map(len, self._members.values()))

    def memory_bytes(self) -> int:
        return self.used

    def own_bytes(self) -> int:
        return self.memory_bytes()

    def members(self, number: int) -> list[int]:
        return self._members[number]


@pytest.fixture
def pair() -> Iterator[list[subprocess.Popen[bytes]]]:
    made = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    yield sorted(made, key=lambda each: each.pid)
    for each in made:
        each.kill()
        each.wait()


@pytest.mark.parametrize(
    ("most", "marks"), [(1, (0, wire.CROWDED)), (2, (wire.FULL, wire.FULL)), (3, (0, 0))]
)
def test_the_exec_whose_process_is_one_too_many_is_marked(
    pair: list[subprocess.Popen[bytes]], most: int, marks: tuple[int, int]
) -> None:
    older, newer = pair
    groups: Any = _Groups({1: [older.pid], 2: [newer.pid]})
    execs = Execs(groups, counts_cpu=False)
    nobody: Any = None
    for number in (1, 2):
        execs.running[number] = Exec(number, "sleep", 0, nobody, 0.0)

    Watchdog(execs, pids=most, memory_bytes=1).look()

    assert marks == (execs.running[1].crowded, execs.running[2].crowded)
    assert older.poll() is None
    if most == 1:
        assert -signal.SIGKILL == newer.wait(30)
    else:
        assert newer.poll() is None


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others of this machine write and remove some meanwhile."""
    monkeypatch.setattr(Watchdog, "file_bytes", lambda _self: 0)


LIMIT = 1 << 40  # more than any process here has


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("limit", [1, LIMIT])
def test_only_memory_of_living_processes_has_one_killed_at_once(
    pair: list[subprocess.Popen[bytes]], limit: int
) -> None:
    """gVisor frees that of the others later."""
    groups, watchdog = _watching(pair[0], limit)

    groups.used = LIMIT + 1
    watchdog.look()
    killed = watchdog._execs.running[1].killed_by

    assert (wire.KILLED_BY_MEMORY_WATCHDOG if limit == 1 else wire.KILLED_BY_NOBODY) == killed


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("freed_s", "steps", "killed"),
    [
        (3600.0, (1, 1 << 20), False),
        (3600.0, (1, 1 << 26), True),  # of a file in memory that no process has mapped
        (0.0, (1, 1), True),
        (0.0, (1 << 26, 1), False),  # some was freed
        (0.0, (1, -1, 1), False),  # all was, and it is another's now
    ],
)
def test_what_is_being_freed_may_be_so_for_a_while(
    pair: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    freed_s: float,
    steps: tuple[int, ...],
    killed: bool,
) -> None:
    groups, watchdog = _watching(pair[0], LIMIT)
    monkeypatch.setattr(watchdogs, "_FREED_S", 3600.0)

    for step in steps:
        groups.used = LIMIT + step
        watchdog.look()
        watchdog._freed_by += freed_s - 3600.0  # as if that much time had passed
        time.sleep(watchdog.wait_s() or 0)

    assert killed == bool(watchdog._execs.running[1].killed_by)


@pytest.mark.usefixtures("files")
def test_nobody_dies_for_one_that_is_being_killed(
    pair: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    dying, other = (each.pid for each in pair)
    groups, watchdog = _watching(pair[0], LIMIT)
    monkeypatch.setattr(
        looking, "resident", {dying: LIMIT // 2, other: LIMIT // 2 + 2, os.getpid(): 0}.get
    )
    nobody: Any = None
    running = watchdog._execs.running
    running[1].killed_by = wire.KILLED_BY_TIMEOUT
    running[2] = Exec(2, "sleep", 0, nobody, 0.0)
    groups._members[2] = [other]

    groups.used = LIMIT + 2
    watchdog.look()

    assert wire.KILLED_BY_NOBODY == running[2].killed_by


@pytest.mark.parametrize(("own", "is_killed"), [(LIMIT + 1, True), (LIMIT, False)])
def test_memory_that_no_exec_has_is_not_overlooked(
    own: int, is_killed: bool, pair: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process without a filter can leave its exec; what a closer look finds of all counts."""
    groups, watchdog = _watching(pair[0], LIMIT, owns_root=False)
    groups.used = 2 * LIMIT
    monkeypatch.setattr(groups, "own_bytes", lambda: own)

    watchdog.look()
    watchdog._freed_by, watchdog._next_look = 0.0, 0.0  # as if its patience were over
    watchdog.look()

    assert is_killed == (wire.KILLED_BY_MEMORY_WATCHDOG == watchdog._execs.running[1].killed_by)


def _watching(
    process: subprocess.Popen[bytes], limit: int, *, owns_root: bool = True
) -> tuple[_Groups, Watchdog]:
    groups: Any = _Groups({1: [process.pid]})
    execs = Execs(groups, counts_cpu=False)
    nobody: Any = None
    execs.running[1] = Exec(1, "sleep", 0, nobody, 0.0)
    return groups, Watchdog(execs, pids=9, memory_bytes=limit, owns_root=owns_root)
