"""Signals to `ringfence run`: first they end the start, then they are passed on."""

from __future__ import annotations

import _signal as signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

PASSED_ON = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
# What a terminal sends to a whole job; the others are for the command itself.
TO_THE_JOB = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
RESIZED, STOP, BACKGROUND_READ = signal.SIGWINCH, signal.SIGTSTP, signal.SIGTTIN


class Interrupted(BaseException):
    """A signal came while nothing could be passed on."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def interrupt() -> None:
    """From now on a signal raises `Interrupted`. What the caller had us ignore stays ignored."""
    for number in PASSED_ON:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _raise)


def ring(bell: int, more: Sequence[int] = ()) -> None:
    """From now on a signal writes its number to `bell`."""
    signal.set_wakeup_fd(bell, warn_on_full_buffer=False)
    for number in (*PASSED_ON, *more):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _note)


def ignore(number: int) -> None:
    """Take no notice of a signal."""
    signal.signal(number, signal.SIG_IGN)


def _raise(number: int, _frame: Any) -> None:
    for each in PASSED_ON:
        signal.signal(each, _note)  # clean up in peace
    raise Interrupted(number)


def _note(_number: int, _frame: Any) -> None:
    """The wakeup descriptor has been told."""
