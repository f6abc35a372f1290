"""Protections of a sandbox, read from the kernel for its PID 1; its children have no more
rights.
"""

from __future__ import annotations

import os

from ....model.capabilities import DEGRADED, ENFORCED, MISSING, Protection
from ..host.mountinfo import read_text
from .inside import NAMESPACES, status_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

TREES = Protection(
    "process_trees",
    DEGRADED,
    "a process can leave its exec's tree, and then lives until the sandbox ends",
)


def of_process(pid: int, inodes: Mapping[str, int] | None = None) -> list[Protection]:
    """Namespaces, identity, capabilities, privileges, filter and network.

    Args:
        inodes: Of its namespaces by name, where they are known; an ordinary user may not look.
    """
    seen = status_of(pid)
    theirs = inodes or {name: os.stat(f"/proc/{pid}/ns/{name}").st_ino for name in NAMESPACES}
    shared = [name for name in NAMESPACES if theirs[name] == _ours(name)]
    return of_seen(seen, shared, read_text(f"/proc/{pid}/net/dev"))


def of_seen(seen: dict[str, str], shared: list[str], interfaces: str) -> list[Protection]:
    """The same of what was read, wherever that was.

    Args:
        seen: proc_pid_status(5), with ids as its host has them.
        shared: Namespaces that are the host's.
        interfaces: /proc/net/dev inside.
    """
    return [
        _namespaces(shared),
        _identity(shared, seen),
        _capabilities(seen),
        _no_new_privs(seen),
        _seccomp(seen),
        _network(interfaces, shared),
    ]


def _namespaces(shared: list[str]) -> Protection:
    if shared:
        return Protection("namespaces", DEGRADED, f"shared with the host: {', '.join(shared)}")
    return Protection("namespaces", ENFORCED, f"its own {', '.join(NAMESPACES)}")


def _ours(name: str) -> int:
    return os.stat(f"/proc/self/ns/{name}").st_ino


def _identity(shared: list[str], seen: dict[str, str]) -> Protection:
    uid = int(seen["Uid"].split()[1])
    if uid == 0:
        return Protection("host_identity", MISSING, "it is root on the host", "report this")
    if "user" in shared:
        why = f"uid {uid} of the host, possibly another account's"
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


def _network(interfaces: str, shared: list[str]) -> Protection:
    lines = interfaces.splitlines()[2:]
    names = {line.partition(":")[0].strip() for line in lines} - {"lo"}
    if names or "net" in shared:
        return Protection(
            "network", MISSING, f"interfaces: {', '.join(sorted(names)) or 'the host'}"
        )
    return Protection("network", ENFORCED, "a namespace with nothing but lo")
