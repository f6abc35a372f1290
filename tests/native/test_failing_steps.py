"""Whatever step of a create or of an end fails, nothing stays behind.

Each function of the backend that a call goes through is a step. It fails once at its start, as by an error of
the kernel, and what this process has of the host is counted again.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence import Limits, Mount, NetworkPolicy, NetworkRule, Sandbox, SandboxSpec
from ringfence.backends.native import snapshots
from ringfence.backends.native.backend import NativeBackend
from ringfence.backends.native.network import NativeNetwork
from ringfence.backends.native.sandbox import NativeSandbox
from ringfence.backends.native.trees import Helper
from ringfence.errors import InvalidRequest, IsolationError
from ringfence.snapshots.catalogue import Catalogue
from tests.failing import OF_THEMSELVES, Steps, left_by_creates
from tests.native.outside import cgroups_of, children_of, until

ROOMS = "backends/native", "backends/local"
GONE_WITHIN_S = 5.0
STEPS_OF_AN_END = {"Group.asked_last", "SandboxNetwork.close"}
OF_A_CREATE = OF_THEMSELVES | {
    "ExplainedFileLimit.__exit__",  # compares types
    "LiveSandbox.begun",  # takes over descriptors that have come
    "SandboxNetwork.have",  # the same
    "_Below.path",  # joins names
    "Request.__exit__",  # closes descriptors
    "Runtime.made",  # discards from a set
}


class Held:
    """What this process has of the host for sandboxes of a backend.

    Attributes:
        kinds: Creates of a plain sandbox, and of one with limits, a mount, a protected path and a name.
    """

    def __init__(self, state_dir: Path, source: Path) -> None:
        self.backend = backend = NativeBackend(state_dir=str(state_dir), prebuilt_s=0)
        self._places = state_dir, source
        self._of_others = set(cgroups_of(f".{os.getpid()}."))  # of other tests' sandboxes
        more = SandboxSpec(
            mounts=(Mount("/data", str(source), access="rw", protect=("absent",)),),
            limits=Limits(memory_bytes=1 << 28, pids=50),
            id="named",
        )
        self.kinds: list[Callable[[], NativeSandbox]] = [
            lambda: backend.provision(SandboxSpec()),
            lambda: backend.provision(more),
        ]
        for create in (*self.kinds, *self.kinds):  # all that is found once is known
            create().terminate()

    def count(self) -> dict[str, Any]:
        backend = self.backend
        zygote = backend.zygote().pid
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "descriptors of the zygote": len(os.listdir(f"/proc/{zygote}/fd")),
            "processes": children_of(zygote),
            "ids": len(backend.host_ids()._free),
            "sandboxes": dict(backend._live),
            "names": set(backend._making),
            "cgroups": sorted(cgroups_of(f".{os.getpid()}.")),
            "files": [sorted(os.listdir(place)) for place in self._places],
            "threads": [each.name for each in threading.enumerate()],
        }

    def at_rest(self) -> dict[str, Any]:
        """The same when what ends by itself has ended, like the zygote's clearing up."""
        until(self._is_calm, GONE_WITHIN_S)
        return self.count()

    def _is_calm(self) -> bool:
        has_ended = self._of_others.issuperset(cgroups_of(f".{os.getpid()}."))
        return has_ended and not children_of(self.backend.zygote().pid)

    def unlike(self, before: dict[str, Any]) -> dict[str, Any]:
        """What is other than before, once all that ends by itself has ended."""
        self.kinds[0]().terminate()  # the zygote has seen what came before
        until(lambda: self.count() == before, GONE_WITHIN_S)
        now = self.count()
        return {name: (before[name], now[name]) for name in now if now[name] != before[name]}


@pytest.fixture(name="held", scope="module")
def fixture_held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    held = Held(tmp_path_factory.mktemp("state"), tmp_path_factory.mktemp("source"))
    yield held
    held.backend.close()


def fail(*_what: object, **_how: object) -> None:
    raise OSError(errno.ENOSPC, "no room")


