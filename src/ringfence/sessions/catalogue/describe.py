"""A sandbox of the manager as its owner sees it, alive or over."""

from __future__ import annotations

import json
import time
from contextlib import suppress

from ...errors import InvalidRequest, SandboxNotFound
from ...model.client_session import SessionState
from ...model.sandbox import SandboxView
from ...model.spec import SandboxSpec
from ...model.state import State
from .. import liveness
from .records import NAME, view_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ...model.client_session import ClientSession
    from ...model.session import Session
    from ...store.records import SessionRecord
    from ..live import Live
    from ..manager import SessionManager


def describe(manager: SessionManager, any_id: str, client_id: str | None = None) -> SandboxView:
    """A sandbox by its own or its session's id.

    Raises:
        SandboxNotFound: There is none, or it is another client's.
    """
    live = manager.index.find(any_id, client_id)
    if live is not None and not liveness.notice_loss(manager, live):
        return describe_live(live)
    session = manager.store.session(any_id) or manager.store.last_session_of(any_id)
    if session is None or client_id not in (None, session.owner):
        raise SandboxNotFound(f"no session or sandbox {any_id!r}")
    if session.state != SessionState.TERMINATED and live is not None:
        return describe_live(live)  # the disk is full: it is not written down yet
    return describe_ended(manager, session)


def describe_ended(manager: SessionManager, session: SessionRecord) -> SandboxView:
    record = manager.store.sandbox(session.sandbox)
    spec = SandboxSpec()
    if record:
        with suppress(InvalidRequest):  # written by an older version that accepted more
            spec = SandboxSpec.from_json(json.loads(record.spec))
    return _view(view_of(session), spec, None, record.ended_at if record else None)


def describe_live(live: Live) -> SandboxView:
    spec = live.spec.altered(network=live.inner.spec.network)
    return _view(live.view(), spec, live.inner.session)


def _view(
    session: ClientSession, spec: SandboxSpec, inner: Session | None, ended_at: float | None = None
) -> SandboxView:
    metadata, left_s = dict(session.metadata), session.expires_in_s
    over = inner is None or session.state == SessionState.TERMINATED
    return SandboxView(
        id=session.sandbox_id,
        session_id=session.session_id,
        owner=session.client_id,
        state=State.TERMINATED if over or inner is None else inner.state,
        session_state=session.state,
        backend=session.backend,
        created_at=session.created_at,
        last_active_at=session.last_active_at,
        name=metadata.pop(NAME, ""),
        labels=spec.labels,
        metadata=metadata,
        template=spec.template,
        tier=spec.tier,
        profile=spec.profile,
        limits=spec.limits,
        network=spec.network,
        mounts=() if inner is None else inner.mounts,
        timeouts=session.timeouts,
        expires_in_s=left_s,
        reason=session.reason,
        image=spec.image,
        user=spec.user,
        workdir=spec.workdir,
        env_names=tuple(sorted(spec.env)),
        expires_at=None if left_s is None else round(time.time() + left_s, 3),
        ended_at=ended_at,
    )
