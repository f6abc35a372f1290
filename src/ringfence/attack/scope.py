"""Which probes say something of a backend: with a kernel of the guest's own, some only describe that.

They are counted by name, with the reason, and never as held.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

OWN_KERNEL = ("gvisor", "microvm")

_CALLS = (
    "it reaches a kernel of the guest's own, which the host's cannot tell from any other program"
)
_IDENTITY = "it asks the guest's kernel for what the host's says: `protections()` reads it there"
_TREES = "it is the guest's kernel that shows it, of nothing but the guest"
_SOCKETS = "such a socket is the guest's kernel's alone, and leads nowhere"
_LIMITS = "it bounds what the guest's kernel hands out; the host bounds that kernel as a whole"
_NOT_OF_OWN_KERNELS = {
    "syscalls.*": _CALLS,
    "identity.capabilities-*": _IDENTITY,
    "identity.every-process-locked-down": _IDENTITY,
    "identity.exclusive-host-id": _IDENTITY,
    "identity.namespace-*": _IDENTITY,
    "identity.neighbour-host-id": _IDENTITY,
    "identity.no-new-privs": _IDENTITY,
    "identity.not-host-root": _IDENTITY,
    "identity.seccomp-mode": _IDENTITY,
    "identity.securebits": _IDENTITY,
    "devices_proc.any-setting": _TREES,
    "devices_proc.dangerous-devices": _TREES,
    "devices_proc.device-list": _TREES,
    "devices_proc.init-*": _TREES,
    "devices_proc.kernel-file-systems": _TREES,
    "devices_proc.own-files": _TREES,
    "devices_proc.proc-writable": _TREES,
    "devices_proc.sysfs": _TREES,
    "files.mount-flags": _TREES,
    "files.root-directory": _TREES,
    "files.shared-lock": _TREES,
    "leaks.control-group-path": _TREES,
    "leaks.kernel-command-line": _TREES,
    "network.socket-*": _SOCKETS,
    "network.unix-socket": _SOCKETS,
    "resources.core-dump": _LIMITS,
    "resources.inotify-instances": _LIMITS,
    "resources.inotify-watches": _LIMITS,
    "resources.memory-locks": _LIMITS,
    "resources.memory-netlink": _LIMITS,
    "resources.netlink-sockets": _LIMITS,
    "resources.memory-pipes": _LIMITS,
    "resources.memory-tcp": _LIMITS,
    "resources.memory-udp": _LIMITS,
    "resources.open-files": _LIMITS,
    "resources.raise-processes": _LIMITS,
    "resources.real-time": _LIMITS,
    "resources.terminals": _LIMITS,
}
# A machine that is kept waiting does not see the time pass for others: its clocks tell nothing.
_NOT_OF_MACHINES = {
    "files.lease": "it is the guest's kernel's alone: whoever opens the file on the host asks another",
    "resources.processor-hog": "it reads the guest's clocks: the host bounds and counts the emulator",
}


def why_not(probe: str, backend: str) -> str:
    """Why a probe says nothing of that backend; "" where it does."""
    if backend not in OWN_KERNEL:
        return ""
    machines = _NOT_OF_MACHINES if backend == "microvm" else {}
    reasons = {**_NOT_OF_OWN_KERNELS, **machines}
    found = (why for name, why in reasons.items() if fnmatchcase(probe, name))
    return next(found, "")
