"""Connecting to the first of several addresses that answers: RFC 8305, light."""

from __future__ import annotations

import _socket as socket
import errno
import os

from .io.loop import current, pause, running

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from .io.loop import Task

_STAGGER_S = 0.25  # the next address is tried beside one that has not answered for so long


class _Attempt:
    __slots__ = ("address", "error", "is_connected", "sock", "task")

    def __init__(self, family: int, address: str, port: int, task: Task) -> None:
        self.address, self.task = address, task
        self.is_connected = False
        self.error = 0
        kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        self.sock = socket.socket(family, kind)
        try:
            self.sock.connect((address, port))
        except BlockingIOError:
            pass
        except OSError as exc:
            self.error = exc.errno or errno.EIO
            return
        # To this machine the handshake is over before connect(2) returns.
        self.look()
        if not self.is_connected and not self.error:
            task.loop.watch(self.sock.fileno(), self._on_event)

    def look(self) -> None:
        self.error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not self.error:
            try:
                self.sock.getpeername()
                self.is_connected = True
            except OSError:
                pass  # ENOTCONN: still on its way

    def release(self) -> None:
        self.task.loop.unwatch(self.sock.fileno())

    def close(self) -> None:
        self.release()
        self.sock.close()

    def _on_event(self, _events: int) -> None:
        self.look()
        self.task.wake()


async def connect(places: Sequence[tuple[int, str]], port: int) -> tuple[socket.socket, str]:
    """A connected, non-blocking socket, and the address it leads to.

    Args:
        places: (family, address as text), best first. Nothing else is dialled: judge them before.

    Raises:
        OSError: Of the last address that failed, when every one did.
    """
    attempts: list[_Attempt] = []
    left = list(places)
    error = errno.EHOSTUNREACH
    next_at = 0.0
    task = current()
    try:
        while True:
            for attempt in [each for each in attempts if each.error]:
                error, next_at = attempt.error, 0.0  # do not wait for the stagger
                attempts.remove(attempt)
                attempt.close()
            for attempt in attempts:
                if attempt.is_connected:
                    attempts.remove(attempt)
                    attempt.release()
                    return attempt.sock, attempt.address
            now = running().now
            if left and (not attempts or now >= next_at):
                attempts.append(_Attempt(*left.pop(0), port, task))
                next_at = now + _STAGGER_S
            elif attempts:
                await _wait(next_at - now if left else None)
            else:
                raise OSError(error, os.strerror(error))
    finally:
        for attempt in attempts:
            attempt.close()


async def _wait(seconds: float | None) -> None:
    """Until an attempt has news, or for so long."""
    task = current()
    timer = None if seconds is None else task.loop.later(seconds, task.wake)
    try:
        await pause()
    finally:
        if timer is not None:
            timer.cancel()
