"""Judges what the kernel says of one sandbox: one small check for each protection.

What cannot be read back is never claimed: the check then says degraded, and why.
"""

from __future__ import annotations

from ...linux.namespaces import parse_id_map
from ...model import capabilities as can
from ...model.capabilities import DEGRADED, ENFORCED, MISSING, Protection
from ...policy.landlock import plan_landlock
from ..local.host import cgroups
from ..local.host.facts import host
from ..local.host.identity import IDS_EACH
from ..local.host.mountinfo import read_text
from ..local.host.readback import cores, cpu_limit, memory_limit_bytes, memory_said, pids_limit
from ..local.netns import of_network
from ..local.reports import read_all
from ..local.sizes import DEFAULT_TERMINALS
from . import connecting
from .attach import may_reach_sockets
from .inspection import Inspection

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Check = Callable[[Inspection], Protection | None]

_CAPABILITY_SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
_NAMESPACES = {
    "mount": "mnt",
    "pid": "pid",
    "ipc": "ipc",
    "uts": "uts",
    "cgroup": "cgroup",
    "user": "user",
}
_KERNEL_TREES = (
    "sysfs",
    "cgroup",
    "cgroup2",
    "debugfs",
    "securityfs",
    "tracefs",
    "bpf",
    "configfs",
)
_LANDLOCK_EXPECTED = 6  # scopes signals and abstract sockets: Linux 6.12
DELEGATE = "start it as root, or run it under `systemd-run --user --scope -p Delegate=yes --`"
_PAGE = 4096


def read_posture(seen: Inspection) -> tuple[Protection, ...]:
    """Every protection of a live sandbox."""
    return read_all(_CHECKS, seen)


# -- identity ---------------------------------------------------------------------------------


def _namespaces(seen: Inspection) -> Protection:
    shared = [name for name, short in _NAMESPACES.items() if not seen.has_own_namespace(short)]
    if shared:
        return Protection("namespaces", MISSING, f"shared with the host: {', '.join(shared)}")
    return Protection("namespaces", ENFORCED, f"its own {', '.join(_NAMESPACES)}")


def _host_identity(seen: Inspection) -> Protection:
    name = "host_identity"
    outside = [(first, count) for _inside, first, count in seen.id_map("uid_map")]
    if any(first == 0 for first, _count in outside):
        return Protection(
            name, MISSING, "an id inside is host root", "report this: it must not happen"
        )
    if seen.id_map("uid_map") != parse_id_map(seen.sandbox.lockdown["uid_map"]):
        return Protection(name, MISSING, "other ids are mapped than were planned", "report this")
    slot = seen.sandbox.first_host_id
    if not slot:
        return Protection(name, ENFORCED, "your own uid, and no other")
    theirs = f"host ids {slot} to {slot + IDS_EACH - 1}, which no other sandbox has"
    if host().trusted_root:
        return Protection(name, ENFORCED, theirs)
    return Protection(
        name, ENFORCED, f"your own uid as uid {seen.sandbox.uid} inside, and {theirs}"
    )


def _capabilities(seen: Inspection) -> Protection:
    of_root = seen.sandbox.profile.root_capabilities
    own = {} if seen.sandbox.uid else dict.fromkeys(("CapPrm", "CapEff", "CapBnd"), of_root)
    kept = [n for n in _CAPABILITY_SETS if int(seen.status[n], 16) & ~own.get(n, 0)]
    if kept:
        return Protection("capabilities", MISSING, f"not empty: {', '.join(kept)}")
    if of_root:
        why = f"root inside has rights ({of_root:#x}) over the sandbox's own users and files"
        return Protection("capabilities", DEGRADED, why, _profile_fix(seen))
    return Protection("capabilities", ENFORCED, "all five sets are empty")


def _no_new_privs(seen: Inspection) -> Protection:
    if seen.status["NoNewPrivs"] != "1":
        return Protection("no_new_privs", MISSING, "NoNewPrivs is 0")
    return Protection("no_new_privs", ENFORCED, "NoNewPrivs is 1")


