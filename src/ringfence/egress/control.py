"""The host process's end of the line: its requests come in, what it is told goes out.

Requests are unmarshalled: the host process is trusted, and the same interpreter. What goes out is
JSON, because this process has spoken with strangers.
"""

from __future__ import annotations

from _collections import deque
from _json import encode_basestring_ascii as quote

from ..launcher import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .io.loop import Loop

CONTROL_FD = 3
_MOST_WAITING = 4096  # messages; a host process that does not read them does not stop us


class Control:
    """The socket to the host process.

    Args:
        on_request: Takes a request and its descriptors, which are its own from then on.
        on_end: Called when the host process is gone.
    """

    def __init__(
        self,
        loop: Loop,
        sock: wire.Socket,
        on_request: Callable[[Any, list[int]], None],
        on_end: Callable[[], None],
    ) -> None:
        self._loop, self._socket = loop, sock
        self._on_request, self._on_end = on_request, on_end
        self._waiting: deque[bytes] = deque()
        sock.setblocking(False)
        loop.watch(sock.fileno(), self._on_event)

    def tell(self, message: dict[str, Any], *, must: bool = False) -> bool:
        """Send a message, now or as soon as there is room; false when too much waits already.

        Args:
            must: Keep it anyway: the host waits for it.
        """
        if len(self._waiting) >= _MOST_WAITING and not must:
            return False
        self._waiting.append(write(message).encode("ascii"))
        self._send()
        return True

    def _on_event(self, _events: int) -> None:
        self._send()
        while True:
            try:
                message, fds = wire.receive(self._socket)
            except BlockingIOError:
                return
            if message is None:
                self._on_end()
                return
            self._on_request(message, fds)

    def _send(self) -> None:
        while self._waiting:
            try:
                self._socket.send(self._waiting[0])
            except BlockingIOError:
                return
            except OSError:
                self._on_end()
                return
            self._waiting.popleft()


def write(value: Any) -> str:
    """`value`, made of dict, list, tuple, str, int, float, bool and None, in pure ASCII.

    Precondition: keys are str, floats are finite.
    """
    if isinstance(value, str):
        return quote(value)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, dict):
        return "{" + ",".join([f"{quote(key)}:{write(item)}" for key, item in value.items()]) + "}"
    return "[" + ",".join([write(item) for item in value]) + "]"
