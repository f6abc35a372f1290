"""Kinds of system calls that a sandbox can be without, and one call each to try.

The arguments are such that a call that is let through fails all the same, in another way: with bad
addresses, ids that nobody has, descriptors that are not open. So trying them changes nothing.
"""

from __future__ import annotations

import errno
import os

REFUSED = frozenset({errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EAFNOSUPPORT})
"""Errors that count as refusal: from a filter, or from a kernel that refuses this process
anyway.
"""

_NOBODY = 0x7FFFFFF0  # above PID_MAX_LIMIT, include/linux/threads.h
_AF_ALG, _AF_VSOCK, _SOCK_SEQPACKET = 38, 40, 5  # include/linux/socket.h

CALLS: dict[str, tuple[str, tuple[int, ...]]] = {
    "asynchronous_io_rings": ("io_uring_setup", (0, 0)),
    "bpf": ("bpf", (0, 0, 0)),
    "clock_setting": ("clock_settime", (0, 0)),
    "file_handles": ("open_by_handle_at", (-1, 0, 0)),
    "kernel_comparison": ("kcmp", (_NOBODY, _NOBODY, 0, 0, 0)),
    "kernel_crypto_sockets": ("socket", (_AF_ALG, _SOCK_SEQPACKET, 0)),
    "kernel_log": ("syslog", (3, 0, -1)),
    "kernel_modules": ("init_module", (0, 0, 0)),
    "kernel_replacement": ("kexec_load", (0, 0, 0, 0)),
    "keyrings": ("keyctl", (-1, 0, 0, 0, 0)),
    "memory_of_others": ("process_vm_readv", (_NOBODY, 0, 0, 0, 0, 0)),
    "mounting": ("mount", (0, 0, 0, 0, 0)),
    "namespaces": ("setns", (-1, 0)),
    "performance_counters": ("perf_event_open", (0, _NOBODY, -1, -1, 0)),
    "quotas": ("quotactl", (-1, 0, 0, 0)),
    "reboot": ("reboot", (0, 0, 0, 0)),
    "root_directory": ("pivot_root", (0, 0)),
    "swap": ("swapoff", (0,)),
    "tracing": ("ptrace", (17, _NOBODY, 0, 0)),  # PTRACE_DETACH
    "user_faults": ("userfaultfd", (_NOBODY,)),
    "vsock_sockets": ("socket", (_AF_VSOCK, _SOCK_SEQPACKET, 0)),
}
"""Category to a system call and its arguments."""


def numbered(machine: str | None = None) -> dict[str, tuple[int, tuple[int, ...]]]:
    """The calls by number; those that this machine does not have are left out."""
    from .seccomp import MACHINES

    numbers = MACHINES[machine or os.uname().machine].numbers
    return {
        category: (numbers[name], arguments)
        for category, (name, arguments) in CALLS.items()
        if name in numbers
    }
