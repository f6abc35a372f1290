"""A single-threaded process that forks on request, reaps what it forked, and ends with who asks."""

from __future__ import annotations

import _signal as signal
import posix as os
import select

from ..linux import cdata, privileges, signals
from . import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

CONTROL_FD = 3


def rename_process(name: bytes) -> None:
    """Replace the command line, which would show paths of the host to every sandbox."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end: proc(5), stat 48 and 49
    cdata.memset(start, 0, end - start)
    cdata.memmove(start, name, min(len(name), end - start - 1))
    privileges.set_name(name)


class Parent:
    """Serves the host process, one datagram a request, until the host's end of the socket closes."""

    def __init__(self, host: wire.Socket) -> None:
        self.host = host
        self.signal_fd = signals.signalfd([signal.SIGCHLD])

    def run(self) -> None:
        poll = select.poll()
        poll.register(self.host.fileno(), select.POLLIN)
        poll.register(self.signal_fd, select.POLLIN)
        while True:
            for fd, _event in poll.poll(self.drop_late()):
                if fd == self.signal_fd:
                    os.read(self.signal_fd, 4096)
                    self.reap()
                elif not self.serve_one():
                    return self.clean_up()

    def drop_late(self) -> float | None:
        """End what nobody came for; returns how long, in ms, to wait for the next."""
        return None

    def serve_one(self) -> bool:
        """Do one request; False: the host is gone."""
        raise NotImplementedError

    def reap(self) -> None:
        while True:
            try:
                pid, _status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.forget(pid)

    def forget(self, pid: int) -> None:
        raise NotImplementedError

    def clean_up(self) -> None:
        """The host is gone: end everything, wait for it, leave nothing."""
        raise NotImplementedError


def fork_helper(
    serve: Callable[..., None], request: dict[str, Any], reply: wire.Socket, fds: list[int]
) -> None:
    """Fork a process that does one request, answers it on `reply` itself, and ends."""
    if os.fork() == 0:
        status = 1
        try:
            serve(request, reply, fds)
            status = 0
        finally:
            os._exit(status)
