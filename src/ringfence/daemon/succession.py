"""Handover between daemons: asks the holder of a state directory to leave, or to end."""

from __future__ import annotations

import fcntl
import os
import select
import signal

from ..backends.registry import end_what_outlives
from ..errors import StateInUse
from ..store.directory import LOCK, holder_of

LEAVE = signal.SIGUSR1
_PATIENCE_S = 30.0


def stop(state_dir: str) -> bool:
    """End the daemon of a state directory, and what outlived one; whether there was anything.

    Raises:
        StateInUse: It does not end.
    """
    told = _tell(state_dir, signal.SIGTERM)
    left = os.path.isdir(state_dir) and end_what_outlives(state_dir)
    return told or left


def take_over(state_dir: str) -> bool:
    """Have the daemon of a state directory leave its sandboxes to the next one; whether there was one.

    Raises:
        StateInUse: It does not end.
    """
    return _tell(state_dir, LEAVE)


def is_held(state_dir: str) -> bool:
    """Return whether a daemon holds a state directory; it may still be starting, or ending."""
    pidfd = _holder(state_dir)
    if pidfd >= 0:
        os.close(pidfd)
    return pidfd >= 0


def _tell(state_dir: str, signum: int) -> bool:
    pidfd = _holder(state_dir)
    if pidfd < 0:
        return False
    try:
        signal.pidfd_send_signal(pidfd, signum)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(_PATIENCE_S * 1000):
            raise StateInUse(f"the server of {state_dir} did not stop in time", field="state_dir")
    except ProcessLookupError:
        pass  # it was about to
    finally:
        os.close(pidfd)
    return True


def _holder(state_dir: str) -> int:
    """A pidfd of the process that holds the lock; -1 when nobody does."""
    try:
        fd = os.open(os.path.join(state_dir, LOCK), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return -1
    try:
        pid, is_its_own = holder_of(fd)
        if not is_its_own:
            return -1  # copied from another directory: that daemon is none of ours
        pidfd = os.pidfd_open(pid)
        # Asked once it is pinned: who holds the lock now is who wrote that number.
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return pidfd
        os.close(pidfd)
        return -1
    except (ValueError, ProcessLookupError):
        return -1
    finally:
        os.close(fd)