def _nested_user_namespaces(seen: Inspection) -> Protection:
    name = "nested_user_namespaces"
    limit = seen.inside("/proc/sys/user/max_user_namespaces").strip()
    if limit == "0":
        return Protection(name, ENFORCED, "user.max_user_namespaces is 0 inside")
    return Protection(
        name, MISSING, f"user.max_user_namespaces is {limit} inside", _profile_fix(seen)
    )


# -- system calls -----------------------------------------------------------------------------


def _seccomp(seen: Inspection) -> Protection:
    mode, count = seen.status["Seccomp"], seen.status.get("Seccomp_filters", "?")
    if mode != "2" or not seen.sandbox.profile.seccomp:
        return Protection(
            "seccomp", MISSING, f"mode {mode}, without our filter", _profile_fix(seen)
        )
    if seen.sandbox.profile.tracing:
        return Protection(
            "seccomp", DEGRADED, "ptrace and process_vm_* are allowed", _profile_fix(seen)
        )
    return Protection(
        "seccomp", ENFORCED, f"mode 2, {count} filter{'s' if count != '1' else ''}, default deny"
    )


def _landlock(seen: Inspection) -> Protection:
    sandbox, abi = seen.sandbox, host().landlock_abi
    if not sandbox.profile.landlock:
        return Protection("landlock", MISSING, "switched off", _profile_fix(seen))
    plan = plan_landlock(abi, writable=sandbox.landlock_writable)
    fix = "boot with `landlock` in lsm=" if abi == 0 else "a newer kernel"
    if plan.is_empty:
        return Protection("landlock", DEGRADED, "; ".join(plan.missing), fix)
    if abi < _LANDLOCK_EXPECTED:
        return Protection("landlock", DEGRADED, f"ABI {abi} lacks: {'; '.join(plan.missing)}", fix)
    lacks = f"; missing: {'; '.join(plan.missing)}" if plan.missing else ""
    return Protection("landlock", ENFORCED, f"ABI {abi}{lacks}")


def _unix_sockets(seen: Inspection) -> Protection:
    sandbox, name = seen.sandbox, "unix_sockets"
    if not sandbox.unix_sockets:
        lacks = connecting.why_not()
        why = f"; for PID 1 to connect instead, this host lacks {lacks}" if lacks else ""
        return Protection(
            name, ENFORCED, f"cannot be opened: a host directory is mounted, and may hold some{why}"
        )
    if sandbox.lockdown["connects"]:
        return Protection(
            name, ENFORCED, "only those made inside: PID 1 makes each connection; no datagrams"
        )
    if sandbox.host_directory and sandbox.profile.unix_sockets:
        return Protection(
            name, MISSING, "sockets in mounted host directories can be reached", _profile_fix(seen)
        )
    if sandbox.host_directory and may_reach_sockets(sandbox):
        why = "sockets that the host makes later in an attached directory can be reached"
        fix = "give the mount when the sandbox is created: it then has no unix sockets"
        return Protection(name, DEGRADED, why, fix)
    return Protection(name, ENFORCED, "only those made inside can be reached")


def _profile_fix(seen: Inspection) -> str:
    return f"profile {seen.sandbox.profile.name!r} was asked for; use os_hardened"


# -- files ------------------------------------------------------------------------------------


def _root_file_system(seen: Inspection) -> Protection:
    name = "root_file_system"
    root = seen.mount_at("/")
    if root is None or root.kind != "tmpfs" or not {"nosuid", "nodev"} <= root.options:
        return Protection(name, MISSING, "the root is not a private tmpfs")
    loose = [m.target for m in seen.mounts if "nosuid" not in m.options]
    if loose:
        return Protection(name, MISSING, f"set-user-id programs work in {', '.join(loose)}")
    return Protection(name, ENFORCED, "a private tmpfs; no mount honours set-user-id")


def _read_only_mounts(seen: Inspection) -> Protection:
    name = "read_only_mounts"
    shared = [m for m in seen.mounts if m.is_of_the_host(seen.root_device)]
    asked = [m.target for m in seen.sandbox.mounts if m.access == "read_write"]
    writable = [
        m.target for m in shared if "ro" not in m.options and not _is_below(m.target, asked)
    ]
    if writable:
        return Protection(name, MISSING, f"writable: {', '.join(writable)}")
    read_only = sum("ro" in m.options for m in shared)
    return Protection(name, ENFORCED, f"{read_only} trees of the host, read-only by the kernel")


