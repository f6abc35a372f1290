"""How many sandboxes there may be at once: slots, and an orderly queue for them."""

from __future__ import annotations

import threading
import time
from collections import deque

from ..errors import LifecycleError, ResourceExhausted


class Slots:
    """`most` slots; whoever makes a sandbox takes one first and gives it back when it is gone.

    Args:
        max_waiting: Callers that may wait at once.
        wait_s: How long each waits at most.
    """

    def __init__(self, most: int, max_waiting: int, wait_s: float) -> None:
        self.most, self._max_waiting, self._wait_s = most, max_waiting, wait_s
        self._drains = False
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        self.taken = self.refused = 0
        self._closed = False

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def try_take(self) -> bool:
        """Take a free slot if no other caller waits for one."""
        with self._changed:
            if self._drains or self.taken >= self.most or self._queue:
                return False
            self.taken += 1
            return True

    def take_again(self) -> None:
        """Count a sandbox that is there already, even beyond `most`."""
        with self._changed:
            self.taken += 1

    def take(self) -> None:
        """Take a slot, waiting for one in turn.

        Raises:
            ResourceExhausted: None came free in time, or too many wait already. Try again later.
        """
        with self._changed:
            self._check_open()
            if self.taken < self.most and not self._queue:
                self.taken += 1
                return
            if len(self._queue) >= self._max_waiting:
                self.refused += 1
                raise self._full(f"and {len(self._queue)} wait for one" if self._queue else "")
            ticket = object()
            self._queue.append(ticket)
            try:
                self._await_turn(ticket)
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()
            self.taken += 1

    def _await_turn(self, ticket: object) -> None:
        deadline = time.monotonic() + self._wait_s
        while self.taken >= self.most or self._queue[0] is not ticket:
            if self._closed:
                raise LifecycleError("the session manager is closed")
            self._check_open()
            left = deadline - time.monotonic()
            if left <= 0:
                self.refused += 1
                raise self._full(f"and none became free within {self._wait_s:g} s")
            self._changed.wait(left)

    def drain(self, *, draining: bool) -> bool:
        """Refuse every caller from now on, or no longer; return whether no slot is taken then."""
        with self._changed:
            self._drains = draining
            self._changed.notify_all()
            return draining and not self.taken

    def _check_open(self) -> None:
        if self._drains:
            raise ResourceExhausted("this server drains", hint="use another one")

    def _full(self, more: str) -> ResourceExhausted:
        text = f"all {self.most} sandboxes are in use {more}".rstrip()
        return ResourceExhausted(
            text, hint="release one, raise max_sandboxes, or try again later", field="max_sandboxes"
        )

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def give_back(self) -> None:
        with self._changed:
            self.taken -= 1
            self._changed.notify_all()
