"""What a backend can do and what protects the host, as probed here, never assumed."""

from __future__ import annotations

from . import checks, jsonform
from .noun import Noun

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    from .record import dataclass

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
MAY_BE_WEAKER = (*LIMITED_BY.values(), LANDLOCK)
"""What `allow_degraded` can name; without any other protection nothing starts, whoever allows it."""


def weaker(value: object, field: str) -> tuple[str, ...]:
    """Names of `MAY_BE_WEAKER`, or `*` for all of them.

    Raises:
        InvalidRequest: Another name: it would allow nothing, and who wrote it would not know.
    """
    names = checks.texts(value, field)
    for i, name in enumerate(names):
        if name != "*" and name not in MAY_BE_WEAKER:
            hint = f"one of {', '.join(MAY_BE_WEAKER)}, or * for any"
            checks.refuse(f"{field}[{i}]", f"{name!r} is nothing that may be weaker", hint)
    return names


@dataclass(frozen=True, eq=False, repr=False)
class Capability(Noun):
    """One thing a backend can or cannot do on this host; `reason` says why not."""

    name: str
    available: bool
    reason: str = ""


@dataclass(frozen=True, eq=False, repr=False)
class Protection(Noun):
    """One protection: `enforced`, `degraded` or `missing`.

    Attributes:
        why: What was seen, or what is lacking; not empty unless enforced.
        fix: What the host's owner can do about it; may be empty.
    """

    name: str
    status: str
    why: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        checks.choice(self.status, "status", STATUSES, "enforced, degraded or missing")


@dataclass(frozen=True, eq=False, repr=False)
class BackendReport(Noun):
    """What `doctor` prints of one backend.

    Attributes:
        reason: Why it is not available; of one that is, which program it found, where that may vary.
        tiers: The tiers it serves here.
        profiles: The profiles that it has; empty: not told.
    """

    backend: str
    available: bool
    reason: str = ""
    tiers: tuple[str, ...] = ()
    capabilities: tuple[Capability, ...] = ()
    protections: tuple[Protection, ...] = ()
    profiles: tuple[str, ...] = ()

    def can(self, name: str) -> bool:
        """Whether the capability is available; one not reported is not."""
        return any(each.available for each in self.capabilities if each.name == name)

    @classmethod
    def _nested(cls) -> jsonform.Readers:
        return {
            "capabilities": jsonform.each(Capability.from_json),
            "protections": jsonform.each(Protection.from_json),
        }
