"""Whatever step of a create or of an end fails, nothing stays behind.

Each function of the backend that a call goes through is a step. It fails once at its start, as by an error of
the kernel, and what this process has of the host is counted again.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

import ringfence
from ringfence import Limits, Mount, Sandbox, SandboxSpec
from ringfence.backends.native.backend import NativeBackend
from ringfence.backends.native.sandbox import NativeSandbox
from tests.native.outside import cgroups_of, until

ROOT = f"{Path(ringfence.__file__).parent}/"
ROOMS = (f"{ROOT}backends/native/", f"{ROOT}backends/local/")
GONE_WITHIN_S = 5.0
# Steps that give back or hand over by themselves, as any `close` does: where they fail, something stays.
OF_THEMSELVES = {
    "Acquired.__init__",
    "Acquired.__enter__",
    "Acquired.__exit__",
    "Acquired.callback",
    "Acquired.pop_all",
}
STEPS_OF_AN_END = {"Group.asked_last", "SandboxNetwork.close"}
OF_A_CREATE = OF_THEMSELVES | {
    "ExplainedFileLimit.__exit__",  # compares types
    "LiveSandbox.begun",  # takes over descriptors that have come
    "SandboxNetwork.have",  # the same
    "Request.__exit__",  # closes descriptors
    "Runtime.made",  # discards from a set
}


class StepError(OSError):
    """Put in by this test."""


class Step(NamedTuple):
    """A function of the backend."""

    file: str
    name: str


class Steps:
    """The steps of a call, in this thread. Each is told by its file and qualified name."""

    def __init__(self) -> None:
        self.seen: dict[Step, None] = {}
        self._fails: Step | None = None

    def of(self, call: Callable[[], object]) -> list[Step]:
        self._fails = None
        self._run(call)
        return [*self.seen]

    def fail(self, step: Step, call: Callable[[], object]) -> None:
        """Call it while that step fails once. What the call does of it is its own matter."""
        self._fails = step
        try:
            self._run(call)
        except Exception:  # noqa: BLE001  which error it is made of is not the question here
            pass

    def _run(self, call: Callable[[], object]) -> None:
        sys.setprofile(self._look)
        try:
            call()
        finally:
            sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, _arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOMS):
            step = Step(code.co_filename.removeprefix(ROOT), code.co_qualname)
            if self._fails is None:
                self.seen[step] = None
            elif step == self._fails:
                raise StepError(errno.EIO, f"no {step.name} today")  # this ends the profile too


class Held:
    """What this process has of the host for sandboxes of a backend."""

    def __init__(self, backend: NativeBackend, state_dir: Path) -> None:
        self._backend, self._state_dir = backend, state_dir

    def count(self) -> dict[str, Any]:
        backend = self._backend
        zygote = backend.zygote().pid
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "descriptors of the zygote": len(os.listdir(f"/proc/{zygote}/fd")),
            "processes": Path(f"/proc/{zygote}/task/{zygote}/children").read_text(),
            "ids": len(backend.host_ids()._free),
            "sandboxes": dict(backend._live),
            "names": set(backend._making),
            "cgroups": sorted(cgroups_of(f".{os.getpid()}.")),
            "files": sorted(os.listdir(self._state_dir)),
            "threads": [each.name for each in threading.enumerate()],
        }

    def at_rest(self) -> dict[str, Any]:
        """The same when what ends by itself has ended, like the zygote's clearing up."""
        until(lambda: not cgroups_of(f".{os.getpid()}."), GONE_WITHIN_S)
        return self.count()


@pytest.fixture(name="backend")
def fixture_backend(tmp_path: Path) -> Iterator[NativeBackend]:
    backend = NativeBackend(state_dir=str(tmp_path / "state"), prebuilt_s=0)
    (tmp_path / "state").mkdir(exist_ok=True)
    yield backend
    backend.close()


@pytest.fixture(name="kinds")
def fixture_kinds(backend: NativeBackend, tmp_path: Path) -> list[Callable[[], NativeSandbox]]:
    """Creates of a plain sandbox, and of one with limits, a mount and a name."""
    (tmp_path / "of-host").mkdir()
    more = SandboxSpec(
        mounts=(Mount("/data", str(tmp_path / "of-host"), access="rw"),),
        limits=Limits(memory_bytes=1 << 28, pids=50),
        id="named",
    )
    return [lambda: backend.provision(SandboxSpec()), lambda: backend.provision(more)]


def unmatched(
    held: Held, before: dict[str, Any], create: Callable[[], NativeSandbox]
) -> dict[str, Any]:
    """What is other than before, once all that ends by itself has ended."""
    create().terminate()  # the zygote has seen what came before
    until(lambda: held.count() == before, GONE_WITHIN_S)
    now = held.count()
    return {name: (before[name], now[name]) for name in now if now[name] != before[name]}


def test_nothing_stays_of_a_create_of_which_a_step_fails(
    kinds: list[Callable[[], NativeSandbox]], backend: NativeBackend, tmp_path: Path
) -> None:
    for create in (*kinds, *kinds):
        create().terminate()
    held, tried, left = Held(backend, tmp_path / "state"), set(OF_A_CREATE), {}
    before = held.at_rest()

    for create in kinds:
        made: list[NativeSandbox] = []
        begin = partial(_add, made, create)
        steps = Steps()
        for step in steps.of(begin):
            if step.name in tried or step.name.endswith(".close"):
                continue
            tried.add(step.name)
            steps.fail(step, begin)
            while made:
                made.pop().terminate()
            if found := unmatched(held, before, kinds[0]):
                left[step] = found
                before = held.at_rest()

    assert not left, left
    assert len(tried) > 120, "they are not seen any more"


def _add(made: list[NativeSandbox], create: Callable[[], NativeSandbox]) -> None:
    made.append(create())


def test_a_sandbox_that_cannot_end_in_time_is_not_there(
    backend: NativeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its timer is a thread, and a process may have no more of them."""

    def start(_timer: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Timer, "start", start)
        with pytest.raises(RuntimeError, match="new thread"):
            Sandbox.create(backend=backend, ttl_s=60)

    assert {} == backend._live
    with Sandbox.create(backend=backend, ttl_s=60):
        assert len(backend._live) == 1


def test_nothing_stays_of_an_end_of_which_a_step_fails(
    kinds: list[Callable[[], NativeSandbox]], backend: NativeBackend, tmp_path: Path
) -> None:
    """Each step of the end is taken, whichever before it has failed."""
    create = kinds[1]
    create().terminate()
    steps, held = Steps(), Held(backend, tmp_path / "state")
    sandbox = create()
    steps.of(sandbox.terminate)
    before, left = held.at_rest(), {}
    for step in [each for each in steps.seen if each.name in STEPS_OF_AN_END]:
        steps.fail(step, create().terminate)
        if found := unmatched(held, before, create):
            left[step] = found
            before = held.at_rest()

    assert {} == left
    assert {each.name for each in steps.seen} >= STEPS_OF_AN_END
