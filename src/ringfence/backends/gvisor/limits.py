"""What gVisor itself takes, beyond what its guest may have."""

from __future__ import annotations

KERNEL_BYTES = 256 << 20  # the sentry and the gofer, with Go's idea of memory
_KERNEL_PIDS = 512
_EACH = 16  # each process of the guest is traced through threads of the host's, some for each of gVisor's


def host_pids(guest_pids: int) -> int:
    """How many processes and threads of the host's so many of the guest's may take."""
    return guest_pids * _EACH + _KERNEL_PIDS
