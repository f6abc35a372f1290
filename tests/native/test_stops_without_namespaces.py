"""Programs of the landlock backend that stand still by SIGSTOP, where no cgroup freezes them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ringfence import Sandbox
from ringfence.backends.landlock import stopping
from ringfence.guest.without_namespaces.landlocked import members
from tests.native.test_without_namespaces import PYTHON, _landlock, of, sandbox

__all__ = ["_landlock", "sandbox"]  # fixtures


def comes_to(pid: int, state: str) -> bool:
    deadline = time.monotonic() + 20
    stat = Path(f"/proc/{pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != state:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


STOPS = "import os; print('up', flush=True); os.kill(os.getpid(), 19)"


def test_what_a_program_stopped_itself_stays_stopped(sandbox: Sandbox) -> None:
    """Where no cgroup freezes, SIGSTOP suspends."""
    inner = of(sandbox)
    own = sandbox.start([PYTHON, "-c", STOPS])
    assert b"up\n" == next(iter(own.stdout))
    (number,) = [pid for pid in members(inner._tag_base) if pid != inner.pid]
    assert comes_to(number, "T")
    other = sandbox.start([PYTHON, "-uc", "input('up\\n')"], stream_stdin=True)
    assert b"up\n" == next(iter(other.stdout))
    stopped = stopping.stop(inner._tag_base, inner.pid)
    (running,) = stopped
    states = comes_to(running, "T"), running != number
    stopping.go_on(inner._tag_base, stopped)
    after = comes_to(running, "S"), comes_to(number, "T")

    assert (True, True) == states
    assert (True, True) == after


def test_what_waits_for_a_disk_is_stopped_too(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state D is said here, three times: no sandbox can make a disk slow."""
    inner = of(sandbox)
    program = sandbox.start([PYTHON, "-uc", "input('up\\n')"], stream_stdin=True)
    assert b"up\n" == next(iter(program.stdout))
    (number,) = [pid for pid in members(inner._tag_base) if pid != inner.pid]
    looks, truly = [], stopping._state

    def state(place: str) -> tuple[str, int]:
        looks.append(place)
        return ("D", truly(place)[1]) if len(looks) < 4 else truly(place)

    monkeypatch.setattr(stopping, "_state", state)
    stopped = stopping.stop(inner._tag_base, inner.pid)
    states = truly(f"/proc/{number}")[0], stopped
    stopping.go_on(inner._tag_base, stopped)

    assert ("T", {number}) == states
    assert comes_to(number, "S")


def test_the_parent_of_a_vfork_stands_still_with_its_child(sandbox: Sandbox) -> None:
    """It waits in state D, in which no signal is looked at, while its child waits for a writer."""
    inner = of(sandbox)
    code = (
        "import os\nos.mkfifo('fifo')\n"
        "done = os.posix_spawn('/bin/echo', ['echo', 'begun'], {},"
        " file_actions=[(os.POSIX_SPAWN_OPEN, 0, 'fifo', os.O_RDONLY, 0)])\nos.waitpid(done, 0)"
    )
    program = sandbox.start([PYTHON, "-c", code])
    while len(found := [pid for pid in members(inner._tag_base) if pid != inner.pid]) < 2:
        time.sleep(0.01)
    parent, child = sorted(found)
    assert comes_to(parent, "D")
    stopped = stopping.stop(inner._tag_base, inner.pid)
    states = comes_to(child, "T"), comes_to(parent, "D"), stopped
    stopping.go_on(inner._tag_base, stopped)
    assert sandbox.shell(": > fifo").ok  # what is written to it, nobody may read any more

    assert (True, True, {parent, child}) == states
    assert b"begun\n" == next(iter(program.stdout))


def test_a_thread_that_ends_meanwhile_hides_no_other(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here each thread but the first has ended whenever it is looked at."""
    inner = of(sandbox)
    code = "import threading; threading.Thread(target=input).start(); print('up', flush=True)"
    program = sandbox.start([PYTHON, "-c", code], stream_stdin=True)
    assert b"up\n" == next(iter(program.stdout))
    (number,) = [pid for pid in members(inner._tag_base) if pid != inner.pid]
    truly = stopping._state

    def state(place: str) -> tuple[str, int]:
        if place != f"/proc/{number}/task/{number}":
            raise FileNotFoundError
        return truly(place)

    assert 2 == len(os.listdir(f"/proc/{number}/task"))
    monkeypatch.setattr(stopping, "_state", state)
    stopped = stopping.stop(inner._tag_base, inner.pid)
    states = truly(f"/proc/{number}")[0], stopped
    stopping.go_on(inner._tag_base, stopped)

    assert ("T", {number}) == states
