"""Streams of an exec that pass through the agent: its processes then hold nothing of the host's.

Only such processes can be saved with the guest's memory. For that the agent lets go of the host's ends,
and whoever goes on from there, the sandbox itself or a fork of it, brings others.
"""

from __future__ import annotations

import os
import select
import time

_PIECE = 1 << 16
_TURNS = 8  # then somebody else may have one
_PATIENCE_S = 1.0  # for whoever reads on the host, and is about to
_MOST_LEFT = 1 << 18  # more than a pipe holds, of whose writers one may write on and on


class OneWay:
    """Bytes on their way from one non-blocking pipe to another; see `flows.Flow`."""

    def __init__(self, source: int, sink: int) -> None:
        self.source, self.sink, self.rest = source, sink, b""
        for fd in (source, sink):
            os.set_blocking(fd, False)

    @property
    def is_over(self) -> bool:
        """True once nothing more comes, or nobody takes it."""
        return self.source < 0 and self.sink < 0

    def wants(self) -> dict[int, int]:
        if self.source < 0 or self.sink < 0:
            return {}
        return {self.sink: select.POLLOUT} if self.rest else {self.source: select.POLLIN}

    def ready(self, fd: int) -> None:
        del fd
        for _ in range(_TURNS):
            if not self.move():
                return

    def move(self) -> int:
        """Pass a piece on at most; how many bytes the sink has got."""
        if self.source < 0 or self.sink < 0:
            return 0
        try:
            if not self.rest:
                self.rest = os.read(self.source, _PIECE)
                if not self.rest:
                    self.close()
                    return 0
            count = os.write(self.sink, self.rest)
        except BlockingIOError:
            return 0
        except OSError:  # EPIPE: nobody reads there any more
            self.close()
            return 0
        self.rest = self.rest[count:]
        return count

    def settle(self) -> bool:
        """Pass on what has come by now; True if that is done, or nobody wants it."""
        left = _MOST_LEFT
        while left > 0 and (count := self.move()):
            left -= count
        return left <= 0 or not self.rest

    def flush(self) -> bool:
        """Pass on what was taken from the source, as soon as it is read; whether it was."""
        until = time.monotonic() + _PATIENCE_S
        poll = select.poll()
        while self.rest and not self.is_over:
            poll.register(self.sink, select.POLLOUT)
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                return False
            self.move()  # at most the rest
        return True

    def close(self) -> None:
        for fd in (self.source, self.sink):
            if fd >= 0:
                os.close(fd)
        self.source, self.sink, self.rest = -1, -1, b""


class Relay:
    """The streams of one exec.

    Args:
        host: The host's ends: of standard input, output and errors, or of the last two.

    Precondition: made as the process's user, who may then open a pipe anew, as /dev/stdout.

    Attributes:
        inner: The process's ends; the caller's to close.
        streams: By the number of the process's descriptor.
    """

    def __init__(self, host: list[int]) -> None:
        self.inner: list[int] = []
        self.streams: dict[int, OneWay] = {}
        for number, fd in enumerate(host, 3 - len(host)):
            read, write = os.pipe2(os.O_CLOEXEC)
            self.inner.append(write if number else read)
            self.streams[number] = OneWay(read, fd) if number else OneWay(fd, write)

    def settle(self) -> bool:
        """Pass on what the process has said by now; True if that is done, or nobody wants it."""
        waiting = [number for number, way in self.streams.items() if number and not way.settle()]
        return not waiting

    def waiting(self) -> str:
        """Pass on all that can be; what of it has to wait, where something has."""
        for number, way in self.streams.items():
            way.settle()
            if number and not way.flush():
                return "output that was not read"
            if not number and way.rest:
                return "input that it does not read"
        return ""

    def let_go(self) -> None:
        """Close the host's ends. Precondition: nothing waits."""
        for number, way in self.streams.items():
            if way.is_over:
                continue
            if number:
                os.close(way.sink)
                way.sink = -1
            else:
                os.close(way.source)
                way.source = -1

    def join(self, host: dict[int, int]) -> list[OneWay]:
        """Go on with other ends of the host's; what is to be driven. What is over closes its one."""
        going_on = []
        for number, fd in host.items():
            way = self.streams.get(number)
            if way is None or way.is_over:
                os.close(fd)
                continue
            os.set_blocking(fd, False)
            if number:
                way.sink = fd
            else:
                way.source = fd
            going_on.append(way)
        return going_on

    def close(self) -> None:
        for way in self.streams.values():
            way.close()
