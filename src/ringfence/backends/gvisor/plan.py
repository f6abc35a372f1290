"""From a spec to a hull around gVisor. Decides everything that the launcher will do; starts nothing."""

from __future__ import annotations

import json
import os
import resource

from ...errors import InvalidRequest, Unsupported
from ...guest.users import MAPPER
from ...launcher import still_program
from ...linux import namespaces
from ...model.mount import ALWAYS_THERE, MEMORY_DIR, READ_WRITE, Mount
from ...model.session import ResolvedMount
from ...model.spec import DEBUG, OS_HARDENED, OWN_ROOT, STRONG, UNRESTRICTED, SandboxSpec
from ..local import agent_code, identity, setid, sources, template
from ..local.accounts import check_profile
from ..local.network import check_given_secrets
from ..local.protect import Protected, check_names, protect_mount
from ..local.session import (
    all_mounts,
    check_least,
    check_sources,
    is_below,
    must_make,
    session_root,
)
from . import statx, waits
from .limits import host_pids

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ...guest.settings import Settings
    from ...launcher.hull import HullPlan
    from ...launcher.plan import NetworkPlan
    from ..local.host import Host
    from ..local.images import Held
    from ..local.sizes import Sizes
    from ..local.trusted import Trusted
    from .runsc import Runsc
    from .views import Views

    Steps = list[tuple[Any, ...]]

NAME = "gvisor"
PROFILES = (OS_HARDENED, OWN_ROOT, DEBUG, UNRESTRICTED)
_MIB = 1 << 20
ROOTFS = "/bundle/rootfs"
STATE = "/state"
MEMORY = "checkpoint.img"  # as runsc names it
RUNSC = "/bin/runsc"
_MOUNTS = "/mounts"
_AGENT = "/.ringfence"
STILL = f"{_AGENT}/{agent_code.NAME}"
_ENVIRONMENT = {"PATH": template.PATH, "LC_ALL": "C"}
_SAVED = "/saved"
_MAPS = ["/proc/1/uid_map", "/proc/1/gid_map"]
_ALL_IDS = 65536
_LEAST = {
    "open_files": (64, "PID 1 of the sandbox lives under it too"),
    "memory_bytes": (32 * _MIB, "PID 1 of the sandbox lives in it too"),
    "inodes": (256, "the sandbox's own directories are some of them"),
}
_DEVICES = ("null", "zero", "full", "random", "urandom")
# What the agent needs of its own kernel before it enters a user namespace.
_CAPABILITIES = [
    f"CAP_{name}"
    for name in (
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "KILL",
        "SETGID",
        "SETPCAP",
        "SETUID",
        "SYS_ADMIN",
        "SYS_RESOURCE",
    )
]


class Draft:
    """A plan under way, with what only the host process keeps.

    Args:
        first_host_id: 0 when rootless.
    """

    def __init__(
        self,
        spec: SandboxSpec,
        sandbox_id: str,
        uid: int,
        first_host_id: int,
        image: Held | None = None,
    ) -> None:
        self.spec, self.id, self.uid, self.first_host_id = spec, sandbox_id, uid, first_host_id
        self.image = image
        self.guest, self.trees = (
            (template.image_guest_root(uid), []) if image else template.guest_root(uid)
        )
        self.hull: Steps = []
        self.after: Steps = []
        self.shown: list[dict[str, Any]] = []  # mounts of the guest's, as OCI has them
        self.fds: list[int] = []
        self.mounts: list[ResolvedMount] = []
        self.protected: list[Protected] = []
        self.note: str | None = None  # of the journal
        self.trusted: Trusted | None = None
        self.shares_pages = ""  # why, where it does

    def close(self) -> None:
        """Close what pinned the mount sources."""
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()


def check(spec: SandboxSpec) -> None:
    """Refuse what this backend does not do, before anything is made."""
    if spec.tier != STRONG:
        raise Unsupported(
            f"gVisor is tier {STRONG}",
            backend=NAME,
            operation=f"tier {spec.tier}",
            field="tier",
            hint=f"ask for tier {STRONG}, or leave the backend to Ringfence",
        )
    if spec.template != "default":
        raise InvalidRequest(
            f"unknown template {spec.template!r}", field="template", hint="one of default"
        )
    if spec.profile not in PROFILES:
        raise InvalidRequest(
            f"unknown profile {spec.profile!r}", field="profile", hint=f"one of {PROFILES}"
        )
    check_profile(spec.profile, NAME)
    identity.uid_of(spec.user)
    check_network(spec)
    limits = ("io_bytes_per_s", "idle_timeout_s")
    for operation, field, asked in (
        ("denied_paths", "deny", bool(spec.deny)),
        *((f"limit {n}", f"limits.{n}", getattr(spec.limits, n) is not None) for n in limits),
    ):
        if asked:
            raise Unsupported(backend=NAME, operation=operation, field=field)
    check_least(spec, _LEAST)
    check_sources(spec)
    check_names(spec.unprotect)


