"""Events of all sandboxes in order: the last thousands, and their listeners."""

from __future__ import annotations

import threading
import time
from collections import deque
from itertools import islice

from ..model.base.checks import FrozenMap
from ..model.event import Event

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .live import Live

_KEPT = 10_000  # as tuples: models would take four times the memory, and few are ever asked for

_Record = tuple[int, str, float, str, str, str, str, tuple[tuple[str, str], ...]]


class Events:
    """A bounded log. A listener is called in the thread in which it happens, and must not block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: deque[_Record] = deque(maxlen=_KEPT)
        self._listeners: list[Callable[[Event], None]] = []
        self._seq = 0
        self.epoch = f"{time.time_ns():x}"
        """Of this numbering: another manager counts anew."""

    def add(self, kind: str, live: Live | None, **details: str) -> None:
        """It happened just now; None where it is of no sandbox."""
        with self._lock:
            self._seq += 1
            more = tuple(details.items())
            ids = (live.sandbox_id, live.id, live.client_id) if live else ("", "", "")
            reason = live.reason if live else ""
            record: _Record = (self._seq, kind, time.time(), *ids, reason, more)
            self._records.append(record)
            listeners = list(self._listeners)
        if listeners:
            event = _event(record)
            for listener in listeners:
                listener(event)

    @property
    def last(self) -> int:
        """The number of the newest; 0 when there is none."""
        with self._lock:
            return self._seq

    def since(self, seq: int) -> tuple[list[Event], int]:
        """Return the events after `seq`, and the number of lost ones."""
        with self._lock:
            # Sequence numbers have no gaps: the wanted events are the last `count`.
            count = max(0, min(self._seq - seq, len(self._records)))
            found = [*islice(reversed(self._records), count)]
            first = self._records[0][0] if self._records else self._seq + 1
        return [_event(each) for each in reversed(found)], max(0, first - seq - 1)

    def listen(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Hear of everything from now on, until the returned function is called."""
        with self._lock:
            self._listeners.append(listener)

        def stop() -> None:
            with self._lock:
                if listener in self._listeners:
                    self._listeners.remove(listener)

        return stop


def _event(record: _Record) -> Event:
    return Event(*record[:7], FrozenMap(record[7]))
