"""Limits of a sandbox's cgroups, as the kernel has them."""

from __future__ import annotations

from .mountinfo import read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .cgroups import Group

_SOCKETS = "memory.kmem.tcp.limit_in_bytes"
NOT_COUNTED = "besides at most 64 netlink sockets and 115,000 file locks"
"""No version counts what they hold; PID 1 bounds their number: launcher/pid1."""


def memory_limit_bytes(group: Group) -> int | None:
    return _number(_control(group, "memory", "memory.max", "memory.limit_in_bytes"))


def memory_said(group: Group, found: int) -> str:
    """Describe how a memory limit is held: version 1 counts socket buffers apart, if at all."""
    if group.version != 1:
        return f"by cgroup v{group.version}, {NOT_COUNTED}"
    beside = _number(_control(group, "memory", "", _SOCKETS))
    return f"by cgroup v1, {sockets_said(beside, found)}, {NOT_COUNTED}"


def sockets_said(beside: int | None, found: int) -> str:
    """Describe version 1's limit for socket buffers, beside a memory limit of so many bytes."""
    if beside is None or beside > found:
        return "without what sockets hold"
    return f"and {beside / (1 << 20):.0f} MiB for what sockets hold"


def pids_limit(group: Group) -> int | None:
    """Read the pids cgroup's limit, PID 1 included."""
    return _number(_control(group, "pids", "pids.max", "pids.max"))


def cpu_limit(group: Group) -> float | None:
    """Cores, as the cpu cgroup says."""
    if group.version == 2:
        quota, _, period = _control(group, "cpu", "cpu.max", "").partition(" ")
    else:
        quota = _control(group, "cpu", "", "cpu.cfs_quota_us")
        period = _control(group, "cpu", "", "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def cores(count: float) -> str:
    return f"{count:g} core{'' if count == 1 else 's'}"


def _control(group: Group, controller: str, v2: str, v1: str) -> str:
    directory = group.paths.get("" if group.version == 2 else controller)
    if not group.version or directory is None:
        return ""
    try:
        return read_text(f"{directory}/{v2 if group.version == 2 else v1}").strip()
    except FileNotFoundError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None
