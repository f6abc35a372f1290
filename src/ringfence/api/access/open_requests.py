"""Requests under way that end with the key that opened them: streams, uploads, WebSockets, long waits."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from . import permissions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .caller import Caller
    from .keys import Authenticator
    from .permissions import Found

_NEVER = float("inf")
_LONGEST_S = 60.0  # between two looks, should the clock be set
_AGAIN_S = 5.0  # for what a cancelled request still does; one that swallowed the first has a second


@dataclass
class OpenRequest:
    """A request under way.

    Attributes:
        is_cut: Its key opens nothing any more.
    """

    task: asyncio.Task[object]
    caller: Caller
    is_cut: bool = False


class OpenRequests:
    """All of them; one timer for the key that expires next. Of one event loop."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator
        self._requests: dict[int, OpenRequest] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due = _NEVER  # of the timer, by the loop's clock

    def begin(self, caller: Caller, method: str, found: Found | None) -> OpenRequest | None:
        """Cut the running task when the caller's key ends; None: this request is let finish.

        What changes something is answered once, and cutting it would leave open whether it has.
        """
        streams = found is not None and found.rule.body == permissions.STREAM
        if not caller.key or not (streams or method in ("GET", "HEAD", permissions.WEBSOCKET)):
            return None
        task = asyncio.current_task()
        assert task is not None
        request = self._requests[id(task)] = OpenRequest(task, caller)
        self._look_at(self._authenticator.opens_until(caller))
        return request

    def end(self, request: OpenRequest | None) -> None:
        if request is not None:
            self._requests.pop(id(request.task), None)

    def look(self) -> None:
        """Cut what keys opened that open nothing any more: one was changed, or has expired."""
        self._stop_timer()
        now = time.time()
        for request in [*self._requests.values()]:
            until = self._authenticator.opens_until(request.caller)
            if until <= now:
                request.is_cut = True
                request.task.cancel()
                until = now + _AGAIN_S
            self._look_at(until)

    def _look_at(self, when: float) -> None:
        if when == _NEVER:
            return
        loop = asyncio.get_running_loop()
        at = loop.time() + min(max(0.0, when - time.time()), _LONGEST_S)
        if at < self._due:
            self._stop_timer()
            self._timer, self._due = loop.call_at(at, self.look), at

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due = None, _NEVER
