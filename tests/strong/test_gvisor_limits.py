"""gVisor starts for who has few open files of their own: what the host allows holds inside too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ringfence import Limits, Sandbox
from tests.features import require

HARD = 1024  # what many login shells and services have; a sandbox has 4096 unless told
STARTS = (
    "from ringfence import Sandbox\n"
    "with Sandbox.create(backend='gvisor') as sandbox:\n"
    "    print(sandbox.shell('ulimit -n; ulimit -Hn').text.split(),"
    " sandbox.capabilities().limits.open_files)\n"
)
READ = r"""
find /usr -type f 2>&1 | head -n 2000 > list
tr '\n' '\0' < list | xargs -0 cat 2>&1 > /dev/null | grep -c 'open files'
grep -c 'open files' list
wc -l < list
"""
READS = (
    "from ringfence import Sandbox\n"
    "with Sandbox.create(backend='gvisor') as sandbox:\n"
    f"    print(sandbox.shell({READ!r}).text)\n"
)


@pytest.mark.parametrize("most", [HARD, 8192])
def test_open_files_are_bounded_by_the_caller_s_own(most: int, tmp_path: Path) -> None:
    done = _run_with(most, STARTS, tmp_path)

    inside = min(most, 4096)
    assert f"{[str(inside)] * 2} {inside}\n" == done.stdout, done.stderr


def test_as_many_files_can_be_read_as_there_are(tmp_path: Path) -> None:
    """One after the other: gVisor keeps them open, and gives up the oldest in time."""
    done = _run_with(HARD, READS, tmp_path)

    assert ["0", "0"] == done.stdout.split()[:2], (done.stdout, done.stderr)
    assert int(done.stdout.split()[2]) > HARD


def _run_with(most: int, code: str, place: Path) -> subprocess.CompletedProcess[str]:
    require("user namespaces")
    require("runsc")
    argv = ["sh", "-c", f'ulimit -n {most} && exec "$@"', "sh", sys.executable, "-c", code]
    return subprocess.run(argv, cwd=place, capture_output=True, text=True, check=False)


BURST = "f() { f | f & }; f; sleep 1"  # faster than gVisor's own limit
TRIES = 5  # it may happen that its own was in time


@pytest.mark.parametrize(
    ("limit", "script"), [(16, BURST), (256, "for i in 1 2 3; do true & done")]
)
def test_it_is_told_that_the_newest_processes_were_killed(limit: int, script: str) -> None:
    require("user namespaces")
    require("runsc")
    refused = []
    for _ in range(TRIES):
        with Sandbox.create(backend="gvisor", limits=Limits(pids=limit)) as sandbox:
            sandbox.shell(script)
            refused.append(sandbox.stats().forks_refused)
        if any(refused):
            break

    assert (script == BURST) == any(refused)
