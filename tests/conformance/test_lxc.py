"""LXC passes the suite: a container per sandbox, for root, and for a user with a range of ids."""

from __future__ import annotations

import glob
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from tests.connecting import Connecting
from tests.features import require
from tests.strangers import AS_RANGED, PYTHON, RANGED_UID, package_for_others

from ringfence import Limits, Sandbox
from ringfence.backends.command.backend import CommandBackend
from ringfence.backends.command.launchers import Launcher, bubblewrap
from ringfence.backends.command.lxc import lxc
from ringfence.testing.conformance import BackendConformance

pytestmark = [pytest.mark.root, pytest.mark.full]


@pytest.fixture(scope="module", autouse=True)
def _lxc() -> None:
    require("lxc-start")


class TestLxc(Connecting, BackendConformance):
    def make_backend(self) -> CommandBackend:
        return CommandBackend(lxc())


def left_behind() -> list[str]:
    """Cgroups and run-time files of LXC, which it would leave if it were let."""
    tops = [f"/sys/fs/cgroup/{'*/' * depth}lxc*" for depth in range(4)]
    return [path for top in (*tops, "/run/lxc") for path in glob.glob(top)]


def test_a_container_has_its_protections_and_leaves_nothing() -> None:
    before = left_behind()
    with closing(CommandBackend(lxc())) as backend:
        for _ in range(3):
            with Sandbox.create(backend=backend) as sandbox:
                held = {each.name: each.status for each in sandbox.protections()}

    for name in ("namespaces", "capabilities", "seccomp", "memory_limit", "read_only_mounts"):
        assert "enforced" == held[name]
    assert before == left_behind()


@pytest.mark.parametrize("make", [lxc, bubblewrap])
def test_programs_and_their_files_leave_memory_to_the_agent(make: Callable[[], Launcher]) -> None:
    """The kernel takes a program first; what lies in /dev/shm outlives it, and is half of the limit."""
    limit = 64 << 20
    with (
        closing(CommandBackend(make())) as backend,
        Sandbox.create(backend=backend, limits=Limits(memory_bytes=limit)) as sandbox,
    ):
        scores = [sandbox.exec(["cat", "/proc/self/oom_score_adj"]).text for _ in range(2)]
        fill = "head -c 100m /dev/zero > /dev/shm/x; stat -c %s /dev/shm/x"
        filled = sandbox.exec(["sh", "-c", fill])
        after = sandbox.exec(["echo", "alive"])

    assert ["500\n", "500\n"] == scores
    assert f"{limit // 2}\n" == filled.text
    assert "No space left" in filled.stderr_text
    assert after.ok


CREATES = """
import sys
from ringfence import Sandbox
sandbox = Sandbox.create(backend="lxc")
sandbox.start(["sleep", "600"])
print(sandbox.exec(["id", "-u"]).text, end="")
held = {each.name: each.status for each in sandbox.protections()}
print(held["namespaces"], held["capabilities"], held["host_identity"], flush=True)
sys.stdin.read()
"""


def test_all_ends_with_a_maker_that_is_killed() -> None:
    before = left_behind()
    with subprocess.Popen(
        [sys.executable, "-c", CREATES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as maker:
        assert maker.stdout is not None
        assert "1000\n" == maker.stdout.readline()
        (monitor,) = (pid for pid in children(maker.pid) if b"lxc-start" in command_of(pid))
        pidfd = os.pidfd_open(monitor)
        maker.send_signal(signal.SIGKILL)
    wait_for_end(pidfd, timeout_s=10)

    assert before == left_behind()


SHOWS_MORE = """
import sys
from dataclasses import replace
from ringfence import Sandbox
from ringfence.backends.command.backend import CommandBackend
from ringfence.backends.command.lxc import lxc
shown = sys.argv[1]
backend = CommandBackend(replace(lxc(), shows=(shown,)))
with Sandbox.create(backend=backend) as sandbox:
    print(sandbox.exec(["id", "-u"]).text, end="")
    assert sandbox.exec(["test", "-d", shown + "/ringfence"]).ok
print("enforced enforced enforced")
"""


@pytest.mark.parametrize("script", [CREATES, SHOWS_MORE], ids=["template", "shows more"])
def test_a_user_with_a_range_of_ids_starts_one_too(tmp_path: Path, script: str) -> None:
    """Of the directories that LXC makes as the container's root, none is left."""
    require("id ranges")
    source = package_for_others(tmp_path)
    asked = [*AS_RANGED, PYTHON, "-B", "-c", script, str(source)]
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": str(source)}
    place = f"/var/tmp/.ringfence-{RANGED_UID}/*"
    before = glob.glob(place)

    done = subprocess.run(
        asked, env=environment, cwd="/", input="", capture_output=True, check=False, text=True
    )

    assert ("1000\nenforced enforced enforced\n", "") == (done.stdout, done.stderr)
    assert {*glob.glob(place)} <= {*before}


def test_a_user_without_a_range_is_told_why_and_what_to_do(tmp_path: Path) -> None:
    source = package_for_others(tmp_path)
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": str(source)}
    become = ["setpriv", f"--reuid={RANGED_UID}", f"--regid={RANGED_UID}", "--clear-groups"]

    done = subprocess.run(
        [*become, PYTHON, "-B", "-c", CREATES],
        env=environment,
        cwd="/",
        capture_output=True,
        check=False,
        text=True,
    )

    assert 0 != done.returncode
    assert "BackendUnavailable: lxc: " in done.stderr
    assert "/etc/passwd" in done.stderr


def children(pid: int) -> list[int]:
    """The processes that a process has started, by any of its threads."""
    found = []
    for task in glob.glob(f"/proc/{pid}/task/*/children"):
        found += [int(word) for word in Path(task).read_text().split()]
    return found


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def wait_for_end(pidfd: int, timeout_s: float) -> None:
    """Raises AssertionError where the process runs on."""
    import select

    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(timeout_s * 1000), "it runs on"
    os.close(pidfd)
