"""From a spec to a finished plan. Decides everything that the launcher will do; starts nothing."""

from __future__ import annotations

import os
import resource
import stat

from ...launcher import wire
from ...linux import namespaces
from ...model.mount import ALWAYS_THERE, MEMORY_DIR, READ_WRITE, Mount
from ...model.session import ResolvedMount
from ...model.spec import LINEAGE
from ...policy import filters, landlock
from ..local.host import identity
from ..local.host.facts import Host
from ..local.mounts import template
from ..local.session import all_mounts, must_make, session_root, steps_of_own
from ..local.sizes import of_user
from . import ids

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ...launcher.plan import NetworkPlan, Plan, Shape, Tree
    from ...model.spec import SandboxSpec
    from ..local.host.cgroups import Group
    from ..local.mounts.disks import Disk
    from ..local.mounts.protect import Protected
    from ..local.mounts.trusted import Trusted
    from ..local.sizes import Sizes
    from .profiles import Profile
    from .request import Request

ATTACHED = "/mnt/attached"  # where live mounts are made that may be written to


class Draft:
    """A plan under way, with what only the host process keeps.

    Args:
        first_host_id: 0 where there is one user inside.
    """

    group: Group

    def __init__(self, request: Request, sandbox_id: str, first_host_id: int) -> None:
        self.request, self.spec, self.base = request, request.spec, request.base
        self.id, self.uid, self.first_host_id = sandbox_id, request.uid, first_host_id
        self.trees: list[Tree] = []
        self.steps: list[tuple[Any, ...]] = []
        self.fds: list[int] = []
        self.mounts: list[ResolvedMount] = []
        self.writable: list[str] = []
        self.protected: list[Protected] = []
        self.writable_files: list[str] = []
        self.writable_of_host: list[str] = []  # of the writable directories
        self.host_directory = False
        self.unix_sockets = False
        self.connects = False  # PID 1 makes every connection
        self.trusted: Trusted | None = None
        self.note: str | None = None  # of the journal
        self.disk: Disk | None = None  # its writable layer, where that is not in memory
        self.hostname = hostname_of(request.spec, request.spec.id or sandbox_id)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()


def hostname_of(spec: SandboxSpec, sandbox_id: str) -> str:
    """Return the name of a sandbox: a fork's is of its id, so one that is rewound keeps it."""
    if not spec.labels.get(LINEAGE):
        return template.HOSTNAME
    return f"{template.HOSTNAME}-{sandbox_id[-8:]}"


def rename(plan: Plan, hostname: str) -> None:
    """Give a plan another hostname."""
    if hostname == plan["hostname"]:
        return
    before = template.with_hostname(plan["hostname"])
    steps = dict(zip(before, template.with_hostname(hostname), strict=True))
    plan["steps"] = [steps.get(step, step) for step in plan["steps"]]
    plan["hostname"] = hostname


def make_plan(draft: Draft, host: Host) -> Plan:
    """Fill `draft` and return the plan; `draft.fds` are to be sent along and closed after."""
    spec, profile = draft.spec, draft.request.profile
    draft.writable += template.WRITABLE
    if draft.base:
        owner = draft.first_host_id, draft.uid
        draft.base.appear_to(*owner, is_trusted_root=host.trusted_root)
        draft.writable += draft.base.directories()
    if draft.trusted:
        draft.steps += draft.trusted.steps
    if profile.root_capabilities:
        draft.writable.append("/etc")
        draft.steps += [] if draft.base else template.for_accounts()
    isolated = not spec.network.is_unrestricted
    if draft.hostname != template.HOSTNAME:
        draft.steps += template.with_hostname(draft.hostname)
    if not isolated:
        draft.steps += template.as_the_host(draft.hostname)
    if draft.request.borrows_proc:
        draft.steps += [("mask", f"/proc/{name}") for name in template.NOT_OF_USERS]
    for target in ALWAYS_THERE.values():
        if target != MEMORY_DIR or not spec.memory_dir:
            draft.mounts.append(ResolvedMount(target, READ_WRITE))
    for mount in all_mounts(spec):
        _add_mount(draft, mount, host)
    workdir = session_root(spec)
    if must_make(workdir, draft.mounts, of_image=draft.spec.image is not None):
        draft.steps.append(("session_dir", workdir))
        draft.writable.append(workdir)
    if spec.deny:
        from ..local.mounts.denied import deny_paths

        steps, covered = deny_paths(spec, draft.mounts)
        draft.steps += steps
        draft.protected += covered
    return _plan(draft, host, isolated)


