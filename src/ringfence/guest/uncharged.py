"""Memory that the kernel still charges to processes that have ended, where the agent has the same limit.

The pages of a killed process stay charged for 5 to 30 ms after it was reaped (Linux 6.18), longer on a busy
host. The agent that asks for memory meanwhile is alone at the limit, and is killed for it. Under Docker 4
sandboxes of 3,300 were lost so, beside a load of 16. See decisions 148 and 343.
"""

from __future__ import annotations

import os
import time

# Of cgroup version 2, and of version 1: the container's own, as Docker and LXC show it.
_FILES = (
    ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.max"),
    (
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    ),
)
_ROOM_BYTES = 4 << 20
_PATIENCE_S, _EVERY_S = 0.5, 0.002
_PAUSE_S = 1.0  # between two waits, in which the agent does what else there is


class Uncharged:
    """Waits until there is room below a memory limit again.

    Args:
        files: Pairs of paths, of what is used and of the limit in bytes; the first that can be read counts.
    """

    def __init__(self, files: tuple[tuple[str, str], ...] = _FILES) -> None:
        self._fd, self._enough, self._next = -1, 0, 0.0
        for usage, limit in files:
            try:
                with open(limit, "rb") as file:
                    self._enough = int(file.read()) - _ROOM_BYTES
                self._fd = os.open(usage, os.O_RDONLY | os.O_CLOEXEC)
                self._used()  # which makes the kernel's buffer, that later reads use again
            except (OSError, ValueError):
                continue  # there is none, or no limit
            return

    def _used(self) -> int:
        return int(os.pread(self._fd, 32, 0))

    def wait(self) -> bool:
        """Wait for room, half a second at most and not again within a second; whether there is any."""
        if self._fd < 0 or self._used() <= self._enough:
            return True
        began = time.monotonic()
        if began < self._next:
            return False
        until = began + _PATIENCE_S
        while (is_full := self._used() > self._enough) and time.monotonic() < until:
            time.sleep(_EVERY_S)
        self._next = time.monotonic() + _PAUSE_S
        return not is_full


kept: Uncharged | None = None


def keep() -> None:
    """Open the files, before they are hidden."""
    global kept
    kept = Uncharged()


def wait() -> None:
    """Wait for memory of processes that the kernel has killed, where it has a limit of ours."""
    if kept is not None:
        kept.wait()
