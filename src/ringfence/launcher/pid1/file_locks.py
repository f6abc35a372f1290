"""Limit on POSIX file locks, which the kernel neither charges to a memory limit nor counts per
user.

Each is 192 bytes, and one descriptor may have any number: a program makes 100,000 in a second. PID 1
looks while something runs, and ends who has too many. The list itself is read only where the kernel's
own memory has grown since: to read it stops all locking on the host for a moment.
"""

from __future__ import annotations

import posix as os
import time

from . import processes

_EVERY_S = 0.5
_FIRST_S = 0.05  # after something has begun to run: commands shorter than that pay nothing
# As text in /proc/locks, of 45 to 110 bytes each: 50,000 to 115,000 locks, 22 MB at most.
MOST_BYTES = 5 << 20
_GROWTH_KIB = 8 << 10
_MEMINFO, _PAGE = "/proc/meminfo", 4096


class FileLocks:
    """Watches over the locks of one sandbox.

    Args:
        keeps_open: The file that tells how much memory the kernel has stays open. For who has the memory limit
            of the programs: to open it takes memory, and while that of a killed program is still charged, who
            asks for any is alone at the limit, and killed for it (decision 346).
    """

    def __init__(self, *, keeps_open: bool = False) -> None:
        self._meminfo = -1
        if keeps_open and self._unreclaimable_kib():
            self._meminfo = os.open(_MEMINFO, os.O_RDONLY | os.O_CLOEXEC)
            self._unreclaimable_kib()  # which makes the kernel's buffer, that later reads use again
        self._due = 0.0  # when to look; 0: nothing runs
        self._kernel_kib = 0  # so much memory the kernel had when there were few

    def wait_s(self, *, is_busy: bool) -> float | None:
        """How soon to `look`; None: not before something runs."""
        if not is_busy:
            self._due = 0.0
            return None
        now = time.monotonic()
        if not self._due:
            self._due, self._kernel_kib = now + _FIRST_S, 0
        return max(0.0, self._due - now)

    def look(self) -> set[int]:
        """The pids of who has too many; none as long as it is not time to look."""
        now = time.monotonic()
        if not self._due or now < self._due:
            return set()
        kernel_kib, before_kib = self._unreclaimable_kib(), self._kernel_kib
        has_grown = 0 < before_kib <= kernel_kib - _GROWTH_KIB
        owners = owners_beyond(MOST_BYTES) if has_grown else set()
        if not owners and (has_grown or kernel_kib < before_kib or not before_kib):
            self._kernel_kib = kernel_kib
        self._due = time.monotonic() + max(_EVERY_S, 4 * (time.monotonic() - now))
        return owners

    def _unreclaimable_kib(self) -> int:
        """The host kernel's memory for objects of its own; 0: it is not told. Source: proc(5), meminfo."""
        kept = self._meminfo
        text = os.pread(kept, _PAGE, 0) if kept >= 0 else processes.read(_MEMINFO, _PAGE)
        for line in text.splitlines():
            if line.startswith(b"SUnreclaim:"):
                return int(line.split()[1])
        return 0


def owners_beyond(size: int) -> set[int]:
    """Return the pids holding locks beyond the first `size` bytes of this PID namespace's lock
    list.

    One read at a far offset makes the kernel walk the list once; reading up to there in pieces
    would walk it once for each. Source: fs/seq_file.c, traverse; proc(5), locks.
    """
    fd = os.open("/proc/locks", os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = os.pread(fd, 4096, size)
    finally:
        os.close(fd)
    # The first and last line may be cut. "1: POSIX ADVISORY WRITE 123 00:2f:45 0 EOF"; a waiter has
    # "->" after the number. Locks of an open file have no owner and are seen everywhere.
    lines = [line.split() for line in text.splitlines()[1:-1] if b"->" not in line]
    numbers = {int(words[4]) for words in lines if words[1:2] == [b"POSIX"] and int(words[4]) > 0}
    return {pid for pid in map(processes.inner, numbers) if pid}
