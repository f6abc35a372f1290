"""Resource usage of a native sandbox, from the kernel."""

from __future__ import annotations

import os

from ...model.capabilities import NAMESPACES
from ...model.state import State
from ...model.stats import SandboxStats
from ..local.host.facts import host
from .request import LEAST_LANDLOCK_ABI

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .live import LiveSandbox


def read_stats(sandbox: LiveSandbox, state: State, uptime_s: float, execs: int) -> SandboxStats:
    """Cgroup counters where there are cgroups, PID 1's view of /proc where not; files from statvfs."""
    group = sandbox.group
    cpu_ns, peak, pids, memory = (
        group.cpu_ns(),
        group.peak_memory_bytes(),
        group.pids(),
        group.memory_bytes(),
    )
    disk = inodes = None
    if state is not State.SUSPENDED:  # a frozen PID 1 cannot answer
        body, _ = sandbox.ask("usage")
        seen = [int(word) for word in body.split()]
        cpu_ns = seen[0] if cpu_ns is None else cpu_ns
        peak = seen[1] if peak is None else peak
        pids = seen[2] if pids is None else pids
        memory = seen[3] if memory is None else memory
        disk, inodes = _disk(sandbox)
    return SandboxStats(
        state=state,
        cpu_ns=cpu_ns,
        memory_bytes=memory,
        peak_memory_bytes=peak,
        pids=pids,
        forks_refused=group.forks_refused(),
        disk_bytes=disk,
        inodes=inodes,
        uptime_s=uptime_s,
        execs=execs,
        degraded=degraded(sandbox),
    )


def cpu_ns(sandbox: LiveSandbox) -> int | None:
    """Processor time used so far; None where it cannot be told without waking it up."""
    used = sandbox.group.cpu_ns()
    if used is None and not sandbox.paused:
        used = int(sandbox.ask("usage")[0].split()[0])
    return used


def last_stats(sandbox: LiveSandbox, uptime_s: float, execs: int) -> SandboxStats:
    """Of a sandbox that is about to end: what can be read without asking PID 1."""
    group = sandbox.group
    return SandboxStats(
        state=State.TERMINATED,
        cpu_ns=group.cpu_ns(),
        memory_bytes=0,
        peak_memory_bytes=group.peak_memory_bytes(),
        pids=0,
        forks_refused=group.forks_refused(),
        uptime_s=uptime_s,
        execs=execs,
        degraded=degraded(sandbox),
    )


def degraded(sandbox: LiveSandbox) -> tuple[str, ...]:
    """Names of what holds less than it should: for want of a cgroup, or of Landlock."""
    names = [] if sandbox.group.version else ["memory_limit", "suspend"]
    if sandbox.disk is not None and sandbox.disk.path:
        names += ["disk_quota", "inode_quota"]
    if sandbox.spec.limits.cpus and not sandbox.group.holds_cpus:
        names.append("cpu_limit")
    if sandbox.profile.landlock and host().landlock_abi < LEAST_LANDLOCK_ABI:
        names.append("landlock")
    if sandbox.lockdown["borrows_proc"]:
        names.append(NAMESPACES)
    return tuple(names)


def _disk(sandbox: LiveSandbox) -> tuple[int, int]:
    if sandbox.disk is not None and sandbox.disk.path:
        return sandbox.disk.used
    _body, fds = sandbox.ask("disk")
    try:
        info = os.fstatvfs(fds[0])
    finally:
        os.close(fds[0])
    return (info.f_blocks - info.f_bfree) * info.f_frsize, info.f_files - info.f_ffree
