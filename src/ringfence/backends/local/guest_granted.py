"""What a sandbox with an agent inside can do, asked of its kernel through the agent."""

from __future__ import annotations

from ...model.granted import SandboxCapabilities
from ...model.limits import Limits
from . import template
from .attempts import blocked_categories

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .guest import GuestSandbox

_SYSTEM = ("/", "/usr", "/etc", "/proc", "/dev")


def granted(sandbox: GuestSandbox) -> SandboxCapabilities:
    """Everything but what the manager knows better.

    Raises:
        LifecycleError: It is suspended, or has ended.
    """
    sandbox.require_awake()
    places = [*template.WRITABLE, template.HOME, "/var/tmp"]
    paths = list(dict.fromkeys([*_SYSTEM, *places, *(m.target for m in sandbox.mounts)]))
    words = sandbox.ask("rights", paths)[0].decode()
    rights = dict(zip(paths, (words[i : i + 2] for i in range(0, len(words), 2)), strict=True))
    writable = tuple(sorted(path for path, right in rights.items() if right[1] == "1"))
    bounds = [int(word) for word in sandbox.ask("bounds")[0].split()]
    asked = sandbox.spec.limits
    kept = [mount.target for mount in sandbox.mounts if mount.host_path is not None]
    return SandboxCapabilities(
        id=sandbox.id,
        backend=sandbox.backend.name,
        profile=sandbox.spec.profile,
        can_write_filesystem=bool(writable),
        readable_paths=tuple(sorted(path for path, right in rights.items() if right[0] == "1")),
        writable_paths=writable,
        limits=Limits(
            wall_time_s=asked.wall_time_s, open_files=bounds[1], output_bytes=asked.output_bytes
        ),
        syscall_filter_active=status_of_agent(sandbox).get("Seccomp") == "2",
        blocked_syscall_categories=blocked_categories(
            lambda calls, fd: sandbox.send(("try", list(calls)), [fd])
        ),
        is_persistent=any(target in writable for target in kept),
    )


def status_of_agent(sandbox: GuestSandbox) -> dict[str, str]:
    """proc_pid_status(5) of the agent, as the kernel inside has it."""
    with sandbox.files.open_read("/proc/self/status") as file:
        lines = file.read().decode("utf-8", "replace").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
