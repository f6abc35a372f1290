"""Reads the protections of a native sandbox; see `local.protections`."""

from __future__ import annotations

from ...linux import privileges
from ...linux.namespaces import parse_id_map
from ...policy.landlock import plan_landlock
from ..local.host import cgroups
from ..local.host.facts import host
from ..local.host.identity import IDS_EACH
from ..local.host.mountinfo import read_text
from ..local.host.readback import memory_limit_bytes, memory_said, pids_limit
from ..local.netns import of_network
from ..local.protections import (
    DELEGATE,
    PAGE,
    SOCKETS_FIX,
    SOCKETS_MADE_LATER,
    MountReader,
    ProcessReader,
    degraded,
    enforced,
    mib,
    missing,
    no_cgroup,
    paths_of,
)
from ..local.sizes import DEFAULT_TERMINALS
from . import connecting
from .attach import may_reach_sockets
from .inspection import Inspection
from .request import BORROWED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..local.host.mountinfo import MountLine
    from ..local.protections import Verdict
    from .live import LiveSandbox

_NAMESPACES = {
    "mount": "mnt",
    "pid": "pid",
    "ipc": "ipc",
    "uts": "uts",
    "cgroup": "cgroup",
    "user": "user",
}
IMAGE = "run Ringfence as root, with loop devices and mke2fs: the size is exact then"
_KERNEL_TREES = (
    *("sysfs", "cgroup", "cgroup2", "debugfs", "securityfs", "tracefs", "bpf", "configfs"),
)
UNMASK = "start the container with --security-opt systempaths=unconfined (Kubernetes: procMount: Unmasked)"
_LANDLOCK_EXPECTED = 6  # scopes signals and abstract sockets: Linux 6.12


