"""A sandbox as its owner sees it: alive, ended, lost, and while its end could not be written down."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.unconfined import Unconfined

from ringfence.errors import InvalidRequest, SandboxNotFound, StorageFull
from ringfence.model.acquire import AcquireOptions
from ringfence.model.calls import parse_network
from ringfence.model.client_session import SessionState
from ringfence.model.limits import Limits
from ringfence.model.sandbox import SandboxView
from ringfence.model.spec import SandboxSpec
from ringfence.model.state import State
from ringfence.sessions import snapshots
from ringfence.sessions.catalogue.describe import describe, describe_live
from ringfence.sessions.catalogue.records import NAME
from ringfence.sessions.config import ManagerConfig, PoolConfig
from ringfence.sessions.live import Live
from ringfence.sessions.manager import SessionManager
from ringfence.sessions.pools.pool import Pool

pytestmark = pytest.mark.anyone

SPEC = SandboxSpec(
    env={"B": "secret", "A": "1"}, labels={"job": "1"}, limits=Limits(pids=40), ttl_s=600.0
)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[SessionManager]:
    config = ManagerConfig(pool=PoolConfig(enabled=False))
    with (
        closing(Unconfined()) as backend,
        SessionManager(
            config, state_dir=str(tmp_path), backends=[backend], background=False
        ) as made,
    ):
        yield made


@pytest.fixture
def live(manager: SessionManager) -> Live:
    options = AcquireOptions(metadata={NAME: "mine", "team": "a"})
    spec = SPEC.altered(allow_degraded=("*",))
    found = manager.index.find(manager.acquire(spec, options, client_id="ann").id)
    assert found is not None
    return found


def lasting(view: SandboxView) -> dict[str, Any]:
    """All of it that is the same a moment later."""
    passing = ("expires_in_s", "expires_at", "last_active_at")
    return {name: value for name, value in view.to_json().items() if name not in passing}


def test_one_that_lives(manager: SessionManager, live: Live) -> None:
    view = describe(manager, live.id, "ann")
    assert lasting(view) == lasting(describe(manager, live.sandbox_id))
    assert (live.sandbox_id, live.id, "ann") == (view.id, view.session_id, view.owner)
    assert (State.RUNNING, SessionState.ACTIVE) == (
        view.state if view.state != State.PROVISIONED else State.RUNNING,
        view.session_state,
    )
    assert ("mine", {"team": "a"}, {"job": "1"}) == (view.name, view.metadata, view.labels)
    assert ("A", "B") == view.env_names
    assert "secret" not in str(view.to_json())
    assert (40, live.backend) == (view.limits.pids, view.backend)
    assert view.expires_in_s is not None
    assert view.expires_at is not None
    assert 590.0 < view.expires_in_s <= 600.0
    assert abs(view.expires_at - view.expires_in_s - time.time()) < 60.0
    assert (None, "") == (view.ended_at, view.reason)
    for name in (live.id, live.sandbox_id, "sbx-none"):
        with pytest.raises(SandboxNotFound, match=f"no session or sandbox {name!r}"):
            describe(manager, name, "bob")


def test_one_that_has_ended_and_one_that_was_lost(manager: SessionManager, live: Live) -> None:
    other = manager.index.find(manager.acquire(client_id="ann").id)
    assert other is not None
    manager.change(live.id, name="renamed", labels={"job": None, "step": "2"})
    manager.terminate(live.id)
    other.inner.terminate()
    for name in (live.id, live.sandbox_id):
        view = describe(manager, name, "ann")
        assert (State.TERMINATED, SessionState.TERMINATED) == (view.state, view.session_state)
        assert ("terminated", "renamed", {"step": "2"}) == (view.reason, view.name, view.labels)
        assert view.ended_at is not None
        assert view.created_at <= view.ended_at <= time.time() + 60.0
        assert (("A", "B"), 40, ()) == (view.env_names, view.limits.pids, view.mounts)
        with pytest.raises(SandboxNotFound):
            describe(manager, name, "bob")
    lost = describe(manager, other.sandbox_id, "ann")
    assert (State.TERMINATED, "lost") == (lost.state, lost.reason)
    assert manager.index.find(other.id) is None


def test_the_network_is_the_one_that_holds_now(manager: SessionManager, live: Live) -> None:
    now = parse_network(["example.com"])
    live.inner.spec = live.inner.spec.altered(network=now)  # type: ignore[misc]
    assert now == describe(manager, live.id).network != live.spec.network
    saved = manager.snapshot(live.id)
    assert now == snapshots.spec_of(snapshots.need(manager, saved.id, "ann")).network


def test_what_was_lost_is_no_default_and_counts_nowhere(manager: SessionManager) -> None:
    lives = [manager.index.find(manager.acquire(client_id="ann").id) for _ in range(4)]
    manager.acquire(client_id="bob")
    first, detached, suspended, lost = (each for each in lives if each is not None)
    manager.detach(detached.id)
    manager.suspend(suspended.id)
    manager.set_default_sandbox("ann", lost.id)
    assert (4, 2) == (
        manager.stats_of("ann").active_sandboxes,
        manager.stats_of("ann").active_sessions,
    )

    lost.inner.terminate()
    assert manager.default_sandbox("ann") is None
    assert "lost" == lost.reason
    first.inner.terminate()
    stats = manager.stats_of("ann")
    assert (2, 0, 1, 1) == (
        stats.active_sandboxes,
        stats.active_sessions,
        stats.detached_sessions,
        stats.suspended_sessions,
    )
    detached.inner.terminate()
    assert (3, 2) == (manager.stats().lost, manager.stats().active_sandboxes)


def test_logs_and_protections_of_one_that_has_ended_are_kept(
    manager: SessionManager, live: Live
) -> None:
    before = live.sandbox.protections()
    assert manager.ended.find(live.sandbox_id) is None
    manager.terminate(live.id)
    found = manager.ended.find(live.sandbox_id)
    assert found is not None
    assert before == found.protections()


@pytest.mark.parametrize(
    "changes", [{"name": "x" * 1000}, {"labels": {f"l{n}": "v" for n in range(10_000)}}]
)
def test_a_change_that_may_not_be_changes_nothing(
    manager: SessionManager, live: Live, changes: dict[str, Any]
) -> None:
    before = lasting(describe(manager, live.id))
    with pytest.raises(InvalidRequest):
        manager.change(live.id, **changes)
    assert before == lasting(describe(manager, live.id))
    manager.change(live.id, name="other")
    assert "other" == describe(manager, live.id).name


def test_a_manager_whose_thread_has_ended_is_not_well(manager: SessionManager) -> None:
    def expiry() -> tuple[bool, bool]:
        health = manager.health()
        return health.ok, next(each.ok for each in health.checks if "expiry" == each.name)

    assert (True, True) == expiry(), "it has none, and is looked after by hand"
    manager.has_background = True
    assert (False, False) == expiry()
    manager.reaper.start()
    assert (True, True) == expiry()


def test_a_manager_that_cannot_begin_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    before = {*threading.enumerate()}
    monkeypatch.setattr(Pool, "start", fail)
    with closing(Unconfined()) as backend, pytest.raises(RuntimeError, match="new thread"):
        SessionManager(backends=[backend])
    assert before == {*threading.enumerate()}


def test_a_spec_that_an_earlier_version_took_hides_nothing_else(
    manager: SessionManager, live: Live
) -> None:
    manager.terminate(live.id)
    manager.store.change_sandbox(live.sandbox_id, spec='{"tier": "none of these"}')
    view = describe(manager, live.id, "ann")
    assert (live.sandbox_id, "mine", "terminated") == (view.id, view.name, view.reason)
    assert SandboxSpec().tier == view.tier


def test_one_whose_end_is_not_written_down_is_described_as_it_was(
    manager: SessionManager, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk, in the moment between its end and its leave."""
    live.inner.terminate()

    def full(*_args: object, **_options: object) -> None:
        raise StorageFull("no room")

    with monkeypatch.context() as patch:
        patch.setattr(manager.store, "end_session", full)
        view = describe(manager, live.id, "ann")
    assert (live.sandbox_id, State.TERMINATED) == (view.id, view.state)
    assert lasting(describe_live(live)) == lasting(view)
