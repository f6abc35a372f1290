"""Suspend where the host has no freezer: PID 1 stops the other processes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ringfence import Sandbox, SandboxSpec
from ringfence.backends.local.host.cgroups import Group
from ringfence.backends.native import sandbox as module
from ringfence.backends.native.backend import NativeBackend
from ringfence.errors import LifecycleError, Unsupported
from ringfence.model.state import State
from tests.native.outside import children_of, until

LONG_S = 600.0


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeBackend]:
    made = NativeBackend(state_dir=str(tmp_path_factory.mktemp("snapshots")), prebuilt_s=0)
    yield made
    made.close()


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


def test_what_is_killed_while_suspended_does_not_wake_the_others(
    backend: NativeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PID 1 stops everybody before it kills a tree; who is suspended stays stopped."""
    spec = SandboxSpec()
    with Sandbox(backend.provision(spec), spec) as sandbox:
        inner: Any = sandbox._inner
        with monkeypatch.context() as patch:
            patch.setattr(Group, "can_freeze", property(lambda _self: False))
            assert sandbox.exec(["sh", "-c", f"sleep {LONG_S} >/dev/null 2>&1 &"]).ok
            (left,) = children_of(inner.pid)
            first = sandbox.start(["sleep", str(LONG_S)])
            assert until(lambda: 2 == len(children_of(inner.pid)))
            first.kill()  # the control: who is not suspended goes on
            first.wait()
            assert until(lambda: "S" == state_of(left))
            second = sandbox.start(["sleep", str(LONG_S)])
            sandbox.suspend()
            assert until(lambda: "T" == state_of(left))
            second.kill()
            second.wait()
            assert "T" == state_of(left)
            sandbox.resume()
            assert until(lambda: "S" == state_of(left))


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
