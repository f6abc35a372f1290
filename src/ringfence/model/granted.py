"""What one sandbox can do, read back from it rather than from the request."""

from __future__ import annotations

from . import jsonform
from .limits import Limits
from .noun import Noun

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import dataclass, field
else:
    from .record import dataclass, field


@dataclass(frozen=True, eq=False, repr=False)
class SandboxCapabilities(Noun):
    """What a sandbox may do, and what keeps it from the rest.

    Attributes:
        can_write_filesystem: Whether `writable_paths` has anything.
        readable_paths, writable_paths: Directories and mounts inside, each tried; everything below
            them too, but for protected paths and what is listed apart.
        allowed_destinations: As rules of a network policy; `*` for the host's whole network.
        limits: As the kernel has them; a limit that it does not hold is None.
        syscall_filter_active: The kernel says that a filter is on every process.
        blocked_syscall_categories: Each tried, from inside.
        is_persistent: Some of its files outlive it: a memory directory or a writable mount.
        created_at: Seconds since 1970, UTC.
        time_remaining_ms: Until it expires, as things are; None: never.
    """

    id: str
    backend: str
    profile: str
    can_write_filesystem: bool = False
    readable_paths: tuple[str, ...] = ()
    writable_paths: tuple[str, ...] = ()
    has_network: bool = False
    allowed_destinations: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    syscall_filter_active: bool = False
    blocked_syscall_categories: tuple[str, ...] = ()
    is_persistent: bool = False
    created_at: float | None = None
    time_remaining_ms: int | None = None

    @classmethod
    def _nested(cls) -> jsonform.Readers:
        return {"limits": Limits.from_json}
