"""Effective capabilities of a sandbox, read back from it rather than from the request."""

from __future__ import annotations

from .base.model import Model
from .base.record import dataclass, field
from .limits import Limits


@dataclass(frozen=True, eq=False, repr=False)
class SandboxCapabilities(Model):
    """Effective capabilities of a sandbox, and its restrictions.

    Attributes:
        can_write_filesystem: True if `writable_paths` is not empty.
        readable_paths, writable_paths: Directories and mounts inside, each tried; each stands for its
            whole tree, except protected paths and paths listed separately.
        allowed_destinations: Rules of a network policy; `*` for the host's whole network.
        limits: As set in the kernel; None where the kernel enforces no such limit.
        syscall_filter_active: The kernel reports a filter on every process.
        blocked_syscall_categories: Each tried from inside.
        is_persistent: Some of its files outlive it: a memory directory or a writable mount.
        created_at: Seconds since 1970, UTC.
        time_remaining_ms: Until it expires at the current rate of use; None: never.
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
