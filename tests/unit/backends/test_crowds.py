"""In gVisor the newest processes die where there are more than there may be, and their exec says so."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ringfence.guest import watchdog as watchdogs
from ringfence.guest.execs import Exec, Execs
from ringfence.guest.watchdog import Watchdog
from ringfence.launcher import wire


class _Groups:
    """As `guest.groups.Groups`: who is in which exec."""

    def __init__(self, members: dict[int, list[int]]) -> None:
        self._members = members
        self.used = -(1 << 60)

    def count(self) -> int:
        return sum(map(len, self._members.values()))

    def memory_bytes(self) -> int:
        return self.used

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


def test_nobody_dies_for_memory_that_is_being_freed(
    pair: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one was killed for it, the next only dies where more is used than then."""
    monkeypatch.setattr(watchdogs, "_FREED_S", 3600.0)
    files = os.statvfs("/")  # which others of this machine write and remove meanwhile
    monkeypatch.setattr(os, "statvfs", lambda _path: files)
    older, newer = pair
    groups: Any = _Groups({1: [older.pid]})
    execs = Execs(groups, counts_cpu=False)
    nobody: Any = None
    execs.running[1] = Exec(1, "sleep", 0, nobody, 0.0)
    watchdog = Watchdog(execs, pids=9, memory_bytes=1)

    groups.used = 1 << 40
    watchdog.look()
    assert -signal.SIGKILL == older.wait(30)
    groups._members = {2: [newer.pid]}
    execs.running = {2: Exec(2, "sleep", 0, nobody, 0.0)}
    time.sleep(watchdog.wait_s() or 0)
    watchdog.look()
    assert newer.poll() is None

    groups.used += 1
    time.sleep(watchdog.wait_s() or 0)
    watchdog.look()
    assert -signal.SIGKILL == newer.wait(30)
