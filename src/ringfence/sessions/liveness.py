"""Looking at a session: is it in use, is it there at all, is anything due?"""

from __future__ import annotations

from ..backends.optional import CpuClock, Durable
from ..errors import RingfenceError
from ..model.client_session import DETACH, SUSPEND, SessionState
from . import expiry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..backends.protocol import BackendSandbox
    from .live import Live
    from .parts import Manager


def look_at(manager: Manager, live: Live) -> bool:
    """See whether a session is in use, and do what is due; whether it has ended by it."""
    if live.state == SessionState.TERMINATED:
        return False
    if notice_loss(manager, live):
        return True
    now = manager.clock.now()
    if live.state != SessionState.SUSPENDED:
        live.activity.look(now, busy=live.use.busy, cpu_ns=cpu_ns(live.inner))
    due = _due(manager, live)
    return due is not None and _carry_out(manager, live)


def notice_loss(manager: Manager, live: Live) -> bool:
    """End a session whose sandbox went away by itself; whether it did."""
    if live.state == SessionState.TERMINATED or live.moving or not is_gone(live.inner):
        return False
    with live.lock:  # it may have begun to move since
        # False when its end was under way, and the sandbox gone by that.
        return is_gone(live.inner) and manager.end(live, expiry.LOST)


def is_gone(inner: BackendSandbox) -> bool:
    """Return whether the sandbox is terminated."""
    return str(inner.session.state) == "terminated"


def _due(manager: Manager, live: Live) -> tuple[str, str] | None:
    now = manager.clock.now()
    unused, left = live.activity.unused_s(now), live.left_s(now)
    return expiry.verdict(live.state, live.timeouts, unused, left)


def _carry_out(manager: Manager, live: Live) -> bool:
    with live.lock:
        due = _due(manager, live)
        if due is None:
            return False  # somebody came back while we looked
        action, reason = due
        if action in (SUSPEND, DETACH):
            try:
                (manager.suspend if action == SUSPEND else manager.detach)(live.id)
                return False
            except RingfenceError:
                pass  # it cannot be suspended here: then it ends
        return manager.end(live, reason)


def cpu_ns(inner: BackendSandbox) -> int | None:
    """Processor time that a sandbox has used; None where it cannot be told now."""
    try:
        return inner.cpu_ns() if isinstance(inner, CpuClock) else inner.stats().cpu_ns
    except (RingfenceError, OSError):
        return None


def tidy(manager: Manager) -> None:
    """Write down who was active, forget what ended long ago, and look over the pool."""
    store, clock = manager.store, manager.clock
    written: dict[Live, float] = {}
    try:
        with store.together():
            for live in manager.index.all():
                last = live.activity.last
                if last != live.saved_activity:
                    store.change_session(
                        live.id, active_ns=int(last * 1e9), active_at=clock.wall_at(last)
                    )
                    written[live] = last
            store.prune(clock.ago(manager.config.keep_ended_s))
        for live, last in written.items():  # not before: all of it may be rolled back
            live.saved_activity = last
        store.checkpoint()
    except RingfenceError:
        pass  # no room now; `health` tells
    manager.pool.wake()


def drain(manager: Manager, *, draining: bool) -> bool:
    """Make nothing new, or again; return whether nothing is left, nor being made, on a draining server.

    A claim of a warm sandbox takes no slot of its own: so the pool is emptied.
    """
    is_empty = manager.slots.drain(draining=draining)
    while draining and (pooled := manager.pool.take_any()) is not None:
        manager.maker.discard(pooled, "drained")
    return is_empty


def save(manager: Manager) -> None:
    """Have durable backends save what the end of this process would lose."""
    for backend in manager.maker.backends.values():
        if isinstance(backend, Durable) and backend.outlives:
            backend.save()
