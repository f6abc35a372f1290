"""Cleanup of a zygote left running by a killed process, and so of all its sandboxes.

A zygote ends by itself when its host process does, and its sandboxes with it. One that is stopped,
or slow, is killed here by a process that recorded its pid and start time.
"""

from __future__ import annotations

import _signal as signal
import os
import select

from ....errors import IsolationError
from ...local.host import owner

_BY_ITSELF_MS = 1000
_KILLED_MS = 10_000


def end(pid: int, started: int) -> bool:
    """End that very process and wait until it is gone; False, and no effect, when it was gone already.

    Its death kills PID 1 of every sandbox, and the kernel what is in them.

    Args:
        started: As `owner.start_time` said: a later process of that pid is left alone.

    Raises:
        IsolationError: It does not die.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False  # no such process
    try:
        # Looked up after it was pinned: the number cannot change hands in between.
        if owner.start_time(pid) != started:
            return False
        if _has_ended(pidfd, _BY_ITSELF_MS):
            return True
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        if not _has_ended(pidfd, _KILLED_MS):
            raise IsolationError(
                f"process {pid} of an earlier run does not end",
                hint="see /proc/PID/stack for the call that blocks it",
            )
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)
    return True


def _has_ended(pidfd: int, timeout_ms: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout_ms))