def _add_mount(draft: Draft, mount: Mount, host: Host) -> None:
    if not mount.is_host_path:
        _add_session_mount(draft, mount)
        return
    from ..local.mounts.protect import hold_template, prepare_mount_point, protect_mount

    index = len(draft.trees)
    tree, fd = host_tree(mount, draft.uid, draft.first_host_id, host)
    draft.trees.append(tree)
    draft.fds.append(fd)
    tree["fd"] = len(draft.fds) - 1 if host.trusted_root else -1
    # A socket of the host's may be in it, or come into it; a file stays what it was when it was pinned.
    draft.host_directory |= not stat.S_ISREG(os.fstat(draft.fds[-1]).st_mode)
    point = prepare_mount_point(mount.target, draft.trees[index]["source"], draft.mounts)
    if point is not None:
        draft.protected.append(point[0])
        draft.steps += point[0].steps
    draft.steps.append(("bind", mount.target, index))
    draft.mounts.append(ResolvedMount(mount.target, mount.access, draft.trees[index]["source"]))
    if mount.is_writable:
        if os.path.isdir(draft.trees[index]["source"]):
            draft.writable.append(mount.target)
            draft.writable_of_host.append(mount.target)
        else:
            draft.writable_files.append(mount.target)
        protected = protect_mount(mount, draft.spec, draft.trees[index])
        draft.protected.append(protected)
        draft.steps += protected.steps
    elif held := hold_template(draft.trees[index]["source"]):
        draft.protected.append(held)


def _add_session_mount(draft: Draft, mount: Mount) -> None:
    draft.steps += steps_of_own(draft.spec, mount)
    if mount.is_writable:
        draft.writable.append(mount.target)
    draft.mounts.append(ResolvedMount(mount.target, mount.access))


def host_tree(mount: Mount, uid: int, first_host_id: int, host: Host) -> tuple[Tree, int]:
    """Resolve a host path once; what is mounted later is this very inode or nothing.

    Returns a descriptor that pins it, the caller's to close and to number in the tree.

    Raises:
        InvalidRequest: It does not exist or may not be seen by the caller.
        Unsupported: See `ids.check_mount`.
    """
    from ..local.mounts import sources

    ids.check_mount(mount, first_host_id)
    # The source's owner appears as the sandbox's user, and what that one creates is the owner's.
    inside = identity.host_id(first_host_id, uid) if host.trusted_root else None
    return sources.pin(mount, inside)


def _without_sockets(draft: Draft) -> list[str]:
    """Where a socket that a guest makes would be one that the host's programs find."""
    if not draft.host_directory:
        return []
    if any(target.startswith("/home/") for target in draft.writable_of_host):
        draft.writable.append(
            template.HOME
        )  # then the rest of /home has none, and this its own rule
    return [*draft.writable_of_host, ATTACHED]


def _plan(draft: Draft, host: Host, isolated: bool) -> Plan:
    spec, size, profile = draft.spec, draft.request.sizes, draft.request.profile
    rules = landlock.plan_landlock(
        host.landlock_abi if profile.landlock else 0,
        writable=draft.writable,
        writable_files=draft.writable_files,
        without_sockets=_without_sockets(draft),
    )
    draft.connects = connects_by_init(draft, profile, rules, isolated)
    draft.unix_sockets = draft.connects or unix_sockets_allowed(draft, profile, rules, isolated)
    tag_key = new_key()
    return {
        "id": draft.id,
        "namespaces": _namespaces(isolated),
        **ids.plan(draft.first_host_id, draft.uid, host),
        "uid": draft.uid,
        "gid": draft.uid,
        "hostname": draft.hostname,
        "root_size_bytes": size.disk_bytes,
        "root_inodes": size.inodes,
        "disk": _disk(draft),
        "shared_memory_bytes": _shared_memory_bytes(draft, size),
        "scratch": host.scratch,
        "layers": draft.base.trees if draft.base else [],
        "template": draft.base.furniture(draft.uid, python_env=spec.python_env)
        if draft.base
        else template.packed(draft.uid, python_env=spec.python_env),
        "keep_capabilities": not profile.drop_capabilities,
        "root_capabilities": profile.root_capabilities,
        "forbid_user_namespaces": profile.forbid_user_namespaces,
        "trees": draft.trees,
        "steps": draft.steps,
        "rlimits": _rlimits(spec, size, host),
        "terminals": size.terminals,
        "no_new_privs": profile.no_new_privs,
        "seccomp": _filter(profile, draft, tag_key),
        "netlink_sockets": wire.MOST_NETLINK_SOCKETS,
        "connects": draft.connects,
        "tag_key": tag_key,
        "landlock": None if rules.is_empty else _landlock(rules, host, draft.spec),
        "cgroup_dirs": [],
        "cgroup_values": [],
        "cgroup_version": 0,
        "programs_cgroups": [],
        "memory_watchdog_bytes": 0,
        "releases_idle_pages": profile.policy is None,
        "placeholders": [],
        "note": "",
        "trusted_root": host.trusted_root,
        "borrows_proc": draft.request.borrows_proc,
        "network": _network(spec),
    }


def _disk(draft: Draft) -> Tree | None:
    """The tree of the writable layer; a mount of ours is the last of the descriptors sent along."""
    if draft.disk is None:
        return None
    if draft.disk.fd >= 0:
        draft.fds.append(os.dup(draft.disk.fd))
        return {**draft.disk.tree, "fd": len(draft.fds) - 1}
    return draft.disk.tree


