"""What the session manager promises in a word or two, each word tried on real sandboxes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ringfence import Limits, Mount, NetworkPolicy, SandboxSpec
from ringfence.errors import ResourceExhausted
from ringfence.model.acquire import AcquireOptions
from ringfence.model.client_session import SessionState, SessionTimeouts
from ringfence.sessions.config import PoolConfig
from tests.native.outside import until
from tests.sessions.conftest import ALLOWED, NO_POOL, MakeManager

pytestmark = pytest.mark.anyone

MIB = 1 << 20


def test_every_field_of_a_session_is_its_own(make_manager: MakeManager) -> None:
    manager = make_manager()
    began = time.time()
    mine = AcquireOptions(timeouts=SessionTimeouts(idle_s=70.0), metadata={"note": "mine"})
    one = manager.acquire(options=mine, client_id="ann").session
    other = manager.acquire(client_id="ben").session

    assert ("ann", "active", 70.0, {"note": "mine"}) == (
        one.client_id,
        one.state,
        one.timeouts.idle_s,
        dict(one.metadata),
    )
    assert 300.0 == other.timeouts.idle_s
    assert 4 == len({one.session_id, one.sandbox_id, other.session_id, other.sandbox_id})
    assert began - 1 <= one.created_at <= one.last_active_at <= time.time() + 1


def test_what_has_ended_is_always_expired() -> None:
    for timeouts in (SessionTimeouts(), SessionTimeouts(None, None, None)):
        assert 0.0 == timeouts.of(SessionState.TERMINATED)


def test_done_twice_is_done_once(make_manager: MakeManager) -> None:
    manager = make_manager()
    lease = manager.acquire(client_id="ann")
    for verb, state, count in (
        (manager.detach, "detached", "detached_sessions"),
        (manager.suspend, "suspended", "suspended_sessions"),
        (manager.resume, "active", "active_sessions"),
    ):
        assert [state, state] == [verb(lease.id).state for _ in range(2)]
        assert 1 == getattr(manager.stats(), count)
    for _ in range(2):
        assert "terminated" == manager.terminate(lease.id).state
        assert "terminated" == manager.release(lease.id).state

    assert 1 == manager.stats().terminated
    events = manager.events.since(0)[0]
    assert ["created", "detached", "suspended", "active", "ended"] == [e.kind for e in events]
    ids = (lease.session.sandbox_id, lease.id, "ann")
    assert {ids} == {(e.sandbox_id, e.session_id, e.client_id) for e in events}


def test_expired_ones_are_cleaned_up_when_asked(make_manager: MakeManager) -> None:
    manager = make_manager(background=False, idle_s=0.05)
    lease = manager.acquire(client_id="ann")
    kept = manager.acquire(
        options=AcquireOptions(timeouts=SessionTimeouts(idle_s=None)), client_id="ann"
    )
    assert until(lambda: [lease.id] == [each.session_id for each in manager.cleanup_expired()])

    assert [kept.id] == [each.session_id for each in manager.list()]
    assert ("terminated", "idle") == (manager.get(lease.id).state, manager.get(lease.id).reason)


def test_the_limit_is_a_retryable_error(make_manager: MakeManager) -> None:
    manager = make_manager(max_sandboxes=1, pool=NO_POOL)
    first = manager.acquire(client_id="ann")
    with pytest.raises(ResourceExhausted, match="all 1 sandboxes are in use") as refused:
        manager.acquire(client_id="ben")
    assert ("max_sandboxes", True) == (refused.value.field, refused.value.retryable)
    assert 1 == manager.stats().refused

    first.release()
    assert manager.acquire(client_id="ben").newly_created


def test_the_statistics_are_what_happened(make_manager: MakeManager) -> None:
    manager = make_manager(pool=PoolConfig(min_warm=1, max_warm=1))
    assert until(lambda: 1 == manager.stats().pool_size)
    nothing_yet = manager.stats()
    assert (None, None) == (nothing_yet.average_creation_ms, nothing_yet.pool_hit_rate)

    warm = manager.acquire(client_id="ann")
    cold = manager.acquire(options=AcquireOptions(use_pool=False), client_id="ann")
    mine = AcquireOptions(preferred_id=cold.session.sandbox_id)
    again = manager.acquire(options=mine, client_id="ann")
    short = manager.acquire(SandboxSpec(ttl_s=0.2), AcquireOptions(use_pool=False), client_id="ben")
    manager.detach(warm.id)
    assert until(lambda: "ttl" == manager.get(short.id).reason)

    stats = manager.stats()
    assert again.id == cold.id
    assert (3, 2, 1, 1) == (
        stats.created,
        stats.active_sandboxes,
        stats.active_sessions,
        stats.detached_sessions,
    )
    assert (1, 0, 1.0) == (stats.pool_hits, stats.pool_misses, stats.pool_hit_rate)
    assert (1, 1) == (stats.timeout_destroys, stats.terminated)
    assert 0 < (stats.average_creation_ms or 0)
    assert stats.creation is not None
    assert stats.pool_claim is not None
    assert 0 < (stats.pool_claim.p50_ms or 0) <= (stats.creation.p99_ms or 0)
    assert stats.pool_claim.p50_ms == stats.pool_claim.p99_ms, "the pool's one alone was claimed"


def test_capabilities_are_read_back(make_manager: MakeManager, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    spec = SandboxSpec(
        mounts=(Mount("/data", str(tmp_path)),),
        limits=Limits(open_files=99, disk_bytes=8 * MIB),
        network=NetworkPolicy(),
        ttl_s=600,
        allow_degraded=ALLOWED,
    )
    lease = make_manager().acquire(spec, client_id="ann")
    found = lease.capabilities()

    assert (lease.session.sandbox_id, "native", "os_hardened") == (
        found.id,
        found.backend,
        found.profile,
    )
    assert found.can_write_filesystem
    assert "/data" in found.readable_paths
    assert "/data" not in found.writable_paths
    assert not lease.sandbox.shell("touch /data/x").ok, "the control: it is as it says"
    assert (False, ()) == (found.has_network, found.allowed_destinations)
    assert (99, 8 * MIB) == (found.limits.open_files, found.limits.disk_bytes)
    assert found.syscall_filter_active
    assert "mount" in " ".join(found.blocked_syscall_categories)
    assert not found.is_persistent
    assert found.created_at is not None
    assert 0 < (found.time_remaining_ms or 0) <= 600_000
