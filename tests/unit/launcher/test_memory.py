"""Memory that a process is charged with where PID 1 samples it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.features import require

from ringfence.launcher.pid1 import processes
from ringfence.launcher.pid1.watchdog import Watchdog

pytestmark = pytest.mark.anyone

_STATUS = (
    "Name:\tpython3\nPPid:\t{}\nRssAnon:\t    600 kB\nRssFile:\t  10 kB\nRssShmem:\t     24 kB\n"
)


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /proc of the test's own."""
    monkeypatch.setattr(processes, "directory", lambda pid: f"{tmp_path}/{pid}")
    return tmp_path


def put(proc: Path, pid: int, parent: int, rollup: str = "") -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "status").write_text(_STATUS.format(parent))
    if rollup:
        (proc / str(pid) / "smaps_rollup").write_text(rollup)


def test_shared_pages_are_divided_by_their_users(proc: Path) -> None:
    put(
        proc,
        5,
        2,
        "00400000-7fff rollup\nPss_Anon:     100 kB\nPss_File:   9 kB\nPss_Shmem:  4 kB\n",
    )

    assert 104 << 10 == processes.own_bytes(5)


def test_what_forbids_a_closer_look_is_charged_with_all_but_a_helper(proc: Path) -> None:
    """A helper's parent is outside. While it makes a copy its memory is another helper's, and the copy's."""
    put(proc, 5, 2)
    put(proc, 6, 0)
    put(proc, 1, 0)

    assert [624 << 10, 0, 624 << 10] == [processes.own_bytes(pid) for pid in (5, 6, 1)]
    assert 0 == processes.own_bytes(99)


_OBJECTS = """
import ctypes, os
from ringfence.launcher.pid1.processes import ipc_bytes
from ringfence.linux import namespaces
namespaces.unshare(namespaces.CLONE_NEWUSER | namespaces.CLONE_NEWIPC)
libc, said = ctypes.CDLL(None), [ipc_bytes()]
assert 0 == libc.msgsnd(libc.msgget(0, 0o600), b"\\1" + bytes(7 + 1000), 1000, 0)
said.append(ipc_bytes())
assert libc.semget(0, 10, 0o600) >= 0
said.append(ipc_bytes())
segment = libc.shmget(0, 5000, 0o600)
libc.shmat.restype = ctypes.c_void_p
at = ctypes.c_void_p(libc.shmat(segment, None, 0))
ctypes.memset(at, 1, 5000)
said.append(ipc_bytes())
libc.shmdt(at)
print(*said, ipc_bytes())
"""


def test_each_kind_of_system_v_object_counts() -> None:
    """Messages, semaphores, and shared memory that no process has: else that one is charged."""
    require("user namespaces")
    done = subprocess.run(
        [sys.executable, "-c", _OBJECTS],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert "" == done.stderr
    pages = 2 * os.sysconf("SC_PAGE_SIZE")
    both = 1000 + 10 * 64
    assert [0, 1000, both, both, both + pages] == [int(n) for n in done.stdout.split()]


@pytest.mark.parametrize(
    ("disk", "shared", "counted"),
    [(False, 0, ["/"]), (False, 4096, ["/"]), (True, 4096, ["/dev/shm"]), (True, 0, [])],
)
def test_files_in_memory_are_counted_wherever_they_are(
    disk: bool, shared: int, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A root on disk is no memory, and /dev/shm in it is."""
    asked: list[str] = []
    nobody: list[int] = []

    def file_bytes(path: str) -> int:
        asked.append(path)
        return 4096

    monkeypatch.setattr(processes, "pids", lambda: nobody)
    monkeypatch.setattr(processes, "look_closer", lambda _resident: {})
    monkeypatch.setattr(processes, "file_bytes", file_bytes)
    monkeypatch.setattr(processes, "ipc_bytes", lambda: 0)
    plan: Any = {
        "memory_watchdog_bytes": 4095,
        "id_helpers": False,
        "disk": disk,
        "shared_memory_bytes": shared,
    }
    run, killed = object(), []
    execs: Any = {1: run}
    Watchdog(plan, execs, lambda victim, _why: killed.append(victim)).look()
    assert counted == asked
    assert [run] * len(counted) == killed
