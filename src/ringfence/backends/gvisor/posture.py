"""Judges what the kernels say of one gVisor sandbox: one small check for each protection.

What cannot be read back is never claimed: the check then says degraded, and why.
"""

from __future__ import annotations

import datetime
import os

from ...model import capabilities as can
from ...model.capabilities import DEGRADED, ENFORCED, MISSING, Protection
from ..local.host.facts import host
from ..local.host.readback import cores, cpu_limit, memory_limit_bytes, pids_limit
from ..local.netns import of_network
from ..local.reports import UNREADABLE, read_all, unreadable
from . import views
from .inspection import Inspection
from .places import ROOTFS
from .runsc import KERNEL_BYTES, host_pids

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .sandbox import GvisorSandbox

    Check = Callable[[Inspection], Protection | None]

_NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
_OLD_DAYS = 365
DELEGATE = "start it as root, or run it under `systemd-run --user --scope -p Delegate=yes --`"
_PAGE = 4096


def read_posture(sandbox: GvisorSandbox) -> tuple[Protection, ...]:
    """Every protection of a live sandbox."""
    try:
        seen = Inspection(sandbox)
    except UNREADABLE as exc:
        return (unreadable("all", exc),)
    return read_all(_CHECKS, seen)


# -- the guest's kernel -------------------------------------------------------------------------


def _guest_kernel(seen: Inspection) -> Protection:
    """The guest asks another kernel: it says that it is another one than the host's."""
    guest = " ".join(seen.inside("/proc/version").split()[:3])
    if guest.endswith(os.uname().release):
        return Protection("guest_kernel", MISSING, f"the guest sees the host's: {guest}")
    version = seen.sandbox.program.version
    return Protection("guest_kernel", ENFORCED, f"gVisor {version}, which calls itself {guest}")


def _release(seen: Inspection) -> Protection:
    """How old the program is: its fixes are the boundary."""
    name, released = "gvisor_release", seen.sandbox.program.released
    fix = "install a current runsc from gvisor.dev; the first on PATH is used"
    try:
        day = datetime.datetime.strptime(str(released), "%Y%m%d").date()
    except ValueError:
        return Protection(name, DEGRADED, "its version has no release date", fix)
    age = (datetime.datetime.now(datetime.UTC).date() - day).days
    if age > _OLD_DAYS:
        return Protection(name, DEGRADED, f"of {day}: it lacks fixes released since then", fix)
    return Protection(name, ENFORCED, f"of {day}")


def _seccomp(seen: Inspection) -> Protection:
    """Second line: what the guest's kernel may ask of the host's."""
    loose = [p for p in (*seen.kernel, *seen.server) if not p.is_filtered]
    if loose or not seen.kernel or not seen.server:
        return Protection("seccomp", MISSING, f"no filter on {len(loose)} of gVisor's processes")
    count = len(seen.kernel) + len(seen.server)
    why = f"mode 2 on every thread of gVisor's {count} processes that a guest can reach"
    return Protection("seccomp", ENFORCED, why)


def _no_new_privs(seen: Inspection) -> Protection:
    everybody = (seen.launcher, *seen.kernel, *seen.server)
    if any(p.status["NoNewPrivs"] != "1" for p in everybody):
        return Protection("no_new_privs", MISSING, "NoNewPrivs is 0")
    return Protection(
        "no_new_privs", ENFORCED, f"NoNewPrivs is 1 in all {len(everybody)} processes"
    )


# -- the jail -----------------------------------------------------------------------------------


def _namespaces(seen: Inspection) -> Protection:
    shared = [
        name
        for name in _NAMESPACES
        if any(p.shares(name) for p in (seen.launcher, *seen.kernel, *seen.server))
    ]
    if shared:
        return Protection("namespaces", MISSING, f"shared with the host: {', '.join(shared)}")
    return Protection("namespaces", ENFORCED, f"its own {', '.join(_NAMESPACES)}")


