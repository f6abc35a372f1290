"""A sandbox of which one step fails, or whose host has no freezer: what is left, and what is told."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence import NetworkPolicy, NetworkRule, Sandbox, SandboxSpec
from ringfence.backends.local.host.cgroups import Group
from ringfence.backends.native import sandbox as module
from ringfence.backends.native.backend import NativeBackend
from ringfence.backends.native.network import NativeNetwork
from ringfence.errors import InvalidRequest, IsolationError, LifecycleError, Unsupported
from ringfence.model.mount import READ_WRITE, Mount
from ringfence.model.state import State
from tests.native.outside import cgroups_of, children_of, until

LONG_S = 600.0


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeBackend]:
    made = NativeBackend(state_dir=str(tmp_path_factory.mktemp("snapshots")), prebuilt_s=0)
    yield made
    made.close()


class Left:
    """What a create that fails must leave as it was."""

    def __init__(self, backend: NativeBackend) -> None:
        backend.provision(SandboxSpec(id="mine")).terminate()  # all that is found once is known
        self._backend = backend
        assert until(lambda: not children_of(backend.zygote().pid))
        self._fds, self._ids = len(os.listdir("/proc/self/fd")), self._free()

    def _free(self) -> int:
        return len(self._backend.host_ids()._free)

    def check(self) -> None:
        backend = self._backend
        assert [] == backend.living()
        assert set() == backend._making
        assert self._fds == len(os.listdir("/proc/self/fd"))
        assert self._ids == self._free()
        assert until(lambda: not children_of(backend.zygote().pid))
        assert until(lambda: not cgroups_of("mine"))


def fail(*_what: object) -> None:
    raise OSError(errno.ENOSPC, "no room")


@pytest.mark.parametrize("step", ["expect", "begin", "serve", "count"])
def test_whatever_fails_of_a_create_nothing_is_left(
    backend: NativeBackend, monkeypatch: pytest.MonkeyPatch, step: str, tmp_path: Any
) -> None:
    left = Left(backend)
    owner: Any = {"serve": NativeNetwork, "count": backend}.get(step, backend.handover)
    mount = Mount("/data", str(tmp_path), READ_WRITE, protect=("absent",))
    spec = SandboxSpec(id="mine", mounts=(mount,))
    with monkeypatch.context() as patch:
        patch.setattr(owner, step, fail)
        with pytest.raises(OSError, match="no room"):
            backend.provision(spec)
    left.check()
    assert [] == os.listdir(tmp_path)
    made = backend.provision(spec)  # the control: the name is free
    assert ["absent"] == os.listdir(tmp_path)
    made.terminate()


@pytest.mark.parametrize("step", ["meanwhile", "begin"])
def test_one_that_was_built_ahead_is_gone_where_its_claim_fails(
    backend: NativeBackend, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    left = Left(backend)
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
    left.check()


def test_a_name_is_one_sandboxs_also_while_it_is_made(backend: NativeBackend) -> None:
    spec = SandboxSpec(id="mine")
    backend.new_id(spec)
    with pytest.raises(InvalidRequest, match="already exists"):
        backend.provision(spec)
    backend.made("mine")
    sandbox = backend.provision(spec)
    with pytest.raises(InvalidRequest, match="already exists"):
        backend.provision(spec)
    sandbox.terminate()


def test_a_network_that_is_not_served_ends_the_sandbox(
    backend: NativeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = Left(backend)

    def refuse(_network: Any) -> None:
        raise IsolationError("no egress")

    rules = NetworkPolicy(rules=(NetworkRule("a.example", "443"),))
    with monkeypatch.context() as patch:
        patch.setattr(NativeNetwork, "serve", refuse)
        with pytest.raises(IsolationError, match="no egress"):
            backend.provision(SandboxSpec(id="mine", network=rules))
    left.check()


def test_without_a_freezer_pid_1_stops_the_others_and_answers(
    backend: NativeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Group, "can_freeze", property(lambda _self: False))
    spec = SandboxSpec()
    with Sandbox(backend.provision(spec), spec) as sandbox:
        inner: Any = sandbox._inner
        process = sandbox.start(["sleep", str(LONG_S)])
        assert until(lambda: 1 == len(children_of(inner.pid)))
        (pid,) = children_of(inner.pid)
        assert inner.answers_frozen
        sandbox.suspend()
        assert until(lambda: "T" == state_of(pid))
        with inner.awake():
            assert "T" == state_of(pid), "nobody has to be woken to be asked"
        assert State.SUSPENDED is sandbox.state
        with pytest.raises(LifecycleError, match="suspended"):
            sandbox.exec(["true"])
        sandbox.resume()
        assert until(lambda: "T" != state_of(pid))
        assert sandbox.exec(["true"]).ok
        process.kill()


def test_where_pid_1_may_stop_one_users_programs_only_several_cannot_be_suspended(
    backend: NativeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SandboxSpec()
    with Sandbox(backend.provision(spec), spec) as sandbox:
        inner: Any = sandbox._inner
        with monkeypatch.context() as patch:
            patch.setattr(Group, "can_freeze", property(lambda _self: False))
            patch.setattr(module, "host", lambda: SimpleNamespace(trusted_root=False))
            patch.setattr(inner, "first_host_id", 1 << 20)
            with pytest.raises(Unsupported, match="several users") as refused:
                sandbox.suspend()
            assert "Delegate" in refused.value.hint
            assert "suspend" == refused.value.operation
            assert not inner.paused
            patch.setattr(inner, "first_host_id", 0)
            sandbox.suspend()  # the control: one user's
            assert inner.paused
            sandbox.resume()
        sandbox.suspend()
        sandbox.resume()


def state_of(pid: int) -> str:
    """Of a process, as proc_pid_stat(5) has it."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0]
