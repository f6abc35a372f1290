"""Saved state for hibernation: a PID 1 at the point where it can take over from any hibernating
one.

A process of its own runs this once and stops itself, and its memory is saved. A PID 1 that resumes
continues after that line.

Kept separate: it is a program's entry point, named in the text that starts it.
"""

from __future__ import annotations

import _signal as signal
import gc
import posix as os

from .. import wire
from ..pid1 import idle_pages, init
from . import hibernation

_CODE_FD = 3  # where a process image finds its code; this one has it from files


def main() -> None:
    """Get ready, be kept, and serve as PID 1."""
    os.close(_CODE_FD)
    idle_pages.learn()
    gc.freeze()
    os.kill(os.getpid(), signal.SIGSTOP)
    plan, control = hibernation.wake(), wire.adopt(hibernation.CONTROL)
    held = hibernation.SIGNAL, hibernation.OOM_SCORE, hibernation.IO, hibernation.LISTENER
    init.Init(
        plan, control, *held, apart=hibernation.apart(plan), hibernate=hibernation.hibernate
    ).run()
    os._exit(0)
