"""Each bomb ends itself only: its sandbox runs the next program, and the result says what happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence import Limits, Sandbox
from tests.bombs import BOMBS, MIB, NEVER_BEGAN, limits_of, set_off
from tests.features import require
from tests.native.outside import children_of, init_pid, until

pytestmark = pytest.mark.full

_AT_ITS_LIMIT = (
    "out of memory",
    "processes limit",
    "told the program",
    "timeout",
    "output truncated",
)
_MEMORY = ("malloc", "shared mapping")

# Files stay when the process that wrote them is killed for memory; in ever smaller pieces, to the last page.
_FILL = """
import os
file = os.open('/tmp/x', os.O_CREAT | os.O_WRONLY)
for size in (1 << 20, 1 << 16, 1 << 12):
    if not os.fork():
        while True: os.write(file, bytes(size))
    os.wait()
"""


@pytest.mark.parametrize("name", BOMBS)
def test_it_ends_itself_only(name: str) -> None:
    with Sandbox.create(backend="native", limits=limits_of("native")) as sandbox:
        told = set_off(sandbox, name, 20.0 if name in _MEMORY else 0.5)

    assert any(how in told for how in _AT_ITS_LIMIT), told
    if name in _MEMORY:
        assert told in ("out of memory", "told the program"), told


def test_a_bomb_that_its_timeout_ends_before_it_begins_is_told() -> None:
    """Otherwise a backend in which Python starts slowly lives through bombs that never go off."""
    with Sandbox.create(backend="native", limits=limits_of("native")) as sandbox:
        assert NEVER_BEGAN in set_off(sandbox, "fork", 0.001)
        assert NEVER_BEGAN not in set_off(sandbox, "open files", 20.0)


def test_files_that_fill_the_memory_limit_end_no_sandbox() -> None:
    """What takes memory next is the program that is started, and nothing that the sandbox needs."""
    require("cgroup")
    limits = Limits(memory_bytes=32 * MIB, disk_bytes=32 * MIB)
    with Sandbox.create(backend="native", limits=limits) as sandbox:
        assert sandbox.exec(["python3", "-c", _FILL]).oom_killed
        for _ in range(10):
            sandbox.exec(["true"])
        sandbox.exec(["rm", "/tmp/x"])
        assert b"alive\n" == sandbox.exec(["echo", "alive"]).stdout


@pytest.mark.parametrize("controller", ["memory", "cpu"])
@pytest.mark.parametrize("cpus", [None, 0.5])
def test_pid_1_is_not_where_its_programs_are(controller: str, cpus: float | None) -> None:
    """They share a limit of memory and one share of the processor, started alone or beside others.

    Otherwise each session that a program begins has a share of its own, and the other sandboxes wait.
    """
    require("cgroup v1")
    with Sandbox.create(backend="native", limits=Limits(cpus=cpus)) as sandbox:
        for _ in range(2):
            sandbox.start(["sleep", "60"])
        first = init_pid(sandbox)
        assert until(lambda: 2 == len(_sleeping(first)))
        programs = [_cgroup(pid, controller) for pid in _sleeping(first)]
        own = _cgroup(first, controller)

        assert all(each.startswith(f"{own}/ringfence.") for each in programs)


def _sleeping(first: int) -> list[int]:
    """The two, once they have begun."""
    return [pid for pid in children_of(first) if Path(f"/proc/{pid}/comm").read_text() == "sleep\n"]


def _cgroup(pid: int, controller: str) -> str:
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return next(line.split(":", 2)[2] for line in lines if f":{controller}:" in line).rstrip("/")