def check_network(spec: SandboxSpec) -> None:
    """Rules go through the egress engine; the host's own network is not had."""
    if spec.network.is_unrestricted:
        raise Unsupported(
            "gVisor on the host's network would open its control socket to every user of the host",
            backend=NAME,
            operation="network unrestricted",
            field="network",
            hint="name what may be reached, or use tier light",
        )
    check_given_secrets(spec)


def make_plan(
    draft: Draft,
    host: Host,
    runsc: Runsc,
    size: Sizes,
    *,
    has_content: bool,
    memory: str = "",
    still_bytes: int = 0,
    views: Views | None = None,
    tenant: str = "",
) -> HullPlan:
    """Fill `draft` and return the plan; `draft.fds` are to be sent along and closed after.

    Args:
        memory: A file with what a guest had in memory, to be continued.
        still_bytes: How large the agent is that has started already; 0: there is none.
        views: Who serves what the host shows; None: the guest has the host's own pages.
        tenant: Whose view it is.
    """
    # It lies in the guest's root until it runs, and finds its files where the host has them: not on
    # an image, whose files are a stranger's, nor where the root is small or filled already.
    starts_still = 0 < still_bytes * 2 <= size.disk_bytes and not (has_content or draft.image)
    below = _show_image(draft, draft.image, host) if draft.image else -1
    _show_python(draft)
    if draft.trusted is not None:
        draft.guest += draft.trusted.steps
    _add_mounts(draft, host)
    _make_workdir(draft)
    # The host's ids inside the guest's root: see `id_map`. What is not the guest's is its root's.
    others = draft.uid if host.trusted_root else 0
    _preload(draft, statx.is_needed(runsc.released))
    draft.guest.append(("dir", _AGENT, 0o700, False))
    if os.uname().machine == "x86_64":
        told = id_map(draft.uid, several=host.trusted_root).encode()
        content, mode = told.ljust(still_program.ERRAND_BYTES), 0o600
        if not starts_still:
            content, mode = still_program.writing(dict.fromkeys(_MAPS, told)), 0o700
        draft.guest.append(("file", f"{_AGENT}/{MAPPER}", content, mode))
    if not starts_still:
        draft.guest.append(("file", f"{_AGENT}/{agent_code.NAME}", agent_code.packed(), 0o600))
    if draft.spec.profile == OWN_ROOT and not draft.image:
        draft.guest += template.for_accounts()
    if not host.trusted_root and not draft.image:
        # Without root all there belongs to the one id that there is: so it is read-only besides.
        draft.after.append(("protect", f"{ROOTFS}/etc"))
    view = None
    if views is not None:
        shown = [i for i, tree in enumerate(draft.trees) if not tree["inode"]]
        view = views.plan(draft, tenant, shown, below)
    _furnish_hull(draft, runsc, starts_still=starts_still)
    if memory:
        verb = "image_dir" if draft.image else "dir"
        draft.guest.append((verb, "/sys", 0o755, False))  # gVisor makes it itself, but not again
        draft.hull.append(("dir", _SAVED, 0o755, False))
        draft.hull.append(("show", f"{_SAVED}/{MEMORY}", len(draft.trees), False))
        draft.trees.append(template.tree(memory, template.READ_ONLY))
    ids = f"0 {host.uid} 1", f"0 {host.gid} 1"
    if host.trusted_root:
        ids = (identity.slot_map(draft.first_host_id, draft.uid),) * 2
    return {
        "id": draft.id,
        "namespaces": NAMESPACES,
        "uid_map": ids[0],
        "gid_map": ids[1],
        "deny_setgroups": not host.trusted_root,
        "uid": 0,
        "gid": 0,
        "scratch": host.scratch,
        "trees": draft.trees,
        "steps": draft.hull,
        "network": _network(draft.spec),
        "guest": {
            "path": ROOTFS,
            "image": below,
            "size_bytes": size.disk_bytes,
            "inodes": size.inodes,
            "owner": others,
            "steps": draft.guest,
            "has_content": has_content,
            "still": STILL if starts_still else "",
        },
        "after": draft.after,
        "rlimits": [(which, value, value) for which, value in _rlimits(size).items()],
        "filter": setid.filter_of_hull(waits.NO_REGISTERING),
        "passes": 0,
        "descriptors": waits.DESCRIPTORS,
        "share": None,
        "view": view,
        "keep_capabilities": True,
        "argv": [
            RUNSC,
            f"--root={STATE}",
            *runsc.flags(rootless=not host.trusted_root, network=not draft.spec.network.is_none),
            *(("restore", f"--image-path={_SAVED}") if memory else ("run",)),
            "--bundle=/bundle",
            draft.id,
        ],
        "env": {"PATH": "/bin"},
        "cgroup_dirs": [],
        "cgroup_values": [],
        "cgroup_version": 0,
        "placeholders": [made for part in draft.protected for made in part.placeholders],
        "note": "",
        "trusted_root": host.trusted_root,
    }


