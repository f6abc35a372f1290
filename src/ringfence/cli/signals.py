"""Signals to `ringfence run`: heard from the start, passed on once the command runs.

Nothing is ever raised from a handler: an exception there is lost when it comes at the wrong moment
(inside the import system, for one). A handler only rings a bell, which whoever waits listens to.
"""

from __future__ import annotations

import _signal as signal
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PASSED_ON = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
# Signals that a terminal sends to a whole job; the others go to the command alone.
TO_THE_JOB = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# Signals that may arrive often and do not ask for an end.
HARMLESS = (signal.SIGUSR1, signal.SIGUSR2)
ENDING = frozenset(PASSED_ON) - frozenset(HARMLESS)
RESIZED, STOP = signal.SIGWINCH, signal.SIGTSTP


class Bell:
    """A pipe that tells a poll of what happened: a signal by its number, anything else by 0."""

    def __init__(self) -> None:
        self.wake, self._ring = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._heard: set[int] = set()
        self._nobody_listens = True

    def hear_signals(self) -> None:
        """From now on signals ring. What the caller had us ignore stays ignored."""
        signal.set_wakeup_fd(self._ring, warn_on_full_buffer=False)
        for number in PASSED_ON:
            self._hear(number)

    def hear_the_terminal(self, *, resized: bool) -> None:
        """Ctrl-Z rings as well, and a new size where asked for; reading in the background waits."""
        self._nobody_listens = False
        self._hear(STOP)
        if resized:
            self._hear(RESIZED)
        # It would stop us, although the command may not even read.
        signal.signal(signal.SIGTTIN, signal.SIG_IGN)

    def _hear(self, number: int) -> None:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: Any) -> None:
        """The pipe has been told already. Asked twice before there is anybody to listen, we go."""
        if self._nobody_listens and number in self._heard:
            os._exit(128 + number)  # the zygote ends what was begun, and clears up
        self._heard.add(number)

    def ring(self) -> None:
        """Wake whoever polls; from any thread."""
        try:
            os.write(self._ring, b"\0")
        except OSError:
            pass  # full: it will wake up anyway

    def read(self) -> bytes:
        """Read the signals received since the last call; one byte each."""
        try:
            return os.read(self.wake, 512)
        except BlockingIOError:
            return b""