class NativeReader(ProcessReader, MountReader):
    """Reads from outside by the pid of PID 1, and through PID 1 where only it may open a file."""

    root = "a private tmpfs"
    sandbox: LiveSandbox

    def __init__(self, sandbox: LiveSandbox) -> None:
        super().__init__(sandbox)
        self.seen = Inspection(sandbox)
        self._profile_fix = f"profile {sandbox.profile.name!r} was asked for; use os_hardened"

    def status(self) -> dict[str, str]:
        return self.seen.status

    def lines(self) -> list[MountLine]:
        return self.seen.mounts

    # -- identity -----------------------------------------------------------------------------

    def namespaces(self) -> Verdict:
        own = _NAMESPACES.items()
        shared = [name for name, short in own if not self.seen.has_own_namespace(short)]
        if not shared and self.seen.borrows_proc:
            name = self.seen.inside("/proc/sys/kernel/hostname").strip()
            shows = "" if name == self.sandbox.lockdown["hostname"] else f"; its name is {name!r}"
            return degraded(f"its own, with the caller's /proc: {BORROWED}{shows}", UNMASK)
        return self.of_namespaces(shared, list(_NAMESPACES))

    def host_identity(self) -> Verdict:
        mapped = self.seen.id_map("uid_map")
        if any(first == 0 for _inside, first, _count in mapped):
            if (
                host().changes_users and not host().trusted_root
            ):  # a container's root maps its own id
                return missing("your own uid, which is root here", "start it as an ordinary user")
            return missing("an id inside is host root", "report this: it must not happen")
        if mapped != parse_id_map(self.sandbox.lockdown["uid_map"]):
            return missing("other ids are mapped than were planned", "report this")
        slot = self.sandbox.first_host_id
        if not slot:
            return enforced("your own uid, and no other")
        theirs = f"host ids {slot} to {slot + IDS_EACH - 1}, which no other sandbox has"
        if host().trusted_root:
            return enforced(theirs)
        return enforced(f"your own uid as uid {self.sandbox.uid} inside, and {theirs}")

    def kept_on_purpose(self) -> dict[str, int]:
        of_root = self.sandbox.profile.root_capabilities
        if self.sandbox.uid or not of_root:
            return {}
        of_init = of_root | privileges.CAP_KILL  # see `lockdown.become_init`
        return {"CapPrm": of_init, "CapEff": of_init, "CapBnd": of_root}

    def capabilities(self) -> Verdict:
        verdict, of_root = super().capabilities(), self.sandbox.profile.root_capabilities
        if verdict != enforced("all five sets are empty") or not of_root:
            return verdict
        why = f"root inside has rights ({of_root:#x}) over the sandbox's own users and files"
        return degraded(why, self._profile_fix)

    def nested_user_namespaces(self) -> Verdict:
        limit = self.seen.inside("/proc/sys/user/max_user_namespaces").strip()
        why = f"user.max_user_namespaces is {limit} inside"
        if limit != "0" and self.seen.borrows_proc and self.sandbox.profile.seccomp:
            left = "the filter alone forbids them, and inotify has the limits of the caller"
            return degraded(f"{why}, as /proc/sys is read-only here: {left}")
        return enforced(why) if limit == "0" else missing(why, self._profile_fix)

    # -- system calls -------------------------------------------------------------------------

    def seccomp(self) -> Verdict:
        status, profile = self.status(), self.sandbox.profile
        mode, count = status["Seccomp"], status.get("Seccomp_filters", "?")
        if mode != "2" or not profile.seccomp:
            return missing(f"mode {mode}, without our filter", self._profile_fix)
        if profile.tracing:
            return degraded("ptrace and process_vm_* are allowed", self._profile_fix)
        return enforced(f"mode 2, {count} filter{'s' if count != '1' else ''}, default deny")

    def landlock(self) -> Verdict:
        abi = host().landlock_abi
        if not self.sandbox.profile.landlock:
            return missing("switched off", self._profile_fix)
        plan = plan_landlock(abi, writable=self.sandbox.landlock_writable)
        lacking = "; ".join(plan.missing)
        fix = "boot with `landlock` in lsm=" if abi == 0 else "a newer kernel"
        if plan.is_empty:
            return degraded(lacking, fix)
        if abi < _LANDLOCK_EXPECTED:
            return degraded(f"ABI {abi} lacks: {lacking}", fix)
        return enforced(f"ABI {abi}{f'; missing: {lacking}' if lacking else ''}")

    def unix_sockets(self) -> Verdict:
        sandbox = self.sandbox
        if not sandbox.unix_sockets:
            lacks = "a new /proc" if self.seen.borrows_proc else connecting.why_not()
            why = f"; for PID 1 to connect instead, this host lacks {lacks}" if lacks else ""
            shown = "a host directory is mounted, and may hold some"
            return enforced(f"cannot be opened: {shown}{why}")
        if sandbox.lockdown["connects"]:
            return enforced("only those made inside: PID 1 makes each connection; no datagrams")
        if sandbox.host_directory and sandbox.profile.unix_sockets:
            why = "sockets in mounted host directories can be reached"
            return missing(why, self._profile_fix)
        if sandbox.host_directory and may_reach_sockets(sandbox):
            return degraded(SOCKETS_MADE_LATER, SOCKETS_FIX)
        return enforced("only those made inside can be reached")

    # -- files --------------------------------------------------------------------------------

    def root_file_system(self) -> Verdict:
        root, disk = self.seen.mount_at("/"), self.sandbox.disk
        kind = "tmpfs" if disk is None else "ext4"
        if disk is not None:
            self.root = f"a private {'directory' if disk.path else 'file system'} on disk"
        if self.sandbox.base or (disk is not None and disk.path):
            kind = "overlay"
        if root is None or root.kind != kind or not {"nosuid", "nodev"} <= root.options:
            return missing("the root is not a private file system")
        return super().root_file_system()

    def host_trees(self) -> list[MountLine]:
        own, dev = self.seen.root_device, self.seen.mount_at("/dev")
        found = [line for line in self.lines() if line.is_of_the_host(own)]
        if self.sandbox.base and dev is not None:
            # Over layers /dev is a part of the writable layer, and so is what covers files of /proc.
            found = [line for line in found if line.device != dev.device]
        if self.sandbox.disk is not None and self.sandbox.disk.path:
            # A tmpfs of its own, below whatever else is mounted there.
            own_memory = [line for line in found if line.target == "/dev/shm"][:1]
            found = [line for line in found if line not in own_memory]
        return found

    def protected_paths(self) -> Verdict:
        if not any(m.access == "read_write" and m.host_path for m in self.sandbox.mounts):
            return None
        paths = paths_of(self.sandbox.protected)
        found = {path: self.seen.mount_at(path) for path in paths}
        writable = [path for path, on in found.items() if on is None or "ro" not in on.options]
        return self.of_protected(paths, writable)

    def kernel_interfaces(self) -> Verdict:
        proc = self.seen.mount_at("/proc")
        if proc is None or "ro" not in proc.options:
            return missing("/proc is writable")
        loose = [m.target for m in self.lines() if m.kind == "proc" and "ro" not in m.options]
        if loose:
            return missing(f"writable: {', '.join(loose)}")
        shown = [m.target for m in self.lines() if m.kind in _KERNEL_TREES]
        if shown:
            return missing(f"shown: {', '.join(shown)}")
        if self.seen.borrows_proc:
            return degraded("the caller's /proc, read-only and masked; no /sys", UNMASK)
        return enforced("its own /proc, read-only and masked; no /sys")

    def network(self) -> Verdict:
        if not self.seen.has_own_namespace("net"):
            return missing("the host's own network, asked for by name", "--net none")
        return of_network(self.seen.network, self.sandbox.network, self.sandbox.spec.network)

    # -- limits -------------------------------------------------------------------------------

    def _no_cgroup(self) -> str:
        return no_cgroup(self.sandbox.backend.layout().why)

    def memory_limit(self) -> Verdict:
        group, wanted = self.sandbox.group, self.sandbox.sizes.memory_bytes
        if not group.version:
            left_out = "what sockets hold"
            if self.sandbox.first_host_id:
                left_out += " and what others than its first user have in memfd_create(2)"
            how = f"sampled every 50 ms, {left_out} left out, and RLIMIT_DATA"
            return degraded(f"{mib(wanted)}: {how}; {self._no_cgroup()}", DELEGATE)
        found = memory_limit_bytes(group)
        if found is None or found > wanted + PAGE:
            return missing(f"the cgroup says {found}, not {wanted}")
        return enforced(f"{mib(found)} {memory_said(group, found)}")

    def cpu_limit(self) -> Verdict:
        return self.of_cpus(self.sandbox.group, self._no_cgroup())

    def pids_limit(self) -> Verdict:
        group, wanted = self.sandbox.group, self.sandbox.sizes.pids + cgroups.OWN_PROCESSES
        hard, found = self.seen.limit("Max processes"), pids_limit(group)
        if found is not None and found <= wanted:
            return enforced(f"{found - cgroups.OWN_PROCESSES} by cgroup v{group.version}")
        if not hard.isdigit() or int(hard) > wanted:
            return missing(f"the kernel says {hard}, not {wanted}")
        count = int(hard) - cgroups.OWN_PROCESSES
        if self.sandbox.first_host_id:
            why = f"{count} for each user inside by RLIMIT_NPROC"
            why += "; of all together sampled, and more end the sandbox"
            return degraded(why, DELEGATE)
        if host().changes_users and not host().trusted_root:
            # Its uid is the host's 0, which Linux exempts: kernel/fork.c, copy_process, INIT_USER.
            return missing("RLIMIT_NPROC does not count for root", "start it as an ordinary user")
        return enforced(f"{count} by RLIMIT_NPROC, counted for this user namespace alone")

    def disk_quota(self) -> Verdict:
        wanted, disk = self.sandbox.sizes.disk_bytes, self.sandbox.disk
        if disk is not None and disk.path:
            how = "sampled every half second, without removed files that are open; "
            how += "what writes more ends, without ENOSPC"
            return degraded(f"{mib(wanted)} on disk: {how}; {disk.why}", IMAGE)
        size = self.seen.disk()[0]
        if not 0 < size <= wanted + PAGE:
            return missing(f"the file system holds {size} bytes, not {wanted}")
        return enforced(
            f"{mib(size)}, the size of its {'tmpfs' if disk is None else 'image on disk'}"
        )

    def inode_quota(self) -> Verdict:
        wanted, disk = self.sandbox.sizes.inodes, self.sandbox.disk
        if disk is not None and disk.path:
            return degraded(f"{wanted} files and directories, sampled; {disk.why}", IMAGE)
        count = self.seen.disk()[1]
        if not 0 < count <= wanted:
            return missing(f"the file system holds {count} files, not {wanted}")
        place = "tmpfs" if disk is None else "image on disk"
        return enforced(f"{count} files and directories in its {place}")

    def open_files_limit(self) -> Verdict:
        hard, wanted = self.seen.limit("Max open files"), self.sandbox.sizes.open_files
        if not hard.isdigit() or int(hard) > wanted:
            return missing(f"the kernel says {hard}, not {wanted}")
        return enforced(f"{hard} a process by RLIMIT_NOFILE")

    def terminals(self) -> Verdict:
        mount = self.seen.mount_at("/dev/pts")
        settings = mount.settings if mount else frozenset()
        wanted = self.sandbox.sizes.terminals or DEFAULT_TERMINALS
        if f"max={wanted}" not in settings:
            return missing(f"/dev/pts has not max={wanted}")
        most, reserve = (int(read_text(f"/proc/sys/kernel/pty/{n}")) for n in ("max", "reserve"))
        shared = f"{most - reserve} that all sandboxes here share (kernel.pty.max less its reserve)"
        return enforced(f"{wanted} of its own, of {shared}")

    def core_dumps(self) -> Verdict:
        limit = self.seen.limit("Max core file size")
        if limit == "1":
            return enforced("none, and no handler of the host is started")
        if limit == "0" and not read_text("/proc/sys/kernel/core_pattern").startswith("|"):
            return enforced("none: RLIMIT_CORE is 0")
        # The caller's own hard limit was 0 already, and only 1 keeps a handler from being started.
        return missing(f"RLIMIT_CORE is {limit}: a crash starts the handler")
