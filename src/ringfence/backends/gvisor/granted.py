"""Effective capabilities of a gVisor sandbox: read from its kernel and the host's, or tested."""

from __future__ import annotations

from dataclasses import replace

from ...model.limits import Limits
from ..local.agents import guest_granted
from ..local.host.readback import cpu_limit
from .inspection import Inspection

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ...model.granted import SandboxCapabilities
    from .sandbox import GvisorSandbox


def granted(sandbox: GvisorSandbox) -> SandboxCapabilities:
    """Everything but what the manager knows better.

    Raises:
        LifecycleError: It is suspended, or has ended.
    """
    asked_inside = guest_granted.granted(sandbox)
    seen, asked = Inspection(sandbox), sandbox.spec.limits
    return replace(
        asked_inside,
        limits=Limits(
            wall_time_s=asked.wall_time_s,
            cpus=cpu_limit(sandbox.group),
            memory_bytes=sandbox.sizes.memory_bytes,
            pids=seen.pids,
            disk_bytes=seen.disk_bytes,
            inodes=seen.inodes,
            open_files=seen.open_files,
            output_bytes=asked.output_bytes,
        ),
        syscall_filter_active=all(process.is_filtered for process in seen.kernel),
    )
