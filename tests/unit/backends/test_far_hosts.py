"""A launcher that carries a stream to another host: what its far end must say, and what a failure leaves."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence.backends.command.stream import StreamBackend
from ringfence.errors import IsolationError, RingfenceError
from ringfence.launcher.link.line import CONTROL, DATA, frame
from ringfence.model.mount import Mount
from ringfence.model.spec import SandboxSpec

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
