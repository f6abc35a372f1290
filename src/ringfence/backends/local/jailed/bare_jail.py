"""Common base of every jail: namespaces and id maps, nothing mounted yet."""

from __future__ import annotations

import functools
import resource

from ....linux import namespaces
from ....policy.seccomp import Rule, SeccompPolicy, compile_filter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ....launcher.jail.jail import JailPlan
    from ..host.facts import Host


_SET_ID = 0o6000


@functools.cache
def filter_of_jail(*more: Rule) -> bytes:
    """A filter for all of a jail's processes that refuses these bits, what `more` says, and nothing else.

    The guest's system calls do not pass it: gVisor takes them before the host's kernel sees them.
    """
    ours = SeccompPolicy.default()
    guards = tuple(rule for rule in ours.guards if any(each.mask == _SET_ID for each in rule.args))
    return compile_filter(policy=SeccompPolicy("allow", "allow", guards, more))


_NAMESPACES = (
    namespaces.CLONE_NEWUSER
    | namespaces.CLONE_NEWNS
    | namespaces.CLONE_NEWPID
    | namespaces.CLONE_NEWIPC
    | namespaces.CLONE_NEWUTS
    | namespaces.CLONE_NEWNET
    | namespaces.CLONE_NEWCGROUP
)


def bare_jail(name: str, here: Host, id_map: str, filter_program: bytes) -> JailPlan:
    """A jail to which its maker adds a program, files and more; what is not said stays shut.

    Args:
        id_map: Of users and of groups, where we are root. Whoever else we are is 0 in it, and alone.
        filter_program: Of system calls, for all that runs in it.
    """
    ids = (id_map, id_map) if here.trusted_root else (f"0 {here.uid} 1", f"0 {here.gid} 1")
    return {
        "id": name,
        "namespaces": _NAMESPACES,
        "uid_map": ids[0],
        "gid_map": ids[1],
        "deny_setgroups": not here.trusted_root,
        "uid": 0,
        "gid": 0,
        "scratch": here.scratch,
        "trees": [],
        "steps": [],
        "network": None,
        "guest": {
            "path": "",
            "image": -1,
            "disk": -1,
            "size_bytes": 0,
            "inodes": 0,
            "owner": 0,
            "steps": [],
            "has_content": False,
            "process_image": "",
            "process_image_bytes": 0,
        },
        "after": [],
        # With 0, a core_pattern with a pipe would still run as host root.
        "rlimits": [(resource.RLIMIT_CORE, 1, 1)],
        "filter": filter_program,
        "passes": 0,
        "descriptors": 0,
        "share": None,
        "view": None,
        "keep_capabilities": False,
        "argv": [],
        "env": {},
        "cgroup_dirs": [],
        "cgroup_values": [],
        "cgroup_version": 0,
        "placeholders": [],
        "note": "",
        "trusted_root": here.trusted_root,
    }
