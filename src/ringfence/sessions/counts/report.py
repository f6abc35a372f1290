"""How a manager is doing: counts, times, health."""

from __future__ import annotations

from ...errors import RingfenceError
from ...model.client_session import SessionState
from ...model.manager_stats import Check, Health, ManagerStats
from .. import expiry
from ..config import PoolConfig

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..parts import Manager


def stats(manager: Manager) -> ManagerStats:
    counters, counts = manager.counters, manager.index.counts()
    hits, misses = counters["pool_hits"], counters["pool_misses"]
    active = counts[SessionState.ACTIVE]
    detached, suspended = counts[SessionState.DETACHED], counts[SessionState.SUSPENDED]
    return ManagerStats(
        uptime_s=manager.uptime_s,
        created=counters["created"],
        active_sandboxes=active + detached + suspended,
        active_sessions=active,
        detached_sessions=detached,
        suspended_sessions=suspended,
        pool_size=manager.pool.size,
        pool_hits=hits,
        pool_misses=misses,
        pool_hit_rate=hits / (hits + misses) if hits + misses else None,
        average_creation_ms=counters.creation.average_ms,
        creation=counters.creation.percentiles(),
        pool_claim=counters.claim.percentiles(),
        timeout_destroys=sum(counters[f"terminated: {reason}"] for reason in expiry.TIMED),
        terminated=counters["terminated"],
        lost=counters[f"terminated: {expiry.LOST}"],
        refused=manager.slots.refused,
        waiting=manager.slots.waiting,
        max_sandboxes=manager.config.max_sandboxes,
    )


def stats_of(manager: Manager, client_id: str) -> ManagerStats:
    """Count one client's sandboxes and sessions, without the totals over all clients."""
    counts = manager.index.counts(client_id)
    return ManagerStats(
        uptime_s=manager.uptime_s,
        active_sandboxes=sum(counts.values()) - counts[SessionState.TERMINATED],
        active_sessions=counts[SessionState.ACTIVE],
        detached_sessions=counts[SessionState.DETACHED],
        suspended_sessions=counts[SessionState.SUSPENDED],
    )


def health(manager: Manager) -> Health:
    """Look at everything that a manager needs.

    It is well while any backend makes sandboxes: without a pool each is made when it is asked for.
    """
    backends = [_backend(manager, name) for name in manager.maker.backends]
    needed = [_store(manager), _expiry(manager), _ends(manager)]
    ok = any(each.ok for each in backends) and all(each.ok for each in needed)
    return Health(ok=ok, checks=(needed[0], *backends, _pool(manager), *needed[1:]))


def _store(manager: Manager) -> Check:
    where = manager.store.directory.path if manager.store.directory else "in memory"
    try:
        manager.store.check()
    except RingfenceError as exc:
        return Check("store", False, str(exc))
    return Check("store", True, where)


def _backend(manager: Manager, name: str) -> Check:
    """By making a sandbox: what a backend's report is made from."""
    found = manager.maker.report(name, afresh=True)
    return Check(f"backend {name}", found.available, found.reason)


def _pool(manager: Manager) -> Check:
    pool = manager.pool
    if not pool.config.enabled:
        return Check("pool", True, "disabled")
    wrong = [f"{name}: {why}" for name, why in pool.given_up.items()]
    # The default pool is nobody's wish: a backend that builds nothing ahead has none.
    ok = not pool.last_error and (not wrong or pool.config == PoolConfig())
    wrong += [pool.last_error] if pool.last_error else []
    return Check("pool", ok, "; ".join(wrong) or f"{pool.size} warm")


def _expiry(manager: Manager) -> Check:
    if not manager.has_background:
        return Check("expiry", True, "by hand: cleanup_expired()")
    alive = manager.reaper.alive
    return Check("expiry", alive, "" if alive else "its thread has ended")


def _ends(manager: Manager) -> Check:
    undying = manager.maker.undying
    told = "; ".join(f"{sandbox_id}: {why}" for sandbox_id, why in undying.items())
    left = ", ".join(manager.not_ours)
    if left:
        told = "; ".join(filter(None, [told, f"sandboxes of backends that are not loaded: {left}"]))
    return Check("ends", not undying and not left, told)
