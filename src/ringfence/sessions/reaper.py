"""The thread that looks at sessions when it is time to, and never waits for any one of them."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

from ..errors import RingfenceError
from . import expiry, liveness

TYPE_CHECKING = False
if TYPE_CHECKING:
    from weakref import ReferenceType

    from .clock import Clock
    from .live import Live
    from .parts import Manager

logger = logging.getLogger("ringfence.sessions")
# Looking at a sandbox may block while it is slow to answer: that must not hold up the others.
_HANDS = 4
_LEAST_DUE = 64
_AFTER_FAULT_S = 1.0  # one whose look raised what it must not is not looked at again at once
_GRAIN_S = 0.02  # sessions that are due this close together are looked at together


class Reaper:
    """Looks at each session when its timeout, its time to live or the interval is due."""

    def __init__(self, manager: Manager, clock: Clock) -> None:
        self._manager, self._clock = manager, clock
        self._changed = threading.Condition()
        # By weak reference: what has ended must not be kept until it would have been looked at.
        self._due: list[tuple[float, int, ReferenceType[Live]]] = []
        self._most_due = _LEAST_DUE  # entries, until those that say nothing are looked for
        self._count = itertools.count()
        self._wakes_at = 0.0  # on the clock, when the thread looks again by itself
        self._closed = False
        self._thread: threading.Thread | None = None
        self._hands: ThreadPoolExecutor | None = None

    @property
    def alive(self) -> bool:
        """True while its thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        self._hands = ThreadPoolExecutor(_HANDS, thread_name_prefix="ringfence-reaper")
        self._thread = threading.Thread(target=self._run, name="ringfence-reaper", daemon=True)
        self._thread.start()

    def expect(self, live: Live, least_s: float = 0.0) -> None:
        """A session is new, or its deadline has changed; it is not looked at for `least_s`."""
        now = self._clock.now()
        wait_s = expiry.next_look_s(
            live.state,
            live.timeouts,
            live.activity.unused_s(now),
            live.left_s(now),
            self._manager.config.cleanup_interval_s,
        )
        due = now + max(least_s, wait_s)
        with self._changed:
            live.next_look = due
            heapq.heappush(self._due, (due, next(self._count), weakref.ref(live)))
            if len(self._due) > self._most_due:
                self._forget()
            if due < self._wakes_at:
                self._changed.notify()

    def _forget(self) -> None:
        """Of sessions that end soon there would be thousands of entries, until each is due."""
        self._due = [
            each for each in self._due if (live := each[2]()) and live.next_look == each[0]
        ]
        heapq.heapify(self._due)
        self._most_due = 2 * len(self._due) + _LEAST_DUE

    def _run(self) -> None:
        tidy = self._clock.now()
        while True:
            with self._changed:
                while not self._closed and (wait := self._wait_s(tidy)) > 0:
                    self._wakes_at = self._clock.now() + wait
                    self._changed.wait(wait)
                if self._closed:
                    return
                ready = self._take_due()
            for live in ready:
                assert self._hands is not None
                self._hands.submit(self._look, live)
            if self._clock.now() >= tidy:
                tidy = self._clock.now() + self._manager.config.cleanup_interval_s
                liveness.tidy(self._manager)

    def _wait_s(self, tidy: float) -> float:
        return min([tidy, *(due for due, _, _ in self._due[:1])]) - self._clock.now()

    def _take_due(self) -> list[Live]:
        ready, until = [], self._clock.now() + _GRAIN_S
        while self._due and self._due[0][0] <= until:
            due, _, found = heapq.heappop(self._due)
            live = found()
            # An entry that was replaced by a later one says nothing; one in hand is not given twice.
            if live is None or due != live.next_look:
                continue
            if not live.is_checked and live.state != "terminated":
                live.is_checked = True
                ready.append(live)
        return ready

    def _look(self, live: Live) -> None:
        ended, pause_s = False, 0.0
        try:
            ended = liveness.look_at(self._manager, live)
        except RingfenceError:
            pass  # `undying`, or it has just ended
        except Exception:
            logger.exception("a look at session %s failed", live.id)
            pause_s = _AFTER_FAULT_S
        finally:
            live.is_checked = False
        if not ended and live.state != "terminated":
            self.expect(live, pause_s)

    def close(self) -> None:
        """Stop; returns when nothing is being looked at any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        if self._hands is not None:
            self._hands.shutdown()