def _host_identity(seen: Inspection) -> Protection:
    name = "host_identity"
    if any(first == 0 for first, _count in seen.host_ids):
        return Protection(name, MISSING, "an id of gVisor's is host root", "report this")
    if not host().trusted_root:
        return Protection(
            name, ENFORCED, "your own uid, the only one that may be mapped without root"
        )
    kernels = {process.uid for process in seen.kernel}
    if kernels & {process.uid for process in seen.server}:
        return Protection(name, DEGRADED, "the guest's kernel and its file server share an id")
    first, last = seen.host_ids[0][0], sum(seen.host_ids[-1]) - 1
    why = f"host ids {first} to {last}, which no other sandbox has; another for its file server"
    return Protection(name, ENFORCED, why)


def _host_files(seen: Inspection) -> Protection:
    """Check which host files the file server, and so the guest, can reach."""
    name = "read_only_mounts"
    asked = [m for m in seen.sandbox.mounts if m.access == "read_write" and m.host_path]
    own = {m.device for m in seen.mounts if m.target in ("/", ROOTFS)}
    shared = [m for m in seen.mounts if m.device not in own and m.kind != "proc"]
    writable = [m.target for m in shared if "ro" not in m.options]
    tops = [target for target in writable if target.count("/") == 2]
    if len(tops) > len(asked) or any(not t.startswith("/mounts/") for t in tops):
        return Protection(name, MISSING, f"writable: {', '.join(tops)}")
    read_only = sum("ro" in m.options for m in shared)
    return Protection(
        name, ENFORCED, f"{read_only} trees of the host, read-only by the host's kernel"
    )


def _own_pages(seen: Inspection) -> Protection:
    """Check from the jail's mounts whether page-cache pages of read-only files are the tenant's own
    or shared.
    """
    name, why = "own_pages", seen.sandbox.shares_pages
    if why:
        said = f"read-only host files share page-cache pages with all their readers: {why}"
        return Protection(name, DEGRADED, said, views.fix_of(why))
    asked = {m.target for m in seen.mounts if m.target.startswith("/mounts/")}
    below = [m for m in seen.mounts if m.target.startswith(f"{ROOTFS}/") and m.target not in asked]
    own = {m.device for m in seen.mounts if m.target in ("/", ROOTFS)}
    direct = [m.target for m in below if m.kind != "fuse" and m.device not in own]
    if direct:
        return Protection(name, MISSING, f"the host's own: {', '.join(direct)}", "report this")
    why = f"{len(below)} trees through this tenant's own file system; only runsc itself is shared"
    return Protection(name, ENFORCED, why)


def _protected_paths(seen: Inspection) -> Protection | None:
    steps = [s for part in seen.sandbox.protected for s in part.steps if s[0] == "protect"]
    if not any(m.access == "read_write" and m.host_path for m in seen.sandbox.mounts):
        return None
    below = [m for m in seen.mounts if m.target.startswith("/mounts/") and m.target.count("/") > 2]
    read_only = sum("ro" in m.options for m in below)
    if read_only < len(steps):
        return Protection("protected_paths", MISSING, f"{len(steps) - read_only} are writable")
    return Protection("protected_paths", ENFORCED, f"{len(steps)} paths in writable mounts")


def _network(seen: Inspection) -> Protection:
    sandbox, flags = seen.sandbox, seen.kernel[0].command if seen.kernel else []
    if sandbox.has_network and "--network=host" in flags and sandbox.network is not None:
        if not all(process.has_same("net", seen.launcher) for process in seen.kernel):
            return Protection("network", MISSING, "gVisor's network is not the one made for it")
        return of_network(seen.launcher.network, sandbox.network, sandbox.spec.network)
    names = {name for process in seen.kernel for name in process.interfaces}
    if names - {"lo"}:
        return Protection("network", MISSING, f"interfaces: {', '.join(sorted(names))}")
    if "--network=none" not in flags:
        return Protection("network", MISSING, "gVisor runs without --network=none")
    return Protection(
        "network", ENFORCED, "gVisor's own loopback, in a namespace with nothing but lo"
    )


