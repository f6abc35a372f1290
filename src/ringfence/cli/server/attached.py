"""A command in a sandbox of a server, attached to our streams, terminal and signals."""

from __future__ import annotations

import os
import queue
import signal
import threading
from contextlib import suppress

from ...errors import RingfenceError
from ...model.execs.exec_view import ExecView
from ..terminal import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ...client._sync.process import RemoteProcess
    from ..tty import RawTerminal

TIMED_OUT = 124
_CHUNK = 1 << 16
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Attached:
    """Our streams on one process, until it has ended.

    Args:
        on_terminal: It runs on one: ours goes raw, and its size follows ours.
    """

    def __init__(self, process: RemoteProcess, *, on_terminal: bool) -> None:
        self._process, self._on_terminal = process, on_terminal
        self._orders: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._seen: set[int] = set()

    def run_through(self) -> int:
        """Pass everything through; the exit code that a shell would report."""
        terminal = self._take_terminal()
        before = self._hear()
        try:
            if self._process.stdin is not None:
                threading.Thread(target=self._feed, daemon=True).start()
            threading.Thread(target=self._obey, daemon=True).start()
            return show(self._process)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if terminal is not None:
                terminal.restore()

    def _take_terminal(self) -> RawTerminal | None:
        if not self._on_terminal or not os.isatty(0):
            return None
        from ..tty import RawTerminal

        terminal = RawTerminal(0)
        terminal.enter()
        return terminal

    def _hear(self) -> dict[int, Any]:
        """Signals become orders for a thread: a handler must not use a connection in mid-request."""
        numbers = [*_PASSED_ON, signal.SIGWINCH] if self._on_terminal else [*_PASSED_ON]
        return {
            number: signal.signal(number, lambda n, _frame: self._orders.put(n))
            for number in numbers
        }

    def _obey(self) -> None:
        while True:
            number = self._orders.get()
            with suppress(RingfenceError):
                if number == signal.SIGWINCH:
                    from ..tty import size_of

                    self._process.resize(*size_of(1, 0, 2))
                elif number in self._seen:
                    self._process.kill()  # the second of a kind means it
                else:
                    self._seen.add(number)
                    self._process.signal_group(number)

    def _feed(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with suppress(RingfenceError):  # it has ended, or no longer reads
            while data := os.read(0, _CHUNK):
                stdin.write(data)
            if self._on_terminal:
                from ..tty import END_OF_INPUT

                stdin.write(END_OF_INPUT)
            else:
                stdin.close()


def show(process: RemoteProcess, *, follow: bool = True) -> int:
    """Write its output to ours; the exit code that a shell would report, 0 while it runs."""
    for event in process.events(follow=follow):
        if event["type"] == "output":
            _write(1 if event["stream"] == "stdout" else 2, event["data"])
        elif event["type"] == "dropped":
            say(
                f"{event['bytes']} bytes of {event['stream']} were dropped: the output exceeded its limit"
            )
        elif "exec" in event:
            return exit_code(ExecView.from_json(event["exec"]))
    return 0


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def exit_code(view: ExecView) -> int:
    """Of an exec that has ended.

    Raises:
        RingfenceError: It never began, or nothing is known of its end.
    """
    if view.problem is not None:
        raise view.problem.error()
    if view.status is None:
        return 0
    if view.status.timed_out:
        say(f"timed out after {view.timeout_s:g} s; every process of the command was killed")
        return TIMED_OUT
    if view.status.oom_killed:
        say("a process was killed: the sandbox reached its memory limit")
    if view.status.signal is not None:
        return 128 + view.status.signal
    return view.status.exit_code or 0