def _protected_paths(seen: Inspection) -> Protection | None:
    steps = [
        step[1] for part in seen.sandbox.protected for step in part.steps if step[0] == "protect"
    ]
    if not any(m.access == "read_write" and m.host_path for m in seen.sandbox.mounts):
        return None
    writable = [target for target in steps if not _is_read_only(seen, target)]
    if writable:
        return Protection("protected_paths", MISSING, f"writable: {', '.join(writable)}")
    return Protection("protected_paths", ENFORCED, f"{len(steps)} paths in writable mounts")


def _is_below(path: str, trees: list[str]) -> bool:
    return any(path == tree or path.startswith(tree + "/") for tree in trees)


def _is_read_only(seen: Inspection, target: str) -> bool:
    found = seen.mount_at(target)
    return found is not None and "ro" in found.options


def _kernel_interfaces(seen: Inspection) -> Protection:
    name = "kernel_interfaces"
    proc = seen.mount_at("/proc")
    if proc is None or "ro" not in proc.options:
        return Protection(name, MISSING, "/proc is writable")
    shown = [m.target for m in seen.mounts if m.kind in _KERNEL_TREES]
    if shown:
        return Protection(name, MISSING, f"shown: {', '.join(shown)}")
    return Protection(name, ENFORCED, "its own /proc, read-only and masked; no /sys")


# -- network ----------------------------------------------------------------------------------


def _network(seen: Inspection) -> Protection:
    if not seen.has_own_namespace("net"):
        return Protection(
            "network", MISSING, "the host's own network, asked for by name", "--net none"
        )
    return of_network(seen.network, seen.sandbox.network, seen.sandbox.spec.network)


# -- limits -----------------------------------------------------------------------------------


def _memory_limit(seen: Inspection) -> Protection:
    group, wanted, name = seen.sandbox.group, seen.sandbox.sizes.memory_bytes, can.MEMORY_LIMIT
    if not group.version:
        left_out = "what sockets hold"
        if seen.sandbox.first_host_id:
            left_out += " and what others than its first user have in memfd_create(2)"
        how = f"sampled every 50 ms, {left_out} left out, and RLIMIT_DATA"
        why = f"{_mib(wanted)}: {how}; {_no_cgroup(seen)}"
        return Protection(name, DEGRADED, why, DELEGATE)
    found = memory_limit_bytes(group)
    if found is None or found > wanted + _PAGE:
        return Protection(name, MISSING, f"the cgroup says {found}, not {wanted}")
    return Protection(name, ENFORCED, f"{_mib(found)} {memory_said(group, found)}")


def _cpu_limit(seen: Inspection) -> Protection | None:
    wanted = seen.sandbox.spec.limits.cpus
    if not wanted:
        return None
    found = cpu_limit(seen.sandbox.group)
    if found is None:
        return Protection(can.CPU_LIMIT, MISSING, _no_cgroup(seen), DELEGATE)
    return Protection(
        can.CPU_LIMIT, ENFORCED, f"{cores(found)} by cgroup v{seen.sandbox.group.version}"
    )


def _pids_limit(seen: Inspection) -> Protection:
    group, wanted = seen.sandbox.group, seen.sandbox.sizes.pids + cgroups.OWN_PROCESSES
    hard = seen.limit("Max processes")
    found = pids_limit(group)
    if found is not None and found <= wanted:
        why = f"{found - cgroups.OWN_PROCESSES} by cgroup v{group.version}"
        return Protection(can.PIDS_LIMIT, ENFORCED, why)
    if hard.isdigit() and int(hard) <= wanted and seen.sandbox.first_host_id:
        why = f"{int(hard) - cgroups.OWN_PROCESSES} for each user inside by RLIMIT_NPROC"
        why += "; of all together sampled, and more end the sandbox"
        return Protection(can.PIDS_LIMIT, DEGRADED, why, DELEGATE)
    if hard.isdigit() and int(hard) <= wanted:
        why = f"{int(hard) - cgroups.OWN_PROCESSES} by RLIMIT_NPROC, counted for this user namespace alone"
        return Protection(can.PIDS_LIMIT, ENFORCED, why)
    return Protection(can.PIDS_LIMIT, MISSING, f"the kernel says {hard}, not {wanted}")


