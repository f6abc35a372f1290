"""Protections read by the agent inside: mounts, /proc, nested namespaces."""

from __future__ import annotations

from ....model.capabilities import DEGRADED, ENFORCED, MISSING, Protection
from ..host.mountinfo import MountLine
from ..mounts import template
from ..session import is_below

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .contained import ContainedSandbox

_OF_NO_DISK = ("tmpfs", "proc", "sysfs", "cgroup", "cgroup2", "devpts", "mqueue")
_DEVICES = ("/dev/", "/proc/")  # the null device covers files of /proc
_SOCKETS = "sockets that the host makes later in an attached mount can be reached"
_SOCKETS_FIX = "give the mount when the sandbox is created: it then has no unix sockets"
_MOST_NAMESPACES = "/proc/sys/user/max_user_namespaces"


def of_isolation(sandbox: ContainedSandbox) -> list[Protection]:
    """Check the isolation that an agent makes; where it made none, report the substitute as
    degraded.
    """
    lines = [MountLine(line) for line in _read(sandbox, "/proc/self/mountinfo").splitlines()]
    on_top = {line.target: line for line in lines}  # the last one at a place is the one in sight
    lacking = MISSING if sandbox.namespace_fds else DEGRADED
    found = [
        _root(list(on_top.values()), lacking),
        _read_only(sandbox, list(on_top.values())),
        _kernel(on_top, lacking),
        _nested(sandbox, lacking),
    ]
    if sandbox.may_reach_sockets:
        found.append(Protection("unix_sockets", DEGRADED, _SOCKETS, _SOCKETS_FIX))
    return [*found, *_protected(sandbox, on_top)]


def _read(sandbox: ContainedSandbox, path: str) -> str:
    with sandbox.files.open_read(path) as file:
        return file.read().decode("utf-8", "replace")


def _root(lines: list[MountLine], lacking: str) -> Protection:
    name = "root_file_system"
    loose = sorted({line.target for line in lines if "nosuid" not in line.options})
    if loose:
        return Protection(name, lacking, f"set-user-id programs could work in {', '.join(loose)}")
    return Protection(name, ENFORCED, "its own; no mount honours set-user-id")


def _read_only(sandbox: ContainedSandbox, lines: list[MountLine]) -> Protection:
    name = "read_only_mounts"
    asked = [each.target for each in sandbox.mounts if each.access == "read_write"]
    shown = [
        line
        for line in lines
        if line.kind not in _OF_NO_DISK and not line.target.startswith(_DEVICES)
    ]
    shown = [line for line in shown if line.target != "/"]
    writable = [
        line.target
        for line in shown
        if "ro" not in line.options and not any(is_below(line.target, each) for each in asked)
    ]
    if writable:
        return Protection(name, MISSING, f"writable: {', '.join(writable)}")
    count = sum("ro" in line.options for line in shown)
    return Protection(name, ENFORCED, f"{count} trees of the host, read-only by the kernel")


def _kernel(on_top: dict[str, MountLine], lacking: str) -> Protection:
    name = "kernel_interfaces"
    if "ro" not in on_top["/proc"].options:
        return Protection(name, lacking, "/proc can be written to")
    bare = [path for path in template.masked() if path not in on_top]
    bare += ["/sys"] if "/sys" in on_top and on_top["/sys"].kind != "tmpfs" else []
    if bare:
        return Protection(name, lacking, f"shown: {', '.join(bare)}")
    return Protection(name, ENFORCED, "/proc read-only and masked; no /sys")


def _nested(sandbox: ContainedSandbox, lacking: str) -> Protection:
    name = "nested_user_namespaces"
    most = _read(sandbox, _MOST_NAMESPACES).strip()
    if most != "0":
        return Protection(name, lacking, "no count forbids them: a filter alone does")
    return Protection(name, ENFORCED, "none may be made")


def _protected(sandbox: ContainedSandbox, on_top: dict[str, MountLine]) -> list[Protection]:
    if sandbox.mounting is None or not sandbox.mounting.protected:
        return []
    steps = [step for each in sandbox.mounting.protected for step in each.steps]
    paths = [path for verb, path, *_rest in steps if verb == "protect"]
    bare = [path for path in paths if path not in on_top or "ro" not in on_top[path].options]
    if bare:
        return [Protection("protected_paths", MISSING, f"writable: {', '.join(bare)}")]
    return [Protection("protected_paths", ENFORCED, f"{len(paths)} paths in writable mounts")]
