"""Listing of sandboxes page by page, ended ones included on request."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from ...model.state import State
from .. import liveness
from .describe import describe_ended, describe_live

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ...model.sandbox import SandboxView
    from ..manager import SessionManager

ALIVE = (State.PROVISIONED, State.RUNNING, State.SUSPENDED)
_BATCH = 200


@dataclass(frozen=True)
class Wanted:
    """Which sandboxes; an empty `states` means those that live."""

    client_id: str | None = None
    labels: Mapping[str, str] | None = None
    states: tuple[State, ...] = ()
    name: str | None = None

    def includes(self, view: SandboxView) -> bool:
        """Return whether the sandbox matches the filter."""
        labels = (self.labels or {}).items()
        return (
            view.state in (self.states or ALIVE)
            and self.name in (None, view.name)
            and all(view.labels.get(key) == value for key, value in labels)
        )


def page(
    manager: SessionManager, wanted: Wanted, after: str, most: int
) -> tuple[list[SandboxView], str | None]:
    """The next `most` of them behind session `after`, oldest first, and where to go on."""
    sources = [_alive(manager, wanted, after)]
    if State.TERMINATED in wanted.states:
        sources.append(_ended(manager, wanted, after))
    found: list[SandboxView] = []
    seen: set[str] = set()
    for view in heapq.merge(*sources, key=lambda each: each.session_id):
        # A sandbox that ended during the listing may come from both sources.
        if view.session_id in seen or not wanted.includes(view):
            continue
        if len(found) == most:
            return found, found[-1].session_id
        seen.add(view.session_id)
        found.append(view)
    return found, None


def _alive(manager: SessionManager, wanted: Wanted, after: str) -> Iterator[SandboxView]:
    lives = sorted(manager.index.all(), key=lambda live: live.id)
    for live in lives:
        mine = wanted.client_id in (None, live.client_id)
        if mine and live.id > after and not liveness.notice_loss(manager, live):
            yield describe_live(live)


def _ended(manager: SessionManager, wanted: Wanted, after: str) -> Iterator[SandboxView]:
    while records := manager.store.ended_sessions(wanted.client_id, after, _BATCH):
        for record in records:
            yield describe_ended(manager, record)
        after = records[-1].id