def _disk_quota(seen: Inspection) -> Protection:
    size, wanted = seen.disk()[0], seen.sandbox.sizes.disk_bytes
    if not 0 < size <= wanted + _PAGE:
        return Protection(
            can.DISK_QUOTA, MISSING, f"the file system holds {size} bytes, not {wanted}"
        )
    return Protection(can.DISK_QUOTA, ENFORCED, f"{_mib(size)}, the size of its tmpfs")


def _inode_quota(seen: Inspection) -> Protection:
    count, wanted = seen.disk()[1], seen.sandbox.sizes.inodes
    if not 0 < count <= wanted:
        return Protection(
            can.INODE_QUOTA, MISSING, f"the file system holds {count} files, not {wanted}"
        )
    return Protection(can.INODE_QUOTA, ENFORCED, f"{count} files and directories in its tmpfs")


def _open_files_limit(seen: Inspection) -> Protection:
    hard, wanted = seen.limit("Max open files"), seen.sandbox.sizes.open_files
    if not hard.isdigit() or int(hard) > wanted:
        return Protection(can.OPEN_FILES_LIMIT, MISSING, f"the kernel says {hard}, not {wanted}")
    return Protection(can.OPEN_FILES_LIMIT, ENFORCED, f"{hard} a process by RLIMIT_NOFILE")


def _terminals(seen: Inspection) -> Protection:
    """The host has a fixed number, from which every sandbox takes."""
    mount = seen.mount_at("/dev/pts")
    settings = mount.settings if mount else frozenset()
    wanted = seen.sandbox.sizes.terminals or DEFAULT_TERMINALS
    if f"max={wanted}" not in settings:
        return Protection("terminals", MISSING, f"/dev/pts has not max={wanted}")
    most, reserve = (int(read_text(f"/proc/sys/kernel/pty/{name}")) for name in ("max", "reserve"))
    shared = f"{most - reserve} that all sandboxes here share (kernel.pty.max less its reserve)"
    return Protection("terminals", ENFORCED, f"{wanted} of its own, of {shared}")


def _core_dumps(seen: Inspection) -> Protection:
    limit = seen.limit("Max core file size")
    if limit == "1":
        return Protection("core_dumps", ENFORCED, "none, and no handler of the host is started")
    with open("/proc/sys/kernel/core_pattern", encoding="utf-8", errors="replace") as file:
        handler = file.read(1) == "|"
    if limit == "0" and not handler:
        return Protection("core_dumps", ENFORCED, "none: RLIMIT_CORE is 0")
    # The caller's own hard limit was 0 already, and only 1 keeps a handler from being started.
    return Protection("core_dumps", MISSING, f"RLIMIT_CORE is {limit}: a crash starts the handler")


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.0f} MiB"


def _no_cgroup(seen: Inspection) -> str:
    return f"no cgroup may be used: {seen.sandbox.backend.layout().why or 'its controller is not there'}"


_CHECKS: dict[str, Check] = {
    "namespaces": _namespaces,
    "host_identity": _host_identity,
    "capabilities": _capabilities,
    "no_new_privs": _no_new_privs,
    "nested_user_namespaces": _nested_user_namespaces,
    "seccomp": _seccomp,
    "landlock": _landlock,
    "unix_sockets": _unix_sockets,
    "root_file_system": _root_file_system,
    "read_only_mounts": _read_only_mounts,
    "protected_paths": _protected_paths,
    "kernel_interfaces": _kernel_interfaces,
    "network": _network,
    can.MEMORY_LIMIT: _memory_limit,
    can.CPU_LIMIT: _cpu_limit,
    can.PIDS_LIMIT: _pids_limit,
    can.DISK_QUOTA: _disk_quota,
    can.INODE_QUOTA: _inode_quota,
    can.OPEN_FILES_LIMIT: _open_files_limit,
    "terminals": _terminals,
    "core_dumps": _core_dumps,
}
