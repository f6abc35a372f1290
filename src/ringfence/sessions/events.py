"""What happened to sandboxes, in order: the last thousands, and whoever listens."""

from __future__ import annotations

import threading
import time
from collections import deque

from ..model.event import Event
from ..model.frozen import FrozenMap

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .live import Live

_KEPT = 10_000


class Events:
    """A bounded log. A listener is called in the thread in which it happens, and must not block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[Event] = deque(maxlen=_KEPT)
        self._listeners: list[Callable[[Event], None]] = []
        self._seq = 0
        self.epoch = f"{time.time_ns():x}"
        """Of this numbering: another manager counts anew."""

    def add(self, kind: str, live: Live, **details: str) -> None:
        """It happened just now."""
        with self._lock:
            self._seq += 1
            event = Event(
                seq=self._seq,
                kind=kind,
                time=time.time(),
                sandbox_id=live.sandbox_id,
                session_id=live.id,
                client_id=live.client_id,
                reason=live.reason,
                details=FrozenMap(details),
            )
            self._kept.append(event)
            listeners = list(self._listeners)
        for listener in listeners:
            listener(event)

    @property
    def last(self) -> int:
        """The number of the newest; 0 when there is none."""
        with self._lock:
            return self._seq

    def since(self, seq: int) -> tuple[list[Event], int]:
        """What came after `seq`, and how many of those are no longer kept."""
        with self._lock:
            found = [each for each in self._kept if each.seq > seq]
            first = self._kept[0].seq if self._kept else self._seq + 1
        return found, max(0, first - seq - 1)

    def listen(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Hear of everything from now on, until the returned function is called."""
        with self._lock:
            self._listeners.append(listener)

        def stop() -> None:
            with self._lock:
                if listener in self._listeners:
                    self._listeners.remove(listener)

        return stop