def test_nothing_stays_of_a_create_of_which_a_step_fails(held: Held) -> None:
    left, count = left_by_creates(held, ROOMS, OF_A_CREATE.__contains__)

    assert not left, left
    assert count > 120, "they are not seen any more"


@pytest.mark.parametrize("step", ["meanwhile", "begin"])
def test_one_that_was_built_ahead_is_gone_where_its_claim_fails(
    held: Held, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    backend, before = held.backend, held.at_rest()
    warm = backend.prewarm(SandboxSpec(id="mine"))
    for make in (backend.provision, backend.prewarm):
        with pytest.raises(InvalidRequest, match="already exists"):
            make(SandboxSpec(id="mine"))
    with monkeypatch.context() as patch:
        if step == "begin":
            patch.setattr(backend.handover, "begin", fail)
        with pytest.raises(OSError, match="no room"):
            warm.claim(SandboxSpec(), fail if step == "meanwhile" else None)
    assert not warm.alive
    assert {} == held.unlike(before)


def test_a_name_is_one_sandboxs_also_while_it_is_made(held: Held) -> None:
    backend, spec = held.backend, SandboxSpec(id="mine")
    backend.new_id(spec)
    with pytest.raises(InvalidRequest, match="already exists"):
        backend.provision(spec)
    backend.made("mine")
    sandbox = backend.provision(spec)
    with pytest.raises(InvalidRequest, match="already exists"):
        backend.provision(spec)
    sandbox.terminate()


def test_a_network_that_is_not_served_ends_the_sandbox(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, before = held.backend, held.at_rest()

    def refuse(_network: Any) -> None:
        raise IsolationError("no egress")

    rules = NetworkPolicy(rules=(NetworkRule("a.example", "443"),))
    with monkeypatch.context() as patch:
        patch.setattr(NativeNetwork, "serve", refuse)
        with pytest.raises(IsolationError, match="no egress"):
            backend.provision(SandboxSpec(id="mine", network=rules))
    assert {} == held.unlike(before)


def test_a_sandbox_that_cannot_end_in_time_is_not_there(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its timer is a thread, and a process may have no more of them."""
    backend = held.backend

    def start(_timer: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Timer, "start", start)
        with pytest.raises(RuntimeError, match="new thread"):
            Sandbox.create(backend=backend, ttl_s=60)

    assert {} == backend._live
    with Sandbox.create(backend=backend, ttl_s=60):
        assert len(backend._live) == 1


def test_nothing_stays_of_an_end_of_which_a_step_fails(held: Held) -> None:
    """Each step of the end is taken, whichever before it has failed."""
    create = held.kinds[1]
    steps = Steps(*ROOMS)
    steps.of(create().terminate)
    before, left = held.at_rest(), {}
    for step in [each for each in steps.seen if each.name in STEPS_OF_AN_END]:
        steps.fail(step, create().terminate)
        if found := held.unlike(before):
            left[step] = found
            before = held.at_rest()

    assert {} == left
    assert {each.name for each in steps.seen} >= STEPS_OF_AN_END


@pytest.mark.parametrize("is_suspended", [False, True])
def test_a_snapshot_of_which_a_step_fails_is_none_and_its_sandbox_as_before(
    held: Held, monkeypatch: pytest.MonkeyPatch, is_suspended: bool
) -> None:
    backend, finish = held.backend, Helper.finish
    sandbox = backend.provision(SandboxSpec())
    if is_suspended:
        sandbox.suspend()
    before, state = held.count(), sandbox.state

    def finish_and_fail(helper: Helper, path: str) -> None:
        finish(helper, path)
        fail()

    for place, name, failing in (
        (snapshots, "_open_names", fail), (snapshots, "writable_layer", fail),
        (Catalogue, "save", fail), (Helper, "finish", finish_and_fail),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(place, name, failing)
            with pytest.raises(OSError, match="no room"):
                sandbox.snapshot({})
        assert state is sandbox.state, name
        assert [] == backend.snapshots(), name
    assert until(lambda: held.count() == before, GONE_WITHIN_S)
    kept = sandbox.snapshot({})
    assert ([kept], state) == (backend.snapshots(), sandbox.state)
    backend.delete_snapshot(kept.id)
    sandbox.terminate()
