"""Every protection that a report names, and the base of the readers that read them back.

A backend has a reader: a class with one method for each check that applies to it. What cannot be
read back is never claimed: it is reported as degraded, with the cause.
"""

from __future__ import annotations

from ...errors import RingfenceError
from ...model import capabilities as can
from ...model.capabilities import DEGRADED, ENFORCED, MISSING, Protection
from ...model.state import State
from .host.readback import cores, cpu_limit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Protocol

    from ...model.session import ResolvedMount
    from ...model.spec import SandboxSpec
    from .host.cgroups import Group
    from .host.mountinfo import MountLine
    from .mounts.protect import Protected

    class Readable(Protocol):
        """A sandbox whose protections are read from the kernel."""

        spec: SandboxSpec
        last_protections: tuple[Protection, ...]

        @property
        def mounts(self) -> Sequence[ResolvedMount]: ...
        @property
        def state(self) -> State: ...

    Verdict = tuple[str, ...] | None

CHECKS = {
    "guest_kernel": "the host kernel's system calls: the sandbox has a kernel of its own",
    "gvisor_release": "known defects of gVisor are corrected in this release",
    "virtual_machine": "the barrier between the guest's kernel and its emulator is hardware",
    "namespaces": "processes, mounts, IPC and names of the host are out of sight",
    "host_identity": "files and processes of other host users: no id inside is theirs",
    "capabilities": "rights of root over the host",
    "no_new_privs": "no exec(2) gains rights by set-user-id or file capabilities",
    "nested_user_namespaces": "kernel code that only the root of a user namespace reaches",
    "seccomp": "system calls that no program needs, and the defects in them",
    "landlock": "files, even where a mount is wrong; sockets and signals across sandboxes",
    "unix_sockets": "services of the host that listen on a unix socket",
    "root_file_system": "the host's root; set-user-id programs have no effect",
    "read_only_mounts": "files of the host that are shown, against writing",
    "own_pages": "page-cache pages of files that other tenants read, against observation",
    "protected_paths": "paths in writable mounts that the host later executes or trusts",
    "kernel_interfaces": "settings and state of the kernel in /proc and /sys",
    "network": "every destination but those of the network policy",
    can.MEMORY_LIMIT: "memory of the host",
    can.CPU_LIMIT: "processor time of the host",
    can.PIDS_LIMIT: "process numbers of the host",
    can.DISK_QUOTA: "bytes on the host's disk or in its memory",
    can.INODE_QUOTA: "inodes of the host",
    can.OPEN_FILES_LIMIT: "open files of the host",
    "terminals": "terminals, of which the host has a fixed number",
    "core_dumps": "the host's handler of core dumps, which runs as root",
    "process_trees": "other execs: a process cannot leave the tree of its exec",
}
"""The asset that each check protects; reports have this order."""

UNREADABLE = (OSError, RingfenceError, ValueError, KeyError)
DELEGATE = "start it as root, or run it under `systemd-run --user --scope -p Delegate=yes --`"
SOCKETS_MADE_LATER = "sockets that the host makes later in an attached directory can be reached"
SOCKETS_FIX = (
    "give the mount when the sandbox is created: it then connects to sockets of its own only"
)
CAPABILITY_SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
PAGE = 4096


def enforced(why: str) -> Verdict:
    return (ENFORCED, why)


def degraded(why: str, fix: str = "") -> Verdict:
    return (DEGRADED, why, fix)


def missing(why: str, fix: str = "") -> Verdict:
    return (MISSING, why, fix)


def mib(count: int) -> str:
    return f"{count / (1 << 20):.0f} MiB"


def protections_of(sandbox: Readable, reader: Callable[[], Reader]) -> tuple[Protection, ...]:
    """Every protection of a live sandbox; of a suspended or ended one, what was last read."""
    state = sandbox.state
    if state not in (State.SUSPENDED, State.TERMINATED):
        try:
            sandbox.last_protections = reader().read()
        except UNREADABLE as exc:
            sandbox.last_protections = (_unreadable("all", exc),)
    elif not sandbox.last_protections:
        return (Protection("all", DEGRADED, f"not read back before the sandbox was {state}"),)
    return sandbox.last_protections


def _unreadable(name: str, exc: Exception) -> Protection:
    return Protection(name, DEGRADED, f"could not be read back: {exc}")


