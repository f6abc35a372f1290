"""Sandboxes on another host pass the suite, over a real sshd; an end that dies takes the other along."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.connecting import Connecting
from tests.far import Host, far_host
from tests.features import require
from tests.test_pythons import interpreter

from ringfence import Sandbox
from ringfence.backends.command.stream import StreamBackend
from ringfence.errors import IsolationError, SandboxLost, Unsupported
from ringfence.testing.conformance import BackendConformance
from ringfence.testing.conformance.endings import Endings
from ringfence.testing.conformance.environment import Environment
from ringfence.testing.conformance.execs import Execs
from ringfence.testing.conformance.files import Files
from ringfence.testing.conformance.lifecycle import Lifecycle
from ringfence.testing.conformance.reports import Reports

pytestmark = [pytest.mark.root, pytest.mark.full]
MUST_END_IN_S = 10
MARK = "4242.125"
_host: Host | None = None


@pytest.fixture(scope="module", autouse=True)
def host() -> Iterator[Host]:
    for name in ("sshd", "ssh", "bwrap"):
        require(name)
    oldest = interpreter("3.9")
    home = str(Path(oldest).resolve().parent.parent) if oldest else ""
    global _host
    with far_host(home if oldest and not home.startswith("/usr") else "") as _host:
        yield _host


class TestSsh(Connecting, Lifecycle, Execs, Endings, Environment, Files, Reports):
    """What is left out takes two more minutes: RINGFENCE_TEST_ALL_OF=ssh runs all of it."""

    def make_backend(self) -> StreamBackend:
        assert _host is not None
        return _host.backend()


if os.environ.get("RINGFENCE_TEST_ALL_OF") == "ssh":

    class TestAllOfSsh(TestSsh, BackendConformance):
        """Everything."""


def test_memory_is_sampled_there(host: Host) -> None:
    grows = "kept = []\nwhile True: kept.append(b'x' * (1 << 20))"
    with Sandbox.create(backend=host.backend(), limits={"memory_bytes": 256 << 20}) as sandbox:
        assert "oom" == sandbox.exec(["python3", "-c", grows], timeout_s=60).killed_by
        assert b"on\n" == sandbox.exec(["echo", "on"]).stdout
        status = {each.name: (each.status, each.why) for each in sandbox.protections()}
    assert "degraded" == status["memory_limit"][0]
    assert status["pids_limit"][1].startswith("none but samples")
    with pytest.raises(Unsupported, match="no cgroup on the far host"):
        Sandbox.create(backend=host.backend(), limits={"pids": 32})


def marked() -> list[int]:
    """Processes on the far host, which is this one, that a test has started there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if MARK.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def wait_until_gone(pids: list[int], timeout_s: float = MUST_END_IN_S) -> None:
    deadline = time.monotonic() + timeout_s
    assert pids
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        ended = poll.poll(max(0, deadline - time.monotonic()) * 1000)
        os.close(pidfd)
        assert ended, f"{pid} runs on"


STARTS = f"""
import sys
from ringfence import Sandbox
sandbox = Sandbox.create(backend="far")
sandbox.start(["setsid", "sleep", "{MARK}"])
while not sandbox.exec(["pgrep", "-f", "sleep {MARK}"]).ok: pass
print("started", flush=True)
sys.stdin.read()
"""


def test_nothing_is_left_there_when_this_end_is_killed(host: Host, tmp_path: Path) -> None:
    """And it is found by the name in `backends.toml`."""
    tables = tmp_path / "backends.toml"
    tables.write_text(host.toml())
    with subprocess.Popen(
        [sys.executable, "-c", STARTS],
        env={**os.environ, "RINGFENCE_BACKENDS": str(tables)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as near:
        assert near.stdout is not None
        assert "started\n" == near.stdout.readline()
        there = marked()
        near.send_signal(signal.SIGKILL)
    wait_until_gone(there)


def session_of(host: Host) -> int:
    """The sshd of the one connection that there is."""
    children = Path(f"/proc/{host.server.pid}/task/{host.server.pid}/children").read_text()
    return int(children.split()[-1])


def first_there(_host: Host) -> int:
    """PID 1 of the one sandbox that there is."""
    (sleeper,) = marked()
    parent = sleeper
    while True:
        status = Path(f"/proc/{parent}/status").read_text()
        fields = {
            key: value.split() for key, _, value in (x.partition(":") for x in status.splitlines())
        }
        if "1" == fields["NSpid"][-1]:
            return parent
        parent = int(fields["PPid"][0])


@pytest.mark.parametrize("victim", [session_of, first_there])
def test_this_end_notices_when_the_other_is_killed(host: Host, victim: object) -> None:
    backend = host.backend()
    with Sandbox.create(backend=backend) as sandbox:
        run = sandbox.start(["sleep", MARK])
        while not (there := marked()):
            pass
        assert callable(victim)
        os.kill(victim(host), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(SandboxLost):
            run.wait(timeout_s=MUST_END_IN_S)

        assert MUST_END_IN_S >= time.monotonic() - began
        wait_until_gone(there)
        assert "terminated" == sandbox.state
    backend.close()


def test_both_ends_notice_when_the_line_is_silent(host: Host) -> None:
    """No end of either is told by anybody: what has heard nothing for ten seconds ends."""
    backend = host.backend()
    with Sandbox.create(backend=backend) as sandbox:
        run = sandbox.start(["sleep", MARK])
        while not (there := marked()):
            pass
        host.inside("ip", "link", "set", "lo", "down")
        try:
            with pytest.raises(SandboxLost):
                run.wait(timeout_s=60)
            wait_until_gone(there, 60)
        finally:
            host.inside("ip", "link", "set", "lo", "up")
    backend.close()


def test_an_older_python_there_will_do(host: Host) -> None:
    oldest = interpreter("3.9")
    if oldest is None:
        pytest.skip("Python 3.9 is not installed")
    backend = host.backend(oldest)
    with Sandbox.create(backend=backend) as sandbox:
        sandbox.files.write("kept", "kept")
        held = {each.name: each.status for each in sandbox.protections()}

        assert "3.9" in backend.report().reason
        assert "kept\n" == sandbox.exec(["sh", "-c", "cat kept; echo"]).text
        assert sandbox.exec(["sleep", "600"], timeout_s=0.5).timed_out
        for name in ("namespaces", "capabilities", "seccomp", "read_only_mounts"):
            assert "enforced" == held[name]
    backend.close()


def test_what_cannot_be_there_is_refused_with_the_reason(host: Host) -> None:
    backend = host.backend()
    with pytest.raises(Unsupported, match="another host"):
        Sandbox.create(backend=backend, mounts=["/usr:/data"])
    with pytest.raises(IsolationError, match="no-such-python"):
        Sandbox.create(backend=host.backend("no-such-python"))
    backend.close()
