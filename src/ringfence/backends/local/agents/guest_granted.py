"""Effective capabilities of a sandbox with an agent inside, read from its kernel through the agent."""

from __future__ import annotations

from ....model.granted import SandboxCapabilities
from ....model.limits import Limits
from ....model.mount import MEMORY_DIR
from ..host.attempts import blocked_categories
from ..mounts import template

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .guest import GuestSandbox

_SYSTEM = ("/", "/usr", "/etc", "/proc", "/dev")


def granted(sandbox: GuestSandbox) -> SandboxCapabilities:
    """Everything but what the manager knows better.

    Raises:
        LifecycleError: It is suspended, or has ended.
    """
    readable, writable = _rights(sandbox)
    bounds = [int(word) for word in sandbox.ask("bounds")[0].split()]
    asked = sandbox.spec.limits
    kept = [mount.target for mount in sandbox.mounts if mount.host_path is not None]
    kept += [MEMORY_DIR] if sandbox.spec.memory_dir else []
    return SandboxCapabilities(
        id=sandbox.id,
        backend=sandbox.backend.name,
        profile=sandbox.spec.profile,
        can_write_filesystem=bool(writable),
        readable_paths=readable,
        writable_paths=writable,
        has_network=not sandbox.spec.network.is_none,
        allowed_destinations=sandbox.spec.network.allowed_hosts,
        limits=Limits(
            wall_time_s=asked.wall_time_s, open_files=bounds[1], output_bytes=asked.output_bytes
        ),
        syscall_filter_active=status_of_agent(sandbox).get("Seccomp") == "2",
        blocked_syscall_categories=blocked_categories(
            lambda calls, fd: sandbox.send(("try", list(calls)), [fd])
        ),
        is_persistent=any(target in writable for target in kept),
    )


def _rights(sandbox: GuestSandbox) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of the places one would look at: those that can be read, and those that can be written to."""
    sandbox.require_awake()
    places = [*template.WRITABLE, template.HOME, "/var/tmp"]
    paths = list(dict.fromkeys([*_SYSTEM, *places, *(m.target for m in sandbox.mounts)]))
    words = sandbox.ask("rights", [sandbox.seen_at(each) for each in paths])[0].decode()
    found = dict(zip(paths, (words[i : i + 2] for i in range(0, len(words), 2)), strict=True))
    readable, writable = (
        tuple(sorted(path for path, right in found.items() if right[which] == "1"))
        for which in (0, 1)
    )
    return readable, writable


def status_of_agent(sandbox: GuestSandbox) -> dict[str, str]:
    """proc_pid_status(5) of the agent, as the kernel inside has it."""
    with sandbox.files.open_read("/proc/self/status") as file:
        lines = file.read().decode("utf-8", "replace").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
