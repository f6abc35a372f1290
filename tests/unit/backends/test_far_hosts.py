"""A launcher that carries a stream to another host: what its far end must say, and what a failure leaves."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from tests.features import require

from ringfence.backends.command import stream
from ringfence.backends.command.far import FarLauncher
from ringfence.backends.command.stream import StreamBackend
from ringfence.backends.local.agents.agents import settings
from ringfence.backends.local.sizes import DEFAULT_PIDS
from ringfence.errors import IsolationError, RingfenceError
from ringfence.launcher.link.line import CONTROL, DATA, frame
from ringfence.model.limits import Limits
from ringfence.model.mount import Mount
from ringfence.model.spec import SandboxSpec
from ringfence.policy.seccomp import SeccompPolicy

pytestmark = pytest.mark.anyone
FACTS: dict[str, Any] = {
    "pid": 1,
    "machine": os.uname().machine,
    "inner": {"pid": 2},
    "outer": {"pid": 1},
}


def backend_of(*command: str) -> Any:
    launcher: Any = SimpleNamespace(name="far", there=[], python="python3", argv=())
    launcher.check = lambda: None
    launcher.command = lambda _far: list(command)
    return StreamBackend(launcher)


def hello(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Let the far end say something and end; return what the near end makes of it."""
    near, far = socket.socketpair()
    errors = os.memfd_create("errors")
    process = subprocess.Popen(["true"])
    try:
        far.sendall(content)
        far.shutdown(socket.SHUT_WR)
        found: tuple[dict[str, Any], bytes] = backend_of()._hello(near, process, errors)
        assert near.gettimeout() is None, "the far end may be quiet for hours"
        return found
    finally:
        process.wait()
        near.close()
        far.close()
        os.close(errors)


def told(**changes: Any) -> bytes:
    return frame(DATA, CONTROL, json.dumps({**FACTS, **changes}).encode())


def test_what_the_far_end_says_is_read_with_what_follows() -> None:
    facts, rest = hello(told() + b"more")
    assert (FACTS, b"more") == (facts, rest)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (told(pid=2), "no PID namespace"),
        (told(outer={"pid": 2}), "no PID namespace"),
        (told(machine="pdp11"), "no filter fits"),
        (frame(DATA, CONTROL, b"{}"), "pid"),
        (frame(DATA, CONTROL, b"[]"), "did not start"),
        (frame(DATA, CONTROL, b"not JSON"), "did not start"),
        (told()[:20], "it ended"),
        (b"", "it ended"),
    ],
)
def test_a_far_end_that_does_not_isolate_is_refused(content: bytes, why: str) -> None:
    with pytest.raises(IsolationError, match=why):
        hello(content)


def test_a_far_end_that_never_comes_to_the_point_is_refused() -> None:
    near, far = socket.socketpair()
    errors = os.memfd_create("errors")
    process = subprocess.Popen(["true"])
    endless = [sys.executable, "-c", "import os\nwhile True: os.write(1, b'\\xff' * 4096)"]
    speaker = subprocess.Popen(endless, stdout=far.fileno(), stderr=subprocess.DEVNULL)
    far.close()
    with pytest.raises(IsolationError, match="did not start"):
        backend_of()._hello(near, process, errors)
    near.close()
    for each in (process, speaker):
        each.wait(60)
    os.close(errors)


@pytest.mark.parametrize("command", [["false"], ["/no/such/launcher"]])
def test_one_that_does_not_start_leaves_nothing(command: list[str]) -> None:
    backend = backend_of(*command)
    before = len(os.listdir("/proc/self/fd"))
    children = set(children_of_ours())
    with pytest.raises(IsolationError, match="did not start"):
        backend.provision(SandboxSpec())
    assert before == len(os.listdir("/proc/self/fd"))
    assert set(children_of_ours()) <= children
    assert (set(), {}) == (set(backend._making), dict(backend._live))


def test_one_that_says_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_READY_S", 0.05)
    monkeypatch.setattr(stream, "_PATIENCE_S", 0.05)
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def start(*args: Any, **how: Any) -> Any:
        started.append(real(*args, **how))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    backend = backend_of("sleep", "600")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):  # its id is free again
        with pytest.raises(IsolationError, match="did not start"):
            backend.provision(SandboxSpec(id="mine"))
    assert [-signal.SIGKILL] * 2 == [process.returncode for process in started]
    assert before == len(os.listdir("/proc/self/fd"))
    assert (set(), {}) == (set(backend._making), dict(backend._live))


def children_of_ours() -> list[str]:
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        return file.read().split()


@pytest.mark.parametrize(
    "change",
    [
        {"mounts": (Mount("/data", "/srv"),)},
        {"memory_dir": "/srv"},
        {"deny": ("/srv",)},
        {"python_env": True},
    ],
)
def test_what_this_host_has_is_not_on_another(change: dict[str, Any]) -> None:
    with pytest.raises(RingfenceError, match="on another host") as refused:
        backend_of().check(SandboxSpec().altered(**change))
    assert next(iter(change)) == refused.value.field
    backend_of().check(SandboxSpec())


@pytest.mark.parametrize("is_bounded", [True, False])
def test_the_far_agent_is_told_the_profile_and_the_limits(
    monkeypatch: pytest.MonkeyPatch, is_bounded: bool
) -> None:
    """The other host is this one, by a launcher that carries the stream to a process beside us."""
    require("user namespaces")
    require("bwrap")
    told: list[dict[str, Any]] = []

    def tell(*given: Any, **how: Any) -> Any:
        told.append(how)
        return settings(*given, **how)

    monkeypatch.setattr(stream, "settings", tell)
    backend = StreamBackend(FarLauncher("far", ("env",), python="/usr/bin/python3"))
    backend.define_profile("mine", own := SeccompPolicy("allow", "allow", (), ()))
    limits = Limits(memory_bytes=1 << 28, pids=33) if is_bounded else Limits()
    before = len(os.listdir("/proc/self/fd"))
    made = backend.provision(
        SandboxSpec(profile="mine", limits=limits, allow_degraded=("pids_limit",))
    )
    try:
        [how] = told
        assert how["filtered"]
        assert own is how["policy"]
        expected = (33, 1 << 28) if is_bounded else (DEFAULT_PIDS, stream._ANY_MEMORY)
        assert expected == how["samples"]
        assert made.control.gettimeout() is None, "an answer may take as long as it takes"
        assert {made.id: made} == backend._live
    finally:
        made.terminate()
        backend.close()
    assert {} == backend._live
    assert before == len(os.listdir("/proc/self/fd"))
