"""The host's thread that listens to an egress process: without it, no caller waits for ever."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.egress.host.line import Line
from ringfence.errors import NetworkPolicyError

# One thread's stack is more than the address space has left, and an interpreter's is not.
_LEFT, _STACK = 256 << 20, 512 << 20


@pytest.fixture(name="line")
def fixture_line() -> Iterator[Line]:
    line = Line("plain")
    line.flush()
    yield line
    line.close()


def without_threads(asked: str) -> subprocess.CompletedProcess[str]:
    """Run this file's function of that name where no thread can be started."""
    command = [sys.executable, "-c", f"from {__name__} import {asked}; {asked}()"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def take_threads_away() -> None:
    status = Path("/proc/self/status").read_text()
    size = int(status.partition("VmSize:")[2].split()[0]) << 10
    threading.stack_size(_STACK)
    resource.setrlimit(resource.RLIMIT_AS, (size + _LEFT, size + _LEFT))


def begin() -> None:
    take_threads_away()
    try:
        Line("plain")
    except NetworkPolicyError as exc:
        print(exc, exc.hint, sep="\n")
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        print("no child is left")


def test_a_thread_that_cannot_start_is_told_and_leaves_no_process() -> None:
    found = without_threads("begin").stdout.splitlines()
    assert found[0].startswith("no thread could be started for the process that enforces")
    assert ["raise `ulimit -u` or `ulimit -v`", "no child is left"] == found[1:]


def test_a_daemon_that_cannot_start_threads_says_so_and_ends(tmp_path: Path) -> None:
    code = f"from {__name__} import take_threads_away; take_threads_away(); "
    code += "from ringfence.cli.main import main; raise SystemExit(main())"
    command = [sys.executable, "-c", code, "serve", "--state-dir", str(tmp_path / "state")]
    env = {**os.environ, "PYTHONMALLOC": "malloc"}  # what it would start itself again with
    ended = subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=120, check=False
    )
    assert 125 == ended.returncode, ended.stderr
    assert "no thread can be started in this process (raise `ulimit -u`" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_thread_that_dies_ends_all_waiting(line: Line) -> None:
    """What kills it here comes from outside, as a lack of memory would."""
    [listener] = [
        ident
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident() and _is_listening_to(line, frame)
    ]
    line.flush()  # the control: it is answered
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(listener), ctypes.py_object(MemoryError)
    )
    os.kill(line.pid, signal.SIGKILL)  # it looks up from its socket

    with pytest.raises(NetworkPolicyError, match="the thread that listens to it failed: Memory"):
        line.flush()
    with pytest.raises(NetworkPolicyError, match="does not stay up"):
        line.make_authority(["a.test"])
    with pytest.raises(ChildProcessError):
        os.waitpid(line.pid, os.WNOHANG)


def _is_listening_to(line: Line, frame: object) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "_listen" and frame.f_locals["self"] is line:  # type: ignore[attr-defined]
            return True
        frame = frame.f_back  # type: ignore[attr-defined]
    return False
