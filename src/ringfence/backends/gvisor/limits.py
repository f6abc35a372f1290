"""Resources of gVisor itself, beyond the limits of its guest."""

from __future__ import annotations

KERNEL_BYTES = 256 << 20  # the sentry and the gofer, with Go's idea of memory
_KERNEL_PIDS = 4096


def host_pids(guest_pids: int) -> int:
    """How many processes and threads of the host's so many of the guest's may take.

    gVisor runs each process of the guest in one of the host's, with a thread in it for each of its own
    threads that ever ran it, and keeps them for the next: in a fork bomb that is nearly the square.
    Where there are no more, gVisor as a whole ends: so this is for the host's sake alone.
    """
    return min(guest_pids * guest_pids + _KERNEL_PIDS, _most_of_the_host())


def _most_of_the_host() -> int:
    with open("/proc/sys/kernel/threads-max", encoding="ascii") as file:
        return int(file.read()) // 4