def still() -> dict[str, Any]:
    """What the keeper is told to take a still of; the agent's code comes along."""
    return {
        "argv": agent_code.argv_of_still(),
        "env": _ENVIRONMENT,
        "place": STILL,
        "errand": (f"{_AGENT}/{MAPPER}", _MAPS),
    }


def _network(spec: SandboxSpec) -> NetworkPlan | None:
    if spec.network.is_none:
        return None
    from ..local.routes import plan_for

    return plan_for(spec.network)


NAMESPACES = (
    namespaces.CLONE_NEWUSER
    | namespaces.CLONE_NEWNS
    | namespaces.CLONE_NEWPID
    | namespaces.CLONE_NEWIPC
    | namespaces.CLONE_NEWUTS
    | namespaces.CLONE_NEWNET
    | namespaces.CLONE_NEWCGROUP
)


def _rlimits(size: Sizes) -> dict[int, int]:
    """Of gVisor's own processes; all count for this sandbox's user namespace alone (Linux 5.14)."""
    return {
        resource.RLIMIT_CORE: 1,  # with 0, a core_pattern with a pipe would still run as host root
        resource.RLIMIT_NPROC: host_pids(size.pids),
    }


def settings(draft: Draft, host: Host, size: Sizes) -> Settings:
    """What the agent is told first."""
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: size.open_files,
        resource.RLIMIT_DATA: size.memory_bytes,
    }
    if draft.spec.limits.disk_bytes:
        limits[resource.RLIMIT_FSIZE] = size.disk_bytes
    return {
        "own_kernel": True,
        "uid": draft.uid,
        "id_map": id_map(draft.uid, several=host.trusted_root),
        "pids": size.pids,
        "memory_bytes": size.memory_bytes,
        "counts_cpu": draft.spec.limits.cpus is None,
        "rlimits": [(which, value, value) for which, value in limits.items()],
        "seccomp": b"",
        "tag_key": 0,
        "covered": [],
        "room": None,
        "place": _AGENT,
    }


def id_map(uid: int, *, several: bool) -> str:
    """The ids that a guest sees, for those by which gVisor serves it files: there its user is 0.

    That is who gVisor's file server is in the hull, so that what the guest makes is made by its
    owner, also where no other id exists. The guest's root is, in exchange, the user's number.
    """
    if uid == 0:
        return f"0 0 {_ALL_IDS if several else 1}"
    if not several:
        return f"{uid} 0 1\n0 1 1"
    extents = [f"0 {uid} 1", f"{uid} 0 1"]
    if uid > 1:
        extents.append(f"1 1 {uid - 1}")
    if uid + 1 < _ALL_IDS:
        extents.append(f"{uid + 1} {uid + 1} {_ALL_IDS - uid - 1}")
    return "\n".join(extents)


# -- the guest's root -------------------------------------------------------------------------


