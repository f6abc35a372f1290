"""Effective capabilities of a sandbox: read from the kernel, and tested where it does not report them."""

from __future__ import annotations

import os
import resource

from ...model.granted import SandboxCapabilities
from ...model.limits import Limits
from ...model.mount import MEMORY_DIR
from ..local.host.attempts import blocked_categories
from ..local.host.readback import cpu_limit, memory_limit_bytes, pids_limit
from ..local.mounts import template
from .inspection import Inspection

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from .live import LiveSandbox

_SYSTEM = ("/", "/usr", "/etc", "/proc", "/dev")


def granted(sandbox: LiveSandbox) -> SandboxCapabilities:
    """Everything but what the manager knows better. Preconditions: it is not suspended.

    Raises:
        LifecycleError: It is suspended, or has ended.
    """
    sandbox.require_awake()
    seen = Inspection(sandbox)
    policy = sandbox.spec.network
    mounts = [each.target for each in sandbox.session.mounts]
    writable = _working(sandbox, [*template.WRITABLE, template.HOME, "/var/tmp", *mounts], True)
    readable = _working(sandbox, [*_SYSTEM, *template.WRITABLE, *mounts, *writable], False)
    reaches = not seen.has_own_namespace("net") or not policy.is_none
    return SandboxCapabilities(
        id=sandbox.id,
        backend=sandbox.backend.name,
        profile=sandbox.profile.name,
        can_write_filesystem=bool(writable),
        readable_paths=readable,
        writable_paths=writable,
        has_network=reaches,
        allowed_destinations=("*",) if policy.is_unrestricted else policy.allowed_hosts,
        limits=_limits(sandbox, seen),
        syscall_filter_active=seen.status["Seccomp"] == "2" and sandbox.profile.seccomp,
        blocked_syscall_categories=blocked_categories(
            lambda calls, fd: sandbox.tell("try", calls, fds=[fd])
        ),
        is_persistent=_is_persistent(sandbox, writable),
    )


def _working(sandbox: LiveSandbox, paths: Iterable[str], to_write: bool) -> tuple[str, ...]:
    """Select the paths that PID 1, which has the rights of every program inside, can open that way."""
    found = [path for path in dict.fromkeys(paths) if _opens(sandbox, path, to_write)]
    return tuple(sorted(found))


def _opens(sandbox: LiveSandbox, path: str, to_write: bool) -> bool:
    flags = [os.O_RDONLY]
    if to_write:
        # A file without a name, which nobody sees; then for what is itself a file.
        flags = [os.O_TMPFILE | os.O_WRONLY, os.O_WRONLY]
    for each in flags:
        try:
            _body, fds = sandbox.ask("open", path, each, 0o600)
        except OSError:
            continue
        for fd in fds:
            os.close(fd)
        return True
    return False


def _limits(sandbox: LiveSandbox, seen: Inspection) -> Limits:
    """From cgroups, the root file system and PID 1's resource limits; times are kept by us."""
    asked, group = sandbox.spec.limits, sandbox.group
    memory, processes = memory_limit_bytes(group), pids_limit(group)
    disk_bytes, inodes = seen.disk()
    if sandbox.disk is not None and sandbox.disk.path:
        disk_bytes, inodes = sandbox.sizes.disk_bytes, sandbox.sizes.inodes
    return Limits(
        wall_time_s=asked.wall_time_s,
        cpus=cpu_limit(group),
        memory_bytes=memory or _number(seen.limit("Max data size")),
        pids=(processes or _number(seen.limit("Max processes")) or 1) - 1 or None,
        disk_bytes=disk_bytes,
        inodes=inodes,
        open_files=_number(seen.limit("Max open files")),
        output_bytes=asked.output_bytes,
        network_bytes=asked.network_bytes,
    )


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() and int(text) < resource.RLIM_INFINITY % 2**64 else None


def _is_persistent(sandbox: LiveSandbox, writable: tuple[str, ...]) -> bool:
    kept = [each.target for each in sandbox.session.mounts if each.host_path is not None]
    memory = [MEMORY_DIR] if sandbox.spec.memory_dir else []
    return any(target in writable for target in [*kept, *memory])
