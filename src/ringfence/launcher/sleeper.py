"""What is kept for those who sleep: a PID 1 that stands where it can take over from any of them.

A process of its own runs this once and stops itself, and its memory is written down. Each that
wakes up goes on behind that line.
"""

from __future__ import annotations

import _signal as signal
import gc
import posix as os

from . import asleep, init, rest, wire

_CODE_FD = 3  # where a still finds its code; this one has it from files


def main() -> None:
    """Get ready, be kept, and serve as PID 1."""
    os.close(_CODE_FD)
    rest.learn()
    gc.freeze()
    os.kill(os.getpid(), signal.SIGSTOP)
    plan, control = asleep.wake(), wire.adopt(asleep.CONTROL)
    held = asleep.SIGNAL, asleep.OOM_SCORE, asleep.IO, asleep.LISTENER
    init.Init(plan, control, *held, apart=asleep.apart(plan), sleep=asleep.fall).run()
    os._exit(0)
