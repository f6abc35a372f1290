"""gVisor starts for who has few open files of their own: what the host allows holds inside too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ringfence import Limits, Sandbox
from ringfence.backends.gvisor import runsc
from ringfence.errors import LifecycleError, SandboxLost
from tests.features import require

pytestmark = pytest.mark.full

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


COUNT = """
import os, signal, sys, time
count = 0
try:
    while count < int(sys.argv[1]):
        if not os.fork(): signal.pause()
        count += 1
except OSError: pass
os.write(1, b"%d" % count)
time.sleep(0.5)
os.killpg(0, signal.SIGKILL)
"""


@pytest.mark.parametrize("user", [None, "root"])
def test_a_fork_bomb_ends_itself_only(user: str | None) -> None:
    """gVisor lets no process more through than there may be, and so has threads enough for those there are."""
    require("user namespaces")
    require("runsc")
    with Sandbox.create(backend="gvisor", user=user, limits=Limits(pids=16)) as sandbox:
        counted = sandbox.exec(["python3", "-c", COUNT, "64"])
        bomb = sandbox.start(["sh", "-c", "f() { f | f & }; f; sleep 1"])
        bomb.wait(60)
        bomb.kill()

        assert "15" == counted.stdout_text
        assert sandbox.exec(["true"]).ok


def test_that_the_processes_limit_was_reached_is_told() -> None:
    require("user namespaces")
    require("runsc")
    with Sandbox.create(backend="gvisor", limits=Limits(pids=16)) as sandbox:
        sandbox.exec(["python3", "-c", COUNT, "7"])
        before = sandbox.stats().forks_refused
        sandbox.exec(["python3", "-c", COUNT, "64"])

        assert (None, 1) == (before, sandbox.stats().forks_refused)


def test_a_sandbox_that_the_host_has_no_threads_for_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require("user namespaces")
    require("runsc")
    monkeypatch.setattr(runsc, "_most_of_the_host", lambda: 60)
    with Sandbox.create(backend="gvisor", limits=Limits(pids=64)) as sandbox:
        why = "may have 60 processes and threads of the host, and needed more for limits.pids=64"
        with pytest.raises(SandboxLost, match=why):
            sandbox.exec(["python3", "-c", COUNT, "64"])
        with pytest.raises(LifecycleError, match=why):
            sandbox.exec(["true"])


def test_no_sandbox_may_have_most_ids_of_the_host_s_processes() -> None:
    """Where `threads-max` is larger, a fork bomb would have them all: no program of the host's starts then."""
    most = int(Path("/proc/sys/kernel/pid_max").read_text())

    assert runsc.host_pids(1 << 20) <= most // 4


def test_as_many_processes_as_there_are_by_default_are_safe() -> None:
    """And so many may really be there."""
    require("user namespaces")
    require("runsc")
    most = min(512, runsc.safe_pids())
    with Sandbox.create(backend="gvisor") as sandbox:
        counted = sandbox.exec(["python3", "-c", COUNT, "600"], timeout_s=300)

        assert f"{most - 1}" == counted.stdout_text
        assert sandbox.exec(["true"]).ok
