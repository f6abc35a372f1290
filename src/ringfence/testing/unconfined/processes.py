"""Processes of one scope, found by a variable of their environment, as no cgroup holds them together.

A process that clears its environment and leaves its session escapes: nothing here is isolation.
"""

from __future__ import annotations

import os
import signal
import time

TAG = "RINGFENCE_UNCONFINED"
"""Its value is a scope: `DIRECTORY/SANDBOX/EXEC/`, so that a prefix finds all below it."""


def members(scope: str) -> set[int]:
    """List the live processes of `scope`; a zombie has no environment any more."""
    wanted = os.fsencode(f"\0{TAG}={scope}")
    return {int(name) for name in os.listdir("/proc") if name.isdecimal() and _has(name, wanted)}


def send_all(scope: str, signum: signal.Signals) -> None:
    """Send SIGKILL or SIGSTOP to every process of `scope`, and to those that start meanwhile.

    During execve(2) a process has no environment for an instant: two looks in a row must find none.
    """
    stopped: set[int] = set()
    empty = 0
    while empty < 2:
        found = send(scope, signum) - stopped
        empty = 0 if found else empty + 1
        if signum == signal.SIGSTOP:
            stopped |= found
        elif found:
            time.sleep(0.001)


def send(scope: str, signum: signal.Signals) -> set[int]:
    """Send a signal to the processes of `scope` that are there now, and return them."""
    wanted = os.fsencode(f"\0{TAG}={scope}")
    found = members(scope)
    for pid in found:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if _has(str(pid), wanted):  # else the number is another process's by now
                signal.pidfd_send_signal(pidfd, signum)
        except ProcessLookupError:
            pass
        finally:
            os.close(pidfd)
    return found


def _has(pid: str, wanted: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return wanted in b"\0" + file.read()
    except OSError:  # another user's, or it has ended
        return False
