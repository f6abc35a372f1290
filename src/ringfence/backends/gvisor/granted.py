"""What one gVisor sandbox can do, asked of its kernel and of the host's: by reading, or by trying."""

from __future__ import annotations

from ...model.granted import SandboxCapabilities
from ...model.limits import Limits
from ...model.mount import MEMORY_DIR
from ..local import template
from ..local.attempts import blocked_categories
from ..local.readback import cpu_limit
from .inspection import Inspection

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from .sandbox import GvisorSandbox

_SYSTEM = ("/", "/usr", "/etc", "/proc", "/dev")


def granted(sandbox: GvisorSandbox) -> SandboxCapabilities:
    """Everything but what the manager knows better.

    Raises:
        LifecycleError: It is suspended, or has ended.
    """
    sandbox.require_awake()
    seen = Inspection(sandbox)
    places = [*template.WRITABLE, template.HOME, "/var/tmp"]
    paths = list(dict.fromkeys([*_SYSTEM, *places, *(m.target for m in sandbox.session.mounts)]))
    words = sandbox.ask("rights", paths)[0].decode()
    rights = dict(zip(paths, (words[i : i + 2] for i in range(0, len(words), 2)), strict=True))
    writable = tuple(sorted(path for path, right in rights.items() if right[1] == "1"))
    asked = sandbox.spec.limits
    return SandboxCapabilities(
        id=sandbox.id,
        backend=sandbox.backend.name,
        profile=sandbox.spec.profile,
        can_write_filesystem=bool(writable),
        readable_paths=tuple(sorted(path for path, right in rights.items() if right[0] == "1")),
        writable_paths=writable,
        has_network=not sandbox.spec.network.is_none,
        allowed_destinations=sandbox.spec.network.allowed_hosts,
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
        blocked_syscall_categories=blocked_categories(lambda calls, fd: _try(sandbox, calls, fd)),
        is_persistent=_is_persistent(sandbox, writable),
    )


def _try(sandbox: GvisorSandbox, calls: Sequence[object], reply: int) -> None:
    sandbox.send(("try", list(calls)), [reply])


def _is_persistent(sandbox: GvisorSandbox, writable: Sequence[str]) -> bool:
    kept = [mount.target for mount in sandbox.session.mounts if mount.host_path is not None]
    memory = [MEMORY_DIR] if sandbox.spec.memory_dir else []
    return any(target in writable for target in [*kept, *memory])