def _show_image(draft: Draft, image: Held, host: Host) -> int:
    """The index of its tree: all its files are the guest user's, who is 0 in the hull."""
    image.appear_as(draft.first_host_id, host.trusted_root)
    draft.fds.append(os.open(image.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    image.tree["fd"] = len(draft.fds) - 1 if host.trusted_root else -1
    draft.trees.append(image.tree)
    return len(draft.trees) - 1


def _show_python(draft: Draft) -> None:
    wanted = list(agent_code.interpreter()[1])
    if draft.image:
        wanted = agent_code.foreign_trees()
    elif draft.spec.python_env:
        wanted += [each for each in template.python_environment() if each not in wanted]
    for source, target, attributes in wanted:
        draft.guest.append(("bind", target, len(draft.trees)))
        draft.trees.append(template.tree(source, attributes))


def _preload(draft: Draft, needs_statx: bool) -> None:
    """What every program with a C library starts with: an image's own would be in the agent too."""
    verb, *replace = ("image_file", True) if draft.image else ("file",)
    if needs_statx:
        draft.guest.append((verb, statx.LIBRARY, statx.library(), 0o644, *replace))
    if needs_statx or draft.image:
        content = statx.LIBRARY.encode() + b"\n" if needs_statx else b""
        draft.guest.append((verb, statx.PRELOAD, content, 0o644, *replace))


def _add_mounts(draft: Draft, host: Host) -> None:
    spec = draft.spec
    for target in ALWAYS_THERE.values():
        if target != MEMORY_DIR or not spec.memory_dir:
            draft.mounts.append(ResolvedMount(target, READ_WRITE))
    wanted = all_mounts(spec)
    for i, mount in enumerate(wanted):
        hidden = any(is_below(mount.target, later.target) for later in wanted[i + 1 :])
        if mount.is_host_path:
            _add_host_mount(draft, mount, host, hidden)
        else:
            _add_session_mount(draft, mount, hidden)


def _add_host_mount(draft: Draft, mount: Mount, host: Host, hidden: bool) -> None:
    """Bound in the hull and served by a connection of its own, which looks again at every use."""
    owner = draft.first_host_id if host.trusted_root else None
    tree, fd = sources.pin(mount, owner)
    draft.fds.append(fd)
    tree["fd"] = len(draft.fds) - 1 if host.trusted_root else -1
    place = f"{_MOUNTS}/{len(draft.trees)}"
    draft.after.append(("bind", place, len(draft.trees)))
    draft.trees.append(tree)
    draft.mounts.append(ResolvedMount(mount.target, mount.access, tree["source"]))
    if mount.is_writable:
        protected = protect_mount(mount, draft.spec, tree)
        draft.protected.append(protected)
        # Decided for where the guest sees it; done where the hull has it.
        draft.after += [
            (verb, place + path.removeprefix(mount.target)) for verb, path in protected.steps
        ]
    if not hidden:
        _show(draft, mount, place)


def _show(draft: Draft, mount: Mount, source: str) -> None:
    access = "rw" if mount.is_writable else "ro"
    draft.shown.append(
        {
            "destination": mount.target,
            "type": "bind",
            "source": source,
            "options": ["rbind", access, "nosuid", "nodev"],
        }
    )


def _add_session_mount(draft: Draft, mount: Mount, hidden: bool) -> None:
    draft.mounts.append(ResolvedMount(mount.target, mount.access))
    if hidden:
        return
    if not mount.source:
        draft.guest.append(("session_dir", mount.target))
        if not mount.is_writable:
            draft.guest.append(("protect", mount.target))
        return
    source = f"{session_root(draft.spec)}/{mount.source}"
    draft.guest.append(("session_dir", source))
    if not mount.is_writable:
        _show(draft, mount, ROOTFS + source)
        return
    # A second way to the same files would be cached apart by gVisor: one would lag behind.
    parent = os.path.dirname(mount.target)
    if parent != "/" and not any(step[:2] == ("dir", parent) for step in draft.guest):
        draft.guest.append(("session_dir", parent))
    draft.guest.append(("symlink", mount.target, source))


def _make_workdir(draft: Draft) -> None:
    workdir = session_root(draft.spec)
    if must_make(workdir, draft.mounts, of_image=draft.image is not None):
        draft.guest.append(("session_dir", workdir))


# -- the hull ---------------------------------------------------------------------------------


def _furnish_hull(draft: Draft, runsc: Runsc, *, starts_still: bool) -> None:
    """What gVisor's own processes see of the host: its program, and five devices."""
    names = ("/bin", "/dev", "/proc", "/tmp", STATE, _MOUNTS, "/bundle", ROOTFS)
    draft.hull += [("dir", name, 0o755, False) for name in names]
    shown: list[tuple[str, str, int]] = [(runsc.path, RUNSC, template.READ_ONLY)]
    shown += [(f"/dev/{name}", f"/dev/{name}", template.DEVICE) for name in _DEVICES]
    for source, target, attributes in shown:
        draft.hull.append(("show", target, len(draft.trees), False))
        draft.trees.append(template.tree(source, attributes))
    foreign = draft.image is not None
    argv = [STILL] if starts_still else agent_code.argv(_AGENT, foreign=foreign)
    bundle = json.dumps(_bundle(draft, argv)).encode()
    draft.hull.append(("file", "/bundle/config.json", bundle, 0o600))


def _bundle(draft: Draft, argv: list[str]) -> dict[str, Any]:
    """The OCI runtime specification of the one container in a sandbox."""
    own = ["pid", "ipc", "uts", "mount"]
    if draft.spec.network.is_none:
        own.append("network")  # else gVisor's is the hull's, which leads to our two sockets
    return {
        "ociVersion": "1.0.2",
        "hostname": template.HOSTNAME,
        "root": {"path": "rootfs", "readonly": False},
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": argv,
            "env": [f"{name}={value}" for name, value in _ENVIRONMENT.items()],
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), _CAPABILITIES),
        },
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
            *draft.shown,
        ],
        "linux": {
            "namespaces": [{"type": name} for name in own],
        },
    }
