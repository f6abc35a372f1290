"""A sandbox's network as the host process knows it: its policy, and its events."""

from __future__ import annotations

import _socket as socket
import os
from _thread import allocate_lock
from collections import deque

from ...launcher import wire
from ...model.net.netlog import NetworkEvent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MOST_EVENTS = 1000  # of one sandbox, and of one sort
MOST_PLACES = 4096


class Served:
    """A sandbox of the egress process: its registration, to repeat after a restart, and its events.

    Attributes:
        refusal: Why its policy was refused; empty when it was accepted.
        is_move: Another process has its sockets too: do not shut them down.
    """

    TOTALS = ("allowed", "refused", "missed", "bytes_in", "bytes_out")

    def __init__(self, body: dict[str, Any], fds: list[int], *, is_move: bool = False) -> None:
        self.body, self.fds, self.is_move = body, fds, is_move
        self.allowed = self.refused = self.missed = 0
        self.bytes_in = self.bytes_out = 0
        self.listener: Callable[[NetworkEvent], None] | None = None
        self.refusal = ""
        self._lock = allocate_lock()  # for the record
        # Two queues: a flood of one kind of events does not push the other out.
        self._passed: deque[NetworkEvent] = deque(maxlen=MOST_EVENTS)
        self._others: deque[NetworkEvent] = deque(maxlen=MOST_EVENTS)
        self._first: dict[tuple[str, str, int], NetworkEvent] = {}  # to each place

    def add(self, event: NetworkEvent) -> None:
        with self._lock:
            if event.allowed and event.kind != "dns":
                self._passed.append(event)
                if len(self._first) < MOST_PLACES:
                    self._first.setdefault((event.host, event.address, event.port), event)
            else:
                self._others.append(event)
            self.allowed += event.allowed
            self.refused += not event.allowed
            self.bytes_in += event.bytes_in
            self.bytes_out += event.bytes_out
        if self.listener is not None:
            self.listener(event)

    def events(self) -> list[NetworkEvent]:
        """Oldest first: the newest of each sort, and the first that went to each place."""
        every = {
            id(event): event for event in (*self._first.values(), *self._passed, *self._others)
        }
        return sorted(every.values(), key=lambda event: event.time)

    def inherit(self, before: Served) -> None:
        """Go on with what was known of the sandbox before."""
        with self._lock:
            self._passed.extendleft(reversed(before._passed))
            self._others.extendleft(reversed(before._others))
            self._first = {**self._first, **before._first}
            self.listener = before.listener
            for name in self.TOTALS:
                setattr(self, name, getattr(self, name) + getattr(before, name))

    def give_up(self) -> None:
        """Let nothing listen in the sandbox any more, whoever else has the sockets.

        Who connects is refused then, and does not wait for somebody who never comes.
        """
        for fd in self.fds:
            sock = wire.Socket(fileno=os.dup(fd))
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # ENOTCONN is what the resolver's socket says, and is shut down all the same
            finally:
                sock.close()
        self.close()

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())