class Reader:
    """Reads the protections of one live sandbox.

    Attributes:
        lacking: The verdict where the launcher, and not Ringfence, makes the isolation.
    """

    lacking = MISSING

    def __init__(self, sandbox: Readable) -> None:
        self.sandbox = sandbox

    def read(self) -> tuple[Protection, ...]:
        """Run every check that this reader has, in the order of the table."""
        found = (self._checked(name) for name in CHECKS if hasattr(self, name))
        return tuple(each for each in found if each is not None)

    def _checked(self, name: str) -> Protection | None:
        try:
            verdict: Verdict = getattr(self, name)()
        except UNREADABLE as exc:
            return _unreadable(name, exc)
        return Protection(name, *verdict) if verdict else None

    def lacks(self, why: str, fix: str = "") -> Verdict:
        return (self.lacking, why, fix)

    def of_namespaces(self, shared: list[str], own: Sequence[str]) -> Verdict:
        if shared:
            return self.lacks(f"shared with the host: {', '.join(shared)}")
        return enforced(f"its own {', '.join(own)}")

    def of_protected(self, paths: list[str], writable: list[str]) -> Verdict:
        """Judge protected paths, of which some may be writable."""
        if writable:
            return missing(f"writable: {', '.join(writable)}")
        return enforced(f"{len(paths)} paths in writable mounts")

    def of_cpus(self, group: Group, no_cgroup: str) -> Verdict:
        """Judge the processor limit, where one is asked for."""
        if not self.sandbox.spec.limits.cpus:
            return None
        found = cpu_limit(group)
        if found is None:
            return missing(no_cgroup, DELEGATE)
        return enforced(f"{cores(found)} by cgroup v{group.version}")


def paths_of(protected: Sequence[Protected]) -> list[str]:
    return [step[1] for part in protected for step in part.steps if step[0] == "protect"]


def no_cgroup(why: str) -> str:
    return f"no cgroup may be used: {why or 'its controller is not there'}"


class ProcessReader(Reader):
    """Reads what proc_pid_status(5) says of PID 1, from which every process inside inherits."""

    def status(self) -> dict[str, str]:
        """proc_pid_status(5) of PID 1, with ids as its host has them."""
        raise NotImplementedError

    def kept_on_purpose(self) -> dict[str, int]:
        """Capabilities that a profile gives, by set."""
        return {}

    def capabilities(self) -> Verdict:
        status, own = self.status(), self.kept_on_purpose()
        held = [n for n in CAPABILITY_SETS if int(status[n], 16) & ~own.get(n, 0)]
        if held:
            return self.lacks(f"not empty: {', '.join(held)}")
        return enforced("all five sets are empty")

    def no_new_privs(self) -> Verdict:
        value = self.status()["NoNewPrivs"]
        return enforced("NoNewPrivs is 1") if value == "1" else self.lacks("NoNewPrivs is 0")


class MountReader(Reader):
    """Reads the mounts that are visible inside.

    Attributes:
        root: How the root is made.
    """

    root = "its own"

    def lines(self) -> list[MountLine]:
        """Every mount inside."""
        raise NotImplementedError

    def host_trees(self) -> list[MountLine]:
        raise NotImplementedError

    def root_file_system(self) -> Verdict:
        loose = sorted({line.target for line in self.lines() if "nosuid" not in line.options})
        if loose:
            return self.lacks(f"set-user-id programs work in {', '.join(loose)}")
        return enforced(f"{self.root}; no mount honours set-user-id")

    def read_only_mounts(self) -> Verdict:
        from .session import is_below

        asked = [each.target for each in self.sandbox.mounts if each.access == "read_write"]
        shown = self.host_trees()
        read_only = [line for line in shown if "ro" in line.options]
        writable = [
            line.target
            for line in shown
            if "ro" not in line.options and not any(is_below(line.target, each) for each in asked)
        ]
        if writable:
            return missing(f"writable: {', '.join(writable)}")
        return enforced(f"{len(read_only)} trees of the host, read-only by the kernel")


class BoundsReader(Reader):
    """Reads the bounds that the guest's kernel has.

    Attributes:
        bounds: Processes, open files, bytes and inodes.
        files: What bounds the last two.
    """

    files = "tmpfs"

    bounds: tuple[int, int, int, int]

    def most(self) -> tuple[int, int, int, int] | None:
        """Bounds that were asked for; None where the guest's kernel is started with it."""
        return None

    def _of(self, which: int, unit: str, text: str, slack: int = 0) -> Verdict:
        found, most = self.bounds[which], self.most()
        if most is not None and found > most[which] + slack:
            return missing(f"the guest says {found}{unit}, not {most[which]}")
        if which > 1 and found <= 0:
            return missing(f"the root holds {found}{unit}")
        return enforced(text)

    def pids_limit(self) -> Verdict:
        return self._of(0, "", f"{self.bounds[0]} by the guest's kernel")

    def open_files_limit(self) -> Verdict:
        return self._of(1, "", f"{self.bounds[1]} a process")

    def disk_quota(self) -> Verdict:
        return self._of(2, " bytes", f"{mib(self.bounds[2])}, the size of its {self.files}", PAGE)

    def inode_quota(self) -> Verdict:
        return self._of(3, " files", f"{self.bounds[3]} files and directories in its {self.files}")
