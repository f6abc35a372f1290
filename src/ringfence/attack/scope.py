"""Which probes say something of a backend: with a kernel of the guest's own, some only describe that.

They are counted by name, with the reason, and never as held.
"""

from __future__ import annotations

import os
from fnmatch import fnmatchcase

from ..backends.local.host.mountinfo import masks_of_proc

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
    "resources.pending-signals": _LIMITS,
    "resources.raise-processes": _LIMITS,
    "resources.real-time": _LIMITS,
    "resources.terminals": _LIMITS,
}
# A machine that is kept waiting does not see the time pass for others: its clocks tell nothing.
_NOT_OF_MACHINES = {
    "files.lease": "it is the guest's kernel's alone: whoever opens the file on the host asks another",
    "resources.processor-hog": "it reads the guest's clocks: the host bounds and counts the emulator",
}

_NO_NAMESPACES = "the landlock backend reports it as missing: it has no namespaces"
_NO_MOUNTS = "the landlock backend reports it as missing: the root is the host's"
_PROC = "the landlock backend reports it as degraded: the host's /proc can be read"
_NO_PROTECTION = "the landlock backend refuses a writable mount with protected paths in it"
_NO_QUOTA = "the landlock backend reports it as missing: nothing bounds what is written to the disk"
_NO_TERMINAL = "its programs can make no terminal; tests try the one of `pty=`"
_NO_OTHERS = "the landlock backend has one user"
_TERMINALS = ("tiocsti", "tioclinux", "tiocsetd", "tioccons", "tiocvhangup")
# Declared lacks: `docs/how-to/without-namespaces.md` lists what follows from each.
_NOT_OF_LANDLOCK = {
    "identity.namespace-*": _NO_NAMESPACES,
    "identity.not-host-root": "the landlock backend reports it as missing: it maps no ids",
    "identity.neighbour-host-id": "the landlock backend reports it as missing: it maps no ids",
    "identity.every-process-locked-down": _NO_NAMESPACES,
    "syscalls.namespaces-left": "the landlock backend reports it as degraded: a filter alone refuses",
    "devices_proc.proc-writable": "it asks for a mount: Landlock refuses to write, see any-setting",
    "devices_proc.masked-files": _PROC,
    "devices_proc.host-processes": _NO_NAMESPACES,
    "devices_proc.init-is-ours": _NO_NAMESPACES,
    "devices_proc.dangerous-devices": "it looks for names: Landlock refuses to open them",
    "devices_proc.host-terminals": "it looks for names: Landlock refuses to open them",
    "devices_proc.kernel-file-systems": _NO_MOUNTS,
    "files.protected-*": _NO_PROTECTION,
    "files.live-mount-protected": _NO_PROTECTION,
    "resources.disk-filler": _NO_QUOTA,
    "resources.inode-filler": _NO_QUOTA,
    "resources.download-sparse": _NO_QUOTA,
    **dict.fromkeys((f"syscalls.{name}" for name in _TERMINALS), _NO_TERMINAL),
    "lifecycle.neighbour-processes": _NO_NAMESPACES,
    "leaks.mount-sources": "the landlock backend shows a mount at its own path",
    "files.secret-visible": "the landlock backend reports it as missing: names and sizes show",
    "files.old-root": _NO_MOUNTS,
    "files.mount-flags": _NO_MOUNTS,
    "files.shared-lock": "the landlock backend reports it: files that are shown can be locked",
    "ipc.object-list": _PROC,
    "ipc.passed-by-netlink": _PROC,
    "network.host-connections": _PROC,
    "network.take-listener": "the policy's listener is at an address that the agent binds for no program",
    "leaks.resolver": "it shows /etc/hosts where that names this host alone, and no list of resolvers",
    "leaks.environment-names": "TMPDIR tells where a /tmp of the sandbox's own is",
    "leaks.host-name": _NO_NAMESPACES,
    "leaks.machine-id": "it looks for names: Landlock refuses to open them",
    "leaks.user-name": "programs need the name of their user, which is one of the host",
    "leaks.control-group-path": _PROC,
    "leaks.boot-id": _PROC,
    "leaks.kernel-command-line": _PROC,
    "lifecycle.init-without-handlers": _NO_NAMESPACES,
    "lifecycle.other-user-*": _NO_OTHERS,
    "resources.inotify-watches": "it reads the user's limit: the filter refuses inotify itself",
}

_NO_RIGHTS = "it takes CAP_SETPCAP, which an ordinary user lacks: no_new_privs makes it moot"
_SAMPLED = "the landlock backend reports it as degraded: without a cgroup processes are sampled"
_NOT_OF_LANDLOCK_USERS = {
    "identity.capabilities-bounding": _NO_RIGHTS,
    "identity.securebits": _NO_RIGHTS,
    "identity.exclusive-host-id": "the landlock backend reports it as missing: it maps no ids",
    "resources.fork-bomb": _SAMPLED,
    "resources.thread-bomb": _SAMPLED,
}
_READ_ONLY = "the landlock backend refuses a writable mount where root starts it"
_NOT_OF_LANDLOCK_ROOT = dict.fromkeys(
    (
        *("ipc.socket-in-writable-mount-*", "files.owner-of-new-files", "files.set-id-file-*"),
        *("files.upload-swapped", "files.download-swapped", "files.planted-link"),
        "ipc.socket-of-own",
    ),
    _READ_ONLY,
)

_BORROWED = "the native backend reports it as degraded: its /proc is its caller's"
_CALLERS_INIT = f"{_BORROWED}, and PID 1 there is none of the sandbox's"
_READ_ONLY_SETTINGS = (
    "the native backend reports it as degraded: /proc/sys is read-only where it starts"
)
_NOT_OF_BORROWED_PROC = {
    "devices_proc.host-processes": _BORROWED,
    "devices_proc.init-is-ours": _CALLERS_INIT,
    "lifecycle.neighbour-processes": _BORROWED,
    "lifecycle.init-without-handlers": _CALLERS_INIT,
    "identity.every-process-locked-down": _BORROWED,
    "resources.inotify-*": _READ_ONLY_SETTINGS,
    "syscalls.namespaces-left": _READ_ONLY_SETTINGS,
}


def why_not(probe: str, backend: str) -> str:
    """Why a probe says nothing of that backend; "" where it does."""
    machines = _NOT_OF_MACHINES if backend == "microvm" else {}
    reasons = {**_NOT_OF_OWN_KERNELS, **machines} if backend in OWN_KERNEL else {}
    if backend == "landlock":
        own = _NOT_OF_LANDLOCK_USERS if os.geteuid() else _NOT_OF_LANDLOCK_ROOT
        reasons = {**_NOT_OF_LANDLOCK, **own}
    if backend == "native" and masks_of_proc():
        reasons = _NOT_OF_BORROWED_PROC
    found = (why for name, why in reasons.items() if fnmatchcase(probe, name))
    return next(found, "")