def _shared_memory_bytes(draft: Draft, size: Sizes) -> int:
    """Return the size of /dev/shm where the root is a directory on disk, which would make it slow.

    It is half of the memory, as what lies there outlives its program.
    """
    return size.memory_bytes // 2 if draft.disk is not None and draft.disk.path else 0


def new_key() -> int:
    """With which PID 1, and nobody else, sets the tag of a process tree: 64 random bits, and not 0."""
    return int.from_bytes(os.urandom(8), "big") or 1


def _network(spec: SandboxSpec) -> NetworkPlan | None:
    if spec.network.is_none or spec.network.is_unrestricted:
        return None
    from ..local.routes import plan_for

    return plan_for(spec.network)


def shape_of(plan: Plan) -> Shape:
    """The part of a plan that the zygote is sent."""
    return {name: plan[name] for name in _SHAPE}  # type: ignore[literal-required,return-value]


# The keys of launcher.plan.Shape, whose module is for type checkers only.
_SHAPE = (
    "id",
    "namespaces",
    "uid_map",
    "gid_map",
    "id_helpers",
    "deny_setgroups",
    "setup_uid",
    "setup_gid",
    "uid",
    "gid",
    "hostname",
    "root_size_bytes",
    "root_inodes",
    "disk",
    "shared_memory_bytes",
    "scratch",
    "layers",
    "template",
    "keep_capabilities",
    "root_capabilities",
    "forbid_user_namespaces",
    "cgroup_dirs",
    "cgroup_values",
    "cgroup_version",
    "programs_cgroups",
    "trees",
    "placeholders",
    "note",
    "trusted_root",
    "borrows_proc",
)


def _namespaces(isolated: bool) -> int:
    flags = namespaces.CLONE_NEWUSER | namespaces.CLONE_NEWNS | namespaces.CLONE_NEWPID
    flags |= namespaces.CLONE_NEWIPC | namespaces.CLONE_NEWUTS
    return flags | namespaces.CLONE_NEWNET if isolated else flags


def _rlimits(spec: SandboxSpec, size: Sizes, host: Host) -> list[tuple[int, int, int]]:
    limits = {
        resource.RLIMIT_CORE: 1,  # with 0, a core_pattern with a pipe would still run as host root
        resource.RLIMIT_NOFILE: size.open_files,
        **of_user(is_own=host.trusted_root),
        resource.RLIMIT_RTPRIO: 0,
    }
    if spec.limits.disk_bytes:
        limits[resource.RLIMIT_FSIZE] = size.disk_bytes
    return [(which, value, value) for which, value in limits.items()]


def unix_sockets_allowed(
    draft: Draft, profile: Profile, rules: landlock.LandlockPlan, isolated: bool
) -> bool:
    """Return whether unix sockets by path are safe: none of the host's can be reached.

    A read-only mount does not stop connect() to a host socket in it, nor does the host's own
    network hide its abstract sockets; Landlock can, from ABI 9 and 6 on.
    """
    if profile.unix_sockets is not None:
        return profile.unix_sockets
    by_path = not draft.host_directory or rules.refuses_host_sockets
    return by_path and (isolated or rules.refuses_abstract_sockets)


def connects_by_init(
    draft: Draft, profile: Profile, rules: landlock.LandlockPlan, isolated: bool
) -> bool:
    """Return whether Unix sockets are safe because PID 1 makes every connection: see
    `launcher.pid1.connects`.

    Landlock must forbid making sockets in the host's directories. PID 1 has one user's rights, and
    a custom system-call filter might block its work.
    """
    if not draft.host_directory:
        return False
    from . import connecting

    return (
        not rules.refuses_host_sockets
        and profile.unix_sockets is None
        and profile.seccomp
        and profile.policy is None
        and profile.drop_capabilities
        and not profile.root_capabilities
        and bool(rules.handled_fs & landlock.MAKE_SOCK)
        and (isolated or rules.refuses_abstract_sockets)
        and not draft.request.borrows_proc  # of threads, /proc has other numbers
        and not connecting.why_not()
    )


def _filter(profile: Profile, draft: Draft, tag_key: int) -> bytes:
    if not profile.seccomp:
        return b""
    unix_sockets = draft.unix_sockets
    if profile.policy is None:
        return filters.load_filter(
            allow_af_unix=unix_sockets,
            by_init=draft.connects,
            debug=profile.tracing,
            tag_key=tag_key,
        )
    from ...policy.seccomp import FilterOptions, compile_filter

    options = FilterOptions(allow_af_unix=unix_sockets, debug=profile.tracing, tag_key=tag_key)
    return compile_filter(options, policy=profile.policy)


def _landlock(
    rules: landlock.LandlockPlan, host: Host, spec: SandboxSpec
) -> tuple[int, int, int, int, list[tuple[str, int]]]:
    scoped = rules.scoped
    if LINEAGE in spec.labels:
        # A copied process has a Landlock domain beside PID 1's, which has to be able to end it. The PID
        # namespace keeps signals inside.
        scoped &= ~landlock.SCOPE_SIGNAL
    return rules.handled_fs, rules.handled_net, scoped, host.landlock_abi, list(rules.rules)
