"""A daemon that starts: its session, and that it goes before others no longer than it loads."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading

import pytest

from ringfence.daemon import priority

_SESSION = """
import os
before = os.getsid(0)
from ringfence.daemon import priority
priority.own_session()
print(os.getsid(0) == os.getpid(), os.getsid(0) == before, flush=True)
"""
_WEIGHT = """
import os
from ringfence.daemon import priority
with open("/proc/self/autogroup") as file:
    before = file.read()
priority._prefer_session()
with open("/proc/self/autogroup") as file:
    print(file.read() == before, flush=True)
"""

_LEADER = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
_CHILD = [sys.executable, "-S", "-c", _LEADER]  # what follows is a child of the session's leader


def test_it_goes_before_others_only_while_it_loads() -> None:
    """In a thread of its own: the priority is one of each thread."""
    found: list[int] = []

    def run() -> None:
        def look() -> None:
            found.append(os.getpriority(os.PRIO_PROCESS, 0))

        look()
        with priority.raised():
            look()
        look()
        try:
            with priority.raised():
                raise KeyError
        except KeyError:
            look()
        os.setpriority(os.PRIO_PROCESS, 0, max(found[0], 5))
        look()
        with priority.raised():
            look()
        look()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    usual, nice = found[0], found[4]
    loading = min(usual, -10) if os.geteuid() == 0 else usual
    again = min(nice, -10) if os.geteuid() == 0 else nice
    assert [usual, loading, usual, usual, nice, again, nice] == found


@pytest.mark.parametrize("has_terminal", [False, True])
def test_it_leaves_a_shared_session_that_has_no_terminal(has_terminal: bool) -> None:
    """Where there is a terminal, its signals are for the daemon too."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(["src", *sys.path])}
    command = [sys.executable, "-c", _SESSION]
    if not has_terminal:
        said = subprocess.run(
            [*_CHILD, *command], check=True, env=env, capture_output=True, start_new_session=True
        )
        assert b"True False\n" == said.stdout
        return
    master, slave = pty.openpty()
    try:
        # setsid(1) makes the terminal that of the new session.
        subprocess.run(
            ["setsid", "--ctty", "--wait", *_CHILD, *command],
            check=True,
            env=env,
            stdin=slave,
            stdout=slave,
        )
        assert b"False True\r\n" == os.read(master, 100)
    finally:
        os.close(master)
        os.close(slave)


@pytest.mark.root
@pytest.mark.parametrize("is_shared", [False, True])
def test_it_weighs_no_session_that_it_shares(is_shared: bool) -> None:
    """A shell's session has all its jobs."""
    if not os.path.exists("/proc/self/autogroup"):
        pytest.skip("no autogroup here")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(["src", *sys.path])}
    command = [sys.executable, "-c", _WEIGHT]
    if is_shared:
        command = [
            sys.executable,
            "-S",
            "-c",
            "import subprocess, sys; subprocess.call(sys.argv[1:])",
            *command,
        ]
    said = subprocess.run(
        command, check=True, env=env, capture_output=True, text=True, start_new_session=True
    )
    assert f"{is_shared}\n" == said.stdout
