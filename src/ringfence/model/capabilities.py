"""Capabilities of a backend and protections of the host, as probed here, never assumed."""

from __future__ import annotations

from .base import checks
from .base.model import Model
from .base.record import dataclass

ENFORCED = "enforced"
DEGRADED = "degraded"
MISSING = "missing"
STATUSES = (ENFORCED, DEGRADED, MISSING)

# Names of capabilities. A backend may report more; these are what the contract knows.
LOCAL_PROCESS_SANDBOX = "local_process_sandbox"
NETWORK_NONE = "network_none"  # an empty policy is enforced
NETWORK_HOSTS = "network_hosts"  # a list of hosts is enforced
NETWORK_UNRESTRICTED = "network_unrestricted"
NETWORK_CHANGE = "network_change"  # the policy of a live sandbox can change
NETWORK_OPEN = "network_open"  # a live sandbox that was made without a network can get one
CONNECT = "connect"  # servers inside can be reached from the host
MOUNT = "mount"
ATTACH = "attach"  # mounts can be added to a live sandbox
SNAPSHOT = "snapshot"
RESTORE = "restore"
SUSPEND = "suspend"
RESUME = "resume"
PREWARM = "prewarm"  # sandboxes are built ahead, and bound to a spec when they are claimed
SUSPEND_ON_IDLE = "suspend_on_idle"
PTY = "pty"
MEMORY_SNAPSHOT = "memory_snapshot"
FORK = "fork"
IMAGE = "image"
GPU = "gpu"
MEMORY_LIMIT = "memory_limit"
CPU_LIMIT = "cpu_limit"
PIDS_LIMIT = "pids_limit"
DISK_QUOTA = "disk_quota"
INODE_QUOTA = "inode_quota"
OPEN_FILES_LIMIT = "open_files_limit"
IO_LIMIT = "io_limit"
NETWORK_LIMIT = "network_limit"
SECRETS = "secrets"  # values that never enter the sandbox
DENIED_PATHS = "denied_paths"  # paths that cannot be read, even where they do not exist yet
SEVERAL_USERS = "several_users"  # a root inside that rules other users there: profile own_root
PROTECTED_PATHS = "protected_paths"  # read-only paths inside a writable mount

LIMITED_BY = {
    "cpus": CPU_LIMIT,
    "memory_bytes": MEMORY_LIMIT,
    "pids": PIDS_LIMIT,
    "disk_bytes": DISK_QUOTA,
    "inodes": INODE_QUOTA,
    "open_files": OPEN_FILES_LIMIT,
    "io_bytes_per_s": IO_LIMIT,
    "network_bytes": NETWORK_LIMIT,
}
"""The capability that a field of `Limits` needs."""

LANDLOCK = "landlock"
NAMESPACES = "namespaces"  # and what follows from them: the backend landlock has none
MAY_BE_WEAKER = (*LIMITED_BY.values(), LANDLOCK, NAMESPACES)
"""Names that `allow_degraded` accepts; without any other protection no sandbox starts."""


def weaker(value: object, field: str) -> tuple[str, ...]:
    """Names of `MAY_BE_WEAKER`, or `*` for all of them but namespaces.

    Raises:
        InvalidRequest: Another name: it would allow nothing, and who wrote it would not know.
    """
    names = checks.texts(value, field)
    for i, name in enumerate(names):
        if name != "*" and name not in MAY_BE_WEAKER:
            from .mistakes import meant

            hint = meant(name, (*MAY_BE_WEAKER, "*"))
            checks.refuse(
                f"{field}[{i}]",
                f"{name!r} is not a protection that can be allowed to be weaker",
                hint,
            )
    return names


@dataclass(frozen=True, eq=False, repr=False)
class Capability(Model):
    """A capability of a backend on this host; `reason` says why it is unavailable.

    Of an available `memory_snapshot` it says what another host must have to restore one of this host.
    """

    name: str
    available: bool
    reason: str = ""


@dataclass(frozen=True, eq=False, repr=False)
class Protection(Model):
    """A protection: `enforced`, `degraded` or `missing`.

    Attributes:
        why: The observation or the missing piece; not empty unless enforced.
        fix: Action for the host's owner; may be empty.
    """

    name: str
    status: str
    why: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        checks.choice(self.status, "status", STATUSES, "enforced, degraded or missing")


@dataclass(frozen=True, eq=False, repr=False)
class BackendReport(Model):
    """A backend as `doctor` reports it.

    Attributes:
        reason: Why it is unavailable; where available, the program in use if there are several, and what
            makes it slower than elsewhere.
        tiers: The tiers it serves here.
        profiles: The profiles that it has; empty: not reported.
    """

    backend: str
    available: bool
    reason: str = ""
    tiers: tuple[str, ...] = ()
    capabilities: tuple[Capability, ...] = ()
    protections: tuple[Protection, ...] = ()
    profiles: tuple[str, ...] = ()

    def can(self, name: str) -> bool:
        """Return whether the capability is available; one not reported is not."""
        return any(each.available for each in self.capabilities if each.name == name)
