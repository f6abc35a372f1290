"""Stays with one running command: streams, signals, the clock, the end."""

from __future__ import annotations

import os
import select
import time

from ..backends.optional import DrivenExec
from . import signals
from .relay import Flow, Flows
from .terminal import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..backends.protocol import BackendExec, BackendSandbox
    from ..model.execs.exec import ExecRequest, ExecStatus
    from .signals import Bell
    from .tty import RawTerminal

TIMED_OUT, OWN_FAILURE, READER_GONE = 124, 125, 128 + 13
_GRACE_S = 0.1  # after the timeout: then PID 1 is overrun and the kernel ends the whole sandbox
_SIGCONT, _SIGSTOP = 18, 19
_LONGEST_S = 86_400  # poll(2) takes milliseconds as an int: 24 days
_STALLED_S = 0.1  # how long a reader may stand still after a timeout before its rest is dropped


class Supervisor:
    """Supervisor of one command in one sandbox.

    Attributes:
        status: How it ended; None where only the end of its sandbox is known.
        timed_out: It was killed at its timeout.
    """

    def __init__(self, sandbox: BackendSandbox, request: ExecRequest, bell: Bell) -> None:
        self.sandbox, self.request, self.bell = sandbox, request, bell
        self.flows = Flows(bell)
        self.status: ExecStatus | None = None
        self.timed_out = False
        self.started = time.monotonic()
        self._run: BackendExec | None = None
        self._seen: set[int] = set()
        self._terminal: RawTerminal | None = None

    # -- the whole of it ----------------------------------------------------------------------

    def run_through(self) -> int:
        """Start it, pass everything through, and return what our exit code is to be."""
        try:
            self.start(1, 2)
            self.wait()
            self.sandbox.terminate()
            self.drain()
        finally:
            if self._terminal is not None:
                self._terminal.restore()
        return self._conclude()

    def start(
        self, stdout: int | Callable[[bytes], None], stderr: int | Callable[[bytes], None]
    ) -> None:
        if self.request.pty is not None:
            self._take_terminal()
        self.bell.hear_the_terminal(resized=self.request.pty is not None)
        run = self._run = self.sandbox.start(self.request)
        if run.stdout is not None:
            self.flows.output(run.stdout, stdout)
        if run.stderr is not None:
            self.flows.output(run.stderr, stderr)
        if run.stdin is not None and self.request.stream_stdin:
            self.flows.input(0, run.stdin, self._end_input)

    def _take_terminal(self) -> None:
        if os.isatty(0):
            from .tty import RawTerminal

            self._terminal = RawTerminal(0)
            self._terminal.enter()

    def _end_input(self) -> None:
        run = self._run
        if run is None:
            return
        if self.request.pty is not None and run.stdin is not None:
            from .tty import END_OF_INPUT

            os.write(run.stdin, END_OF_INPUT)
            return
        run.close_stdin()

    # -- while it runs ------------------------------------------------------------------------

    def wait(self) -> None:
        """Until it has ended, its time is over, or nobody reads its output any more."""
        run = self._run
        assert run is not None
        poll = select.poll()
        poll.register(run.done, select.POLLIN)
        poll.register(self.bell.wake, select.POLLIN)
        while True:
            ready = [fd for fd, _event in poll.poll(self._patience_ms())]
            if run.done in ready:
                self._note_end(run)
                return
            if not ready:
                if self._patience_ms():
                    continue
                self.timed_out = True
                return
            self._listen(run)
            if self.flows.failed:
                return

    def _patience_ms(self) -> float | None:
        if self.request.timeout_s is None:
            return None
        end = self.started + self.request.timeout_s + _GRACE_S
        return max(0.0, min(end - time.monotonic(), _LONGEST_S)) * 1000

    def _note_end(self, run: BackendExec) -> None:
        self.status = run.status()
        self.timed_out = self.status.timed_out

    def _listen(self, run: BackendExec) -> None:
        for number in self.bell.read():
            if number == signals.RESIZED:
                from .tty import size_of

                run.resize(*size_of(1, 0, 2))
            elif number == signals.STOP:
                self._stop_with_it()
            elif number in signals.PASSED_ON:
                self._pass_on(run, number)

    def _pass_on(self, run: BackendExec, number: int) -> None:
        """The first is the command's to handle; the second of a kind means it."""
        if number in self._seen and number not in signals.HARMLESS:
            run.kill()
            return
        self._seen.add(number)
        run.signal(number, group=number in signals.TO_THE_JOB)
        if number in signals.ENDING:
            # A command that stopped itself hears of it when it goes on, and else never.
            run.signal(_SIGCONT, group=number in signals.TO_THE_JOB)

    def _stop_with_it(self) -> None:
        """Ctrl-Z: the sandbox stops with us and goes on with us."""
        self.sandbox.suspend()
        if self._terminal:
            self._terminal.restore()
        os.kill(os.getpid(), _SIGSTOP)
        if self._terminal:
            self._terminal.enter()
        self.sandbox.resume()

    # -- when it has ended ----------------------------------------------------------------------

    def drain(self) -> None:
        """Pass on what is left in the pipes. Nothing in the sandbox is alive to add to it."""
        poll = select.poll()
        poll.register(self.bell.wake, select.POLLIN)
        while not self.flows.over and not self.flows.failed:
            before = self.flows.moved
            woken = poll.poll(_STALLED_S * 1000 if self.timed_out else None)
            if woken and signals.ENDING & set(self.bell.read()):
                return  # a signal now is for us: whoever reads takes too long
            if not woken and self.flows.moved == before:
                return

    def _conclude(self) -> int:
        failed = self.flows.failed
        if failed is not None:
            if failed.reader_gone:
                return READER_GONE
            say(f"{_stream_name(failed)}: {failed.error.strerror if failed.error else ''}")
            return OWN_FAILURE
        self.explain()
        return self.exit_code

    @property
    def ended_itself(self) -> bool:
        """True if the command ended with its own exit code, or could not be started (126, 127)."""
        return self.flows.failed is None and self.status is not None and self.status.signal is None

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def feed_note(self, write: Callable[[bytes], None]) -> None:
        """Write the message that a shell prints for 126 and 127."""
        if isinstance(self._run, DrivenExec) and self._run.note:
            write(self._run.note)

    def explain(self) -> None:
        """Say on stderr what the command cannot: who ended it, and what it was about."""
        self.feed_note(
            lambda note: say(note.decode("utf-8", "surrogateescape").removeprefix("ringfence: "))
        )
        if self.timed_out:
            after = f"{self.request.timeout_s:g} s"
            say(f"timed out after {after}; every process of the command was killed")
        elif self.status is not None and self.status.oom_killed:
            say("a process was killed: the sandbox reached its memory limit (raise --memory)")
        if self.sandbox.stats().forks_refused:
            say("no more processes could be started: the sandbox reached its limit (raise --pids)")

    @property
    def exit_code(self) -> int:
        """The exit code as a shell reports it; 124 for a timeout."""
        if self.timed_out:
            return TIMED_OUT
        if self.status is None:
            return OWN_FAILURE
        if self.status.signal is not None:
            return 128 + self.status.signal
        return self.status.exit_code or 0


def _stream_name(flow: Flow) -> str:
    return "standard error" if flow.target == 2 else "standard output"
