"""Attacks of a process on the sandbox's own life. Timeouts and residue: outside/lifecycle.py."""

from __future__ import annotations

import os
import signal

from .kit import Outcome, escaped, held, probe, read, status_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_HOSTS_OWN = "none: PID 1 of the host must not be signalled"


@probe("lifecycle.signal-init", "high", _HOSTS_OWN)
def signal_init(_context: dict[str, Any]) -> Outcome:
    """PID 1 must survive every signal from inside."""
    if status_of(1).get("Name") != "ringfence-init":
        return held("PID 1 is not a sandbox's: left alone")
    before = _start_time()
    for number in range(1, 65):
        try:
            os.kill(1, number)
        except OSError:
            continue
    if _start_time() != before:
        return escaped("PID 1 is another one now")
    state = status_of(1).get("State", "?")
    return (
        escaped(f"PID 1 is {state}")
        if state[:1] in "TZX"
        else held(f"64 signals, PID 1 is {state}")
    )


def _start_time() -> bytes:
    return read("/proc/1/stat").rpartition(b")")[2].split()[19]


@probe("lifecycle.init-without-handlers", "high", _HOSTS_OWN)
def init_without_handlers(_context: dict[str, Any]) -> Outcome:
    """PID 1 must have no handler: the kernel drops only signals for which it has none."""
    caught = int(status_of(1).get("SigCgt", "0"), 16)
    numbers = [n for n in range(1, 65) if caught >> n - 1 & 1 and n not in (32, 33)]
    if not numbers:
        return held("PID 1 catches nothing")
    return escaped(f"PID 1 catches {', '.join(signal.Signals(n).name for n in numbers)}")


@probe("lifecycle.init-parent", "medium", _HOSTS_OWN)
def init_parent(_context: dict[str, Any]) -> Outcome:
    """The parent of PID 1 must not be seen."""
    parent = status_of(1).get("PPid")
    return held("its parent is outside") if parent == "0" else escaped(f"its parent is {parent}")
