"""Sessions as they are written down, and back."""

from __future__ import annotations

import json

from ...model.client_session import ClientSession, SessionState, SessionTimeouts
from ...store.records import SessionRecord

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...model.spec import SandboxSpec
    from ..clock import Clock
    from ..live import Live


NAME = "name"
"""The key in a session's metadata under which its sandbox's name is kept."""
_text = json.JSONEncoder(separators=(",", ":")).encode


def map_text(values: Mapping[str, str]) -> str:
    return _text(dict(values))


def spec_text(spec: SandboxSpec) -> str:
    """A spec, without secrets."""
    return _text(spec.to_json())


def record_of(live: Live, clock: Clock) -> SessionRecord:
    return SessionRecord(
        id=live.id,
        sandbox=live.sandbox_id,
        owner=live.client_id,
        backend=live.backend,
        state=str(live.state),
        metadata=map_text(live.metadata),
        timeouts=_text(live.timeouts.to_json()),
        created_at=live.created_at,
        boot=clock.boot,
        active_ns=int(live.activity.last * 1e9),
        active_at=clock.wall_at(live.activity.last),
        key=live.key,
        request=live.request,
        reason=live.reason,
    )


def view_of(record: SessionRecord) -> ClientSession:
    return ClientSession(
        session_id=record.id,
        sandbox_id=record.sandbox,
        client_id=record.owner,
        state=SessionState(record.state),
        backend=record.backend,
        created_at=record.created_at,
        last_active_at=record.active_at,
        timeouts=SessionTimeouts.from_json(json.loads(record.timeouts)),
        metadata=json.loads(record.metadata),
        reason=record.reason,
    )
