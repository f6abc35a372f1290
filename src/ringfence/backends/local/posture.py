"""What the kernel says of a sandbox's PID 1, as protections; all that it starts has no more."""

from __future__ import annotations

import os

from ...model.capabilities import DEGRADED, ENFORCED, MISSING, Protection
from .inside import NAMESPACES, status_of
from .mountinfo import read_text

TREES = Protection(
    "process_trees",
    DEGRADED,
    "a process can leave its exec's tree, and then lives until the sandbox ends",
)


def of_process(pid: int) -> list[Protection]:
    """Namespaces, identity, capabilities, privileges, filter and network."""
    seen = status_of(pid)
    return [
        _namespaces(pid),
        _identity(pid, seen),
        _capabilities(seen),
        _no_new_privs(seen),
        _seccomp(seen),
        _network(pid),
    ]


def _namespaces(pid: int) -> Protection:
    shared = [name for name in NAMESPACES if _same(pid, name)]
    if shared:
        return Protection("namespaces", DEGRADED, f"shared with the host: {', '.join(shared)}")
    return Protection("namespaces", ENFORCED, f"its own {', '.join(NAMESPACES)}")


def _same(pid: int, name: str) -> bool:
    return os.stat(f"/proc/{pid}/ns/{name}").st_ino == os.stat(f"/proc/self/ns/{name}").st_ino


def _identity(pid: int, seen: dict[str, str]) -> Protection:
    uid = int(seen["Uid"].split()[1])
    if uid == 0:
        return Protection("host_identity", MISSING, "it is root on the host", "report this")
    if _same(pid, "user"):
        why = f"uid {uid} of the host, perhaps somebody's"
        return Protection("host_identity", DEGRADED, why, "turn on the engine's userns-remap")
    return Protection("host_identity", ENFORCED, f"uid {uid} on the host")


def _capabilities(seen: dict[str, str]) -> Protection:
    sets = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
    held = [name for name in sets if int(seen[name], 16)]
    if held:
        return Protection("capabilities", DEGRADED, f"not empty: {', '.join(held)}")
    return Protection("capabilities", ENFORCED, "all five sets are empty")


def _no_new_privs(seen: dict[str, str]) -> Protection:
    if seen["NoNewPrivs"] != "1":
        return Protection("no_new_privs", DEGRADED, "NoNewPrivs is 0")
    return Protection("no_new_privs", ENFORCED, "NoNewPrivs is 1")


def _seccomp(seen: dict[str, str]) -> Protection:
    if seen.get("Seccomp") != "2":
        return Protection("seccomp", DEGRADED, "no system call is filtered")
    return Protection("seccomp", ENFORCED, "mode 2 on PID 1, and so on all that it starts")


def _network(pid: int) -> Protection:
    lines = read_text(f"/proc/{pid}/net/dev").splitlines()[2:]
    names = {line.partition(":")[0].strip() for line in lines} - {"lo"}
    if names or _same(pid, "net"):
        return Protection(
            "network", MISSING, f"interfaces: {', '.join(sorted(names)) or 'the host'}"
        )
    return Protection("network", ENFORCED, "a namespace with nothing but lo")
