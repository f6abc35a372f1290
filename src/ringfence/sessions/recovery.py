"""Recovery at the start: an earlier manager's sandboxes are taken over or ended, as found in the kernel."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from functools import lru_cache

from ..backends.optional import Durable, DurableSandbox
from ..errors import RingfenceError
from ..model.client_session import SessionState, SessionTimeouts
from ..model.spec import SandboxSpec
from ..store import records
from . import snapshots
from .live import Live

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..backends.protocol import Backend, BackendSandbox
    from ..store.records import Anchor, SandboxRecord, SessionRecord
    from .parts import Manager

RESTART = "restart"
logger = logging.getLogger("ringfence.sessions")
_ALIKE = 256  # a thousand sandboxes were asked for in few words: each is read once


def recover(manager: Manager) -> None:
    """Bring records and kernel together. Preconditions: nobody else uses either."""
    end_anchors(manager)
    left = manager.store.unended_sandboxes()
    for name in {record.backend for record in left} - manager.maker.backends.keys():
        manager.not_ours.extend(record.id for record in left if record.backend == name)
    states = (SessionState.ACTIVE, SessionState.DETACHED, SessionState.SUSPENDED)
    sessions = {each.sandbox: each for each in manager.store.sessions(states=states)}
    for record in left:
        backend = manager.maker.backends.get(record.backend)
        if backend is not None:
            settle(manager, backend, record, sessions.get(record.id))
    end_unknown(manager)
    if left:
        snapshots.settle(manager)


def end_unknown(manager: Manager) -> None:
    """End sandboxes that an earlier process left and that no record tells of."""
    for backend in manager.maker.backends.values():
        if isinstance(backend, Durable) and backend.outlives:
            for inner in backend.living():
                if manager.index.find(inner.session.id) is None:
                    inner.terminate()


def end_anchors(manager: Manager) -> None:
    """End the processes that earlier sandboxes hang on, where they have not ended by themselves.

    A copied or restored directory has the anchors of the one that it was copied from, whose daemon may
    run: they are forgotten, and what they name is left alone.
    """
    strange = [each for each in manager.store.anchors() if each.directory != manager.store.identity]
    for anchor in strange:
        manager.store.forget_anchor(anchor)
    if any(each.boot == manager.clock.boot for each in strange):
        logger.warning(
            "the state directory is a copy: sandboxes in its records are marked as ended here, and those"
            " of the original are left alone"
        )
    for anchor in manager.store.anchors():
        backend = manager.maker.backends.get(anchor.backend)
        if backend is None or _is_its_own(backend, anchor):
            continue
        if isinstance(backend, Durable) and anchor.boot == manager.clock.boot:
            backend.end_leftovers(anchor.pid, anchor.started)
        manager.store.forget_anchor(anchor)


def _is_its_own(backend: Backend, anchor: Anchor) -> bool:
    """Return whether `anchor` is the process that this backend's surviving sandboxes depend on."""
    return isinstance(backend, Durable) and backend.anchor() == (anchor.pid, anchor.started)


def settle(
    manager: Manager, backend: Backend, record: SandboxRecord, session: SessionRecord | None
) -> None:
    """Take over one sandbox, or see that it is gone. `session`: one on it that is not over."""
    inner = _still_there(backend, record)
    if inner is not None and session is not None and record.phase == records.LIVE:
        _take_over(manager, inner, record, session)
        return
    if inner is not None:
        inner.terminate()
    manager.maker.ended(record.id, record.reason or RESTART, session.id if session else None)


def _still_there(backend: Backend, record: SandboxRecord) -> BackendSandbox | None:
    """The sandbox itself, of a backend whose sandboxes outlive a manager; else None."""
    if not isinstance(backend, Durable):
        return None
    try:
        found = backend.adopt(record.id)
    except RingfenceError:
        return None
    if found is not None and str(found.session.state) == "terminated":
        return None
    return found


def _take_over(
    manager: Manager, inner: BackendSandbox, record: SandboxRecord, session: SessionRecord
) -> None:
    """The session goes on as if nothing had happened: its clocks did not stand still."""
    live = Live(
        manager.clock,
        session.id,
        session.owner,
        record.backend,
        inner.session.id,
        _spec(record.spec),
        _timeouts(session.timeouts),
        json.loads(session.metadata),
        manager.verbs,
    )
    live.have(inner)
    with suppress(RingfenceError):  # removed while no manager ran
        manager.maker.hold_template(live.sandbox_id, live.spec)
    live.key, live.request = session.key, session.request
    live.state, live.created_at = SessionState(session.state), session.created_at
    if isinstance(inner, DurableSandbox):
        inner.align(live.state == SessionState.SUSPENDED)
    same_clock = record.boot == session.boot == manager.clock.boot
    if same_clock:
        live.activity.last = session.active_ns / 1e9
    if record.expires_ns is not None and same_clock:
        live.expires = record.expires_ns / 1e9
    manager.slots.take_again()
    manager.index.enter(live)
    manager.reaper.expect(live)


@lru_cache(_ALIKE)
def _spec(text: str) -> SandboxSpec:
    return SandboxSpec.from_json(json.loads(text))


@lru_cache(_ALIKE)
def _timeouts(text: str) -> SessionTimeouts:
    return SessionTimeouts.from_json(json.loads(text))