# -- limits -------------------------------------------------------------------------------------


def _memory_limit(seen: Inspection) -> Protection:
    group, wanted = seen.sandbox.group, seen.sandbox.sizes.memory_bytes
    sampled = f"{_mib(wanted)} for the guest, sampled every 50 ms"
    if not group.version:
        return Protection(can.MEMORY_LIMIT, DEGRADED, f"{sampled}; {_no_cgroup(seen)}", DELEGATE)
    found = memory_limit_bytes(group)
    if found is None or found > wanted + KERNEL_BYTES + _PAGE:
        return Protection(can.MEMORY_LIMIT, MISSING, f"the cgroup says {found}")
    why = f"{sampled}; {_mib(found)} with gVisor itself, by cgroup v{group.version}"
    return Protection(can.MEMORY_LIMIT, ENFORCED, why)


def _cpu_limit(seen: Inspection) -> Protection | None:
    if not seen.sandbox.spec.limits.cpus:
        return None
    found = cpu_limit(seen.sandbox.group)
    if found is None:
        return Protection(can.CPU_LIMIT, MISSING, _no_cgroup(seen), DELEGATE)
    version = seen.sandbox.group.version
    return Protection(can.CPU_LIMIT, ENFORCED, f"{cores(found)} by cgroup v{version}")


def _pids_limit(seen: Inspection) -> Protection:
    wanted, group = seen.sandbox.sizes.pids, seen.sandbox.group
    if seen.pids > wanted:
        return Protection(can.PIDS_LIMIT, MISSING, f"the guest's kernel says {seen.pids}")
    why = f"{seen.pids} by the guest's kernel"
    found = pids_limit(group)
    if found is None or found > host_pids(wanted) + 1:
        return Protection(can.PIDS_LIMIT, ENFORCED, why)
    return Protection(can.PIDS_LIMIT, ENFORCED, f"{why}; {found} of the host's by cgroup")


def _disk_quota(seen: Inspection) -> Protection:
    wanted = seen.sandbox.sizes.disk_bytes
    if not 0 < seen.disk_bytes <= wanted + _PAGE:
        return Protection(can.DISK_QUOTA, MISSING, f"the root holds {seen.disk_bytes} bytes")
    return Protection(can.DISK_QUOTA, ENFORCED, f"{_mib(seen.disk_bytes)}, the size of its tmpfs")


def _inode_quota(seen: Inspection) -> Protection:
    if not 0 < seen.inodes <= seen.sandbox.sizes.inodes:
        return Protection(can.INODE_QUOTA, MISSING, f"the root holds {seen.inodes} files")
    return Protection(
        can.INODE_QUOTA, ENFORCED, f"{seen.inodes} files and directories in its tmpfs"
    )


def _open_files_limit(seen: Inspection) -> Protection:
    if seen.open_files > seen.sandbox.sizes.open_files:
        return Protection(can.OPEN_FILES_LIMIT, MISSING, f"the guest says {seen.open_files}")
    return Protection(can.OPEN_FILES_LIMIT, ENFORCED, f"{seen.open_files} a process")


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.0f} MiB"


def _no_cgroup(seen: Inspection) -> str:
    why = seen.sandbox.owner.layout().why
    return f"no cgroup may be used: {why or 'its controller is not there'}"


_CHECKS: dict[str, Check] = {
    "guest_kernel": _guest_kernel,
    "gvisor_release": _release,
    "seccomp": _seccomp,
    "no_new_privs": _no_new_privs,
    "namespaces": _namespaces,
    "host_identity": _host_identity,
    "read_only_mounts": _host_files,
    "own_pages": _own_pages,
    "protected_paths": _protected_paths,
    "network": _network,
    can.MEMORY_LIMIT: _memory_limit,
    can.CPU_LIMIT: _cpu_limit,
    can.PIDS_LIMIT: _pids_limit,
    can.DISK_QUOTA: _disk_quota,
    can.INODE_QUOTA: _inode_quota,
    can.OPEN_FILES_LIMIT: _open_files_limit,
}
