"""Record of decisions, sent to the host process in batches; bounded under floods."""

from __future__ import annotations

from time import time

from .meter import Rate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .io.loop import Loop, Timer

    Event = dict[str, Any]  # the JSON form of a model.netlog.NetworkEvent; defaults left out

_DELAY_S = 0.05  # events wait so long for company
_MOST_AT_ONCE = 64  # in a batch: it must fit a datagram
# Of one sandbox, what was let through and the rest each for itself: who floods the record with
# refusals does not hide behind them. What is more is only counted.
_EVENTS_PER_S, _BURST = 500.0, 2000.0
_SAME_S = 1.0  # the same name asked for again within this is the same question


class Record:
    """Of the whole process.

    Args:
        tell: Takes one message for the host process; false when the host has no room for it.
    """

    def __init__(self, loop: Loop, tell: Callable[[Event], bool]) -> None:
        self._loop, self._tell = loop, tell
        self._events: list[Event] = []
        self._missed: dict[str, int] = {}  # by sandbox: not told of one by one
        self._rates: dict[tuple[str, bool], Rate] = {}
        self._asked: dict[tuple[object, ...], float] = {}
        self._timer: Timer | None = None

    def add(self, sandbox_id: str, kind: str, **fields: Any) -> None:
        """Put one decision on record. `fields` are those of a NetworkEvent, without defaults."""
        budget = sandbox_id, kind != "dns" and bool(fields.get("allowed", False))
        rate = self._rates.get(budget)
        if rate is None:
            rate = self._rates[budget] = Rate(_EVENTS_PER_S, _BURST)
        if kind == "dns" and self._was_just_asked(sandbox_id, fields):
            return
        if rate.take():
            now = fields.pop("time", None) or time()
            self._events.append({"time": now, "sandbox_id": sandbox_id, "kind": kind, **fields})
        else:
            self._missed[sandbox_id] = self._missed.get(sandbox_id, 0) + 1
        if len(self._events) >= _MOST_AT_ONCE:
            self.flush()
        elif self._timer is None:
            self._timer = self._loop.later(_DELAY_S, self.flush)

    def forget(self, sandbox_id: str) -> None:
        for let_through in (False, True):
            self._rates.pop((sandbox_id, let_through), None)

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        events, self._events = self._events, []
        if events and not self._tell({"events": events}):
            for event in events:
                self._missed[event["sandbox_id"]] = self._missed.get(event["sandbox_id"], 0) + 1
        if self._missed and self._tell({"missed": self._missed}):
            self._missed = {}

    def _was_just_asked(self, sandbox_id: str, fields: Event) -> bool:
        """A program asks for A and AAAA, and again for each try: one line says it."""
        key = sandbox_id, fields.get("host"), fields.get("allowed")
        now = self._loop.now
        before = self._asked.pop(key, None)
        if before is not None and now - before < _SAME_S:
            self._asked[key] = before
            return True
        self._asked[key] = now
        while len(self._asked) > 1024:
            del self._asked[next(iter(self._asked))]
        return False
