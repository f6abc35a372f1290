"""What a benchmark has started ends with it, whatever fails."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ringfence.bench import daemon, processes
from ringfence.bench.daemon import Daemon

pytestmark = pytest.mark.anyone


def test_a_daemon_that_does_not_stop_is_killed_and_its_directory_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "_END_S", 0.05)
    monkeypatch.setattr(Daemon, "_command", lambda _self: ["true"])
    there: Any = object.__new__(Daemon)
    there._directory = tempfile.TemporaryDirectory(dir=tmp_path)
    there.process = subprocess.Popen(["sleep", "1000"], stdout=subprocess.PIPE)
    with pytest.raises(subprocess.TimeoutExpired):
        there.close()
    assert (-9, True) == (there.process.returncode, there.process.stdout.closed)
    assert [] == [*tmp_path.iterdir()]


_TREE = """
import os, sys, time
for leads in (False, True):
    if not os.fork():
        if leads:
            os.setsid()
        print(os.getpid(), flush=True)
        time.sleep(1000)
if not os.fork():  # whose parent ends: it stays in the session
    if not os.fork():
        print(os.getpid(), flush=True)
        time.sleep(1000)
    os._exit(0)
time.sleep(1000)
"""


def test_a_tree_ends_with_children_of_other_sessions_and_orphans_of_its_own() -> None:
    leader = subprocess.Popen(
        [sys.executable, "-ISc", _TREE], stdout=subprocess.PIPE, start_new_session=True
    )
    other = subprocess.Popen(["sleep", "1000"])
    assert leader.stdout is not None
    with leader:
        pids = [int(leader.stdout.readline()) for _ in range(3)]
        processes.end_tree(leader.pid)
        assert not {*pids, leader.pid} & processes._parents().keys()
        assert -9 == leader.wait()
    assert other.poll() is None
    other.kill()
    other.wait()


def test_processor_time_and_files_in_memory_are_those_of_the_process() -> None:
    before = processes.memory_file_bytes(os.getpid())
    file = os.memfd_create("x")
    twice = os.dup(file)
    os.write(file, bytes(1 << 20))
    assert 1 << 20 == processes.memory_file_bytes(os.getpid()) - before, "each file counts once"
    os.close(file)
    os.close(twice)
    user_s, system_s = os.times()[:2]
    assert user_s + system_s - 1 < processes.cpu_s(os.getpid()) < sum(os.times()[:2]) + 1
