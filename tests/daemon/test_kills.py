"""A handful of kills under load; `python -m tests.daemon.kills` is the long one."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemon import kills

pytestmark = pytest.mark.full

# The file is empty in a session that has no autogroup, such as the one in which the host started.
_NICE_INSIDE = """
import os
from ringfence.daemon import priority
def now():
    group = open("/proc/self/autogroup").read().split()
    return os.getpriority(os.PRIO_PROCESS, 0), group[-1] if group else "none"
with priority.raised():
    print(*now(), *now())
print(*now())
"""


# httpcore leaves a refused unix socket to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_killed_under_load(place: Path) -> None:
    report, _ = kills.run(place / "kills", 5, 8, seed=7, pause_s=0.8)

    assert report.execs > report.kills, "the control: clients worked"
    assert ({}, [], []) == (dict(report.errors), report.wrong, report.left)


@pytest.mark.root
@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="needs autogroup")
def test_loading_goes_before_what_burns() -> None:
    """And what serves has the priority that it was started with."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    for is_leader in (True, False):
        command = [sys.executable, "-c", _NICE_INSIDE]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(["src", *sys.path])}
        said = subprocess.run(
            command,
            check=True,
            env=env,
            capture_output=True,
            text=True,
            start_new_session=is_leader,
        ).stdout.splitlines()
        inside, after = said[0].split(), said[1].split()
        assert (min(before, -10), before) == (int(inside[0]), int(after[0]))
        if is_leader:
            assert "-10" == after[1]


_SESSION = """
import os
from ringfence.daemon import priority
priority.own_session()
print(os.getsid(0) == os.getpid())
"""
# The one in the middle leads the session that the other starts in.
_SHARED = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"


def test_a_daemon_leaves_a_shared_session_that_has_no_terminal() -> None:
    """The scheduler would let it wait for all others in it. Where there is a terminal, Ctrl-C is for it."""
    command = [sys.executable, "-c", _SHARED, _SESSION]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(["src", *sys.path])}
    said = subprocess.run(
        command, check=True, env=env, capture_output=True, text=True, start_new_session=True
    ).stdout
    assert "True\n" == said

    pid, terminal = pty.fork()
    if not pid:
        os.execve(sys.executable, command, env)
    said_there = b""
    with contextlib.suppress(OSError):  # EIO: the last who had it open has ended
        while data := os.read(terminal, 100):
            said_there += data
    assert 0 == os.waitpid(pid, 0)[1]
    os.close(terminal)
    assert b"False\r\n" == said_there
