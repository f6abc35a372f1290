"""From a spec to a hull around an emulator, and what the machine in it is told. Decides; starts nothing."""

from __future__ import annotations

import os
import resource
import time

from ...errors import InvalidRequest, Unsupported
from ...guest.machine import SHARES
from ...linux import namespaces
from ...model.limits import Limits
from ...model.mount import ALWAYS_THERE, MEMORY_DIR, READ_WRITE, Mount
from ...model.session import ResolvedMount
from ...model.spec import DEBUG, OS_HARDENED, OWN_ROOT, STRONG, UNRESTRICTED, SandboxSpec
from ..local import identity, setid, sources, template
from ..local.host import host
from ..local.network import check_given_secrets
from ..local.protect import Protected, check_names, prepare_mount_point, protect_mount
from ..local.session import (
    all_mounts,
    check_least,
    check_sources,
    must_make,
    session_root,
    steps_of_own,
)
from ..local.sizes import sizes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ...guest.machine import Rising, Waking
    from ...launcher.hull import HullPlan
    from ...launcher.plan import Tree
    from ..local.host import Host
    from ..local.images import Held
    from ..local.sizes import Sizes
    from ..local.trusted import Trusted

    Steps = list[tuple[Any, ...]]

NAME = "microvm"
PROFILES = (OS_HARDENED, DEBUG, OWN_ROOT, UNRESTRICTED)
_MIB = 1 << 20
DEFAULT_MEMORY = 1 << 30
EMULATOR_BYTES = 768 << 20  # translated code, and the emulator itself
EMULATOR_PIDS = 256  # its threads
_SHARE, _MOUNTS = SHARES  # the hull has them by the names that the guest has
_SHARE_BYTES, _SHARE_INODES = 1 << 20, 1024  # mount points only
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_OF_THE_EMULATOR = ("null", "zero", "urandom")
_LEAST = {
    "open_files": (64, "the agent lives under it too"),
    "memory_bytes": (32 * _MIB, "every exec lives in it"),
    "inodes": (256, "the sandbox's own directories are some of them"),
}
_NO_HOST = "a machine has no network device that could lead to the host's own network"
NO_DENIAL = "it is the guest's own kernel alone that could hide them"
_NAMESPACES = (
    namespaces.CLONE_NEWUSER
    | namespaces.CLONE_NEWNS
    | namespaces.CLONE_NEWPID
    | namespaces.CLONE_NEWIPC
    | namespaces.CLONE_NEWUTS
    | namespaces.CLONE_NEWNET
    | namespaces.CLONE_NEWCGROUP
)


def refusal(operation: str, field: str, why: str = "", hint: str = "") -> Unsupported:
    """What this backend says to a wish that it does not fulfil."""
    return Unsupported(why, backend=NAME, operation=operation, field=field, hint=hint)


def check(spec: SandboxSpec) -> None:
    """Refuse what this backend does not do, before anything is made."""
    if spec.tier != STRONG:
        raise refusal(f"tier {spec.tier}", "tier", f"a microVM is tier {STRONG}")
    if spec.template != "default":
        raise InvalidRequest(f"unknown template {spec.template!r}", field="template")
    if spec.profile not in PROFILES:
        raise InvalidRequest(f"unknown profile {spec.profile!r}", field="profile")
    identity.uid_of(spec.user)
    if spec.network.is_unrestricted:
        hint = "name what may be reached, or use tier light"
        raise refusal("network unrestricted", "network", _NO_HOST, hint)
    check_given_secrets(spec)
    limits = ("io_bytes_per_s", "idle_timeout_s")
    for operation, field, asked, why in (
        ("denied_paths", "deny", spec.deny, NO_DENIAL),
        *((f"limit {n}", f"limits.{n}", getattr(spec.limits, n) is not None, "") for n in limits),
    ):
        if asked:
            raise refusal(operation, field, why)
    check_least(spec, _LEAST)
    check_sources(spec)
    check_names(spec.unprotect)


def sizes_of(spec: SandboxSpec, host: Host) -> Sizes:
    """As everywhere, but for memory: what a machine has is taken from the host for good."""
    size = sizes(spec, host)
    if spec.limits.memory_bytes is None:
        least = Limits(memory_bytes=min(DEFAULT_MEMORY, size.memory_bytes))
        small = sizes(SandboxSpec(limits=least), host)
        size.memory_bytes = small.memory_bytes
        size.disk_bytes = spec.limits.disk_bytes or small.disk_bytes
        size.inodes = spec.limits.inodes or small.inodes
    return size


class Draft:
    """A plan under way.

    Args:
        first_host_id: 0 when rootless.
        image: What the root is of; None: the template's.

    Attributes:
        shown: What the machine sees of the host, an image's files first.
        mounted: What the user mounts of it.
        fds: What pins the files of both, until the hull is there.
        inner: What the machine does with mounts once it has its root.
        after: What is done in the hull with those of the user's, by which they hold.
    """

    def __init__(
        self, spec: SandboxSpec, sandbox_id: str, first_host_id: int, image: Held | None = None
    ) -> None:
        self.spec, self.id, self.first_host_id = spec, sandbox_id, first_host_id
        self.uid, self.image = identity.uid_of(spec.user), image
        self.shown: list[Tree] = []
        self.guest: Steps = []
        self.fds: list[int] = []
        self.trusted: Trusted | None = None
        self.mounted: list[Tree] = []
        self.inner: Steps = []
        self.after: Steps = []
        self.protected: list[Protected] = []
        self.note: str | None = None  # of the journal
        self.mounts: list[ResolvedMount] = []
        if image is None:
            guest, self.shown = template.guest_root(self.uid)
            self.guest += [step for step in guest if step[1] != "/proc"]
        else:
            self._show_image(image)
        if spec.profile == OWN_ROOT:
            self.guest += template.for_accounts()
        if spec.python_env:
            for source, target, attributes in template.python_environment():
                self.guest.append(("bind", target, len(self.shown)))
                self.shown.append(template.tree(source, attributes))
        for target in ALWAYS_THERE.values():
            if target != MEMORY_DIR or not spec.memory_dir:
                self.mounts.append(ResolvedMount(target, READ_WRITE))
        for mount in all_mounts(spec):
            if mount.is_host_path:
                self._add_host_mount(mount)
            else:
                self._add_session_mount(mount)

    def _add_host_mount(self, mount: Mount) -> None:
        trusted = host().trusted_root
        tree, fd = sources.pin(mount, self.first_host_id if trusted else None)
        self.fds.append(fd)
        tree["fd"] = len(self.fds) - 1 if trusted else -1
        place = f"{_MOUNTS}/{len(self.mounted)}"
        point = prepare_mount_point(mount.target, tree["source"], self.mounts)
        if point is not None:
            # Where it is to be, another one is there already: made in that one, as the hull has it.
            self.protected.append(point[0])
            self._hold(point[0], point[1])
        self.after.append(("bind", place, len(self.mounted)))
        self.inner.append(("bind", mount.target, len(self.mounted)))
        self.mounted.append(tree)
        self.mounts.append(ResolvedMount(mount.target, mount.access, tree["source"]))
        if mount.is_writable:
            self.protected.append(protect_mount(mount, self.spec, tree))
            self._hold(self.protected[-1], mount.target)

    def _hold(self, protected: Protected, target: str) -> None:
        """Decided for where the machine has a mount; done where the hull has it."""
        hosts = [each.target for each in self.mounts if each.host_path]
        place = f"{_MOUNTS}/{hosts.index(target)}"
        self.after += [
            (verb, place + path.removeprefix(target), *rest)
            for verb, path, *rest in protected.steps
        ]

    def _add_session_mount(self, mount: Mount) -> None:
        self.inner += steps_of_own(self.spec, mount)
        self.mounts.append(ResolvedMount(mount.target, mount.access))

    def trust(self, trusted: Trusted) -> None:
        """Have programs inside believe who ends their TLS."""
        self.trusted, self.guest = trusted, [*self.guest, *trusted.steps]

    def _show_image(self, image: Held) -> None:
        trusted = host().trusted_root
        image.appear_as(self.first_host_id, trusted)
        self.fds.append(os.open(image.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        image.tree["fd"] = 0 if trusted else -1
        self.shown.append(image.tree)

    def sources(self) -> list[str]:
        """What the machine sees of the host, in the order in which it knows of it."""
        return [tree["source"] for tree in (*self.shown, *self.mounted)]

    def close(self) -> None:
        """Close what pinned the files."""
        while self.fds:
            os.close(self.fds.pop())


def hull(draft: Draft, here: Host, argv: list[str], files: dict[str, str], passes: int) -> HullPlan:
    """The emulator's walls: what it sees of the host is its program, and what the guest sees.

    Args:
        files: Of the host, by where the emulator finds them.
    """
    trees: list[Tree] = list(draft.shown)
    share: Steps = [
        ("show", f"/{i}", i, os.path.isdir(tree["source"])) for i, tree in enumerate(trees)
    ]
    steps: Steps = [
        ("dir", name, 0o755, False) for name in ("/dev", "/proc", "/tmp", "/etc", "/boot", *SHARES)
    ]
    wanted = [each for each in template.shown() if not each[1].startswith(("/etc", "/dev"))]
    wanted += [(source, target, template.READ_ONLY) for target, source in files.items()]
    wanted += [(f"/dev/{name}", f"/dev/{name}", template.DEVICE) for name in _OF_THE_EMULATOR]
    if os.path.exists("/etc/ld.so.cache"):
        wanted.append(("/etc/ld.so.cache", "/etc/ld.so.cache", template.READ_ONLY))
    for source, target, attributes in wanted:
        steps.append(("show", target, len(trees), os.path.isdir(source)))
        trees.append(template.tree(source, attributes))
    steps += [step for step in template.links() if step[1].count("/") == 1 and step[0] == "symlink"]
    after: Steps = []
    for verb, path, *rest in draft.after:
        after.append((verb, path, len(trees) + rest[0]) if verb == "bind" else (verb, path, *rest))
    trees += draft.mounted
    owners = {str(i): draft.uid for i in range(len(draft.mounted))}
    ids = f"0 {here.uid} 1", f"0 {here.gid} 1"
    if here.trusted_root:
        ids = (f"0 {draft.first_host_id} 1",) * 2
    return {
        "id": draft.id,
        "namespaces": _NAMESPACES,
        "uid_map": ids[0],
        "gid_map": ids[1],
        "deny_setgroups": not here.trusted_root,
        "uid": 0,
        "gid": 0,
        "scratch": here.scratch,
        "trees": trees,
        "steps": steps,
        "network": None,
        "guest": {
            "path": _SHARE,
            "image": -1,
            "size_bytes": _SHARE_BYTES,
            "inodes": _SHARE_INODES,
            "owner": 0,
            "steps": share,
            "has_content": False,
            "still": "",
        },
        "after": after,
        "rlimits": [(resource.RLIMIT_CORE, 1, 1)],  # with 0, a core_pattern's pipe would run
        "filter": setid.filter_of_hull(),
        "passes": passes,
        "descriptors": 0,
        "view": None,
        "share": {"shown": _SHARE, "mounts": _MOUNTS, "owners": owners},
        "keep_capabilities": False,
        "argv": argv,
        "env": {"PATH": "/usr/bin"},
        "cgroup_dirs": [],
        "cgroup_values": [],
        "cgroup_version": 0,
        "placeholders": [made for part in draft.protected for made in part.placeholders],
        "note": "",
        "trusted_root": here.trusted_root,
    }


def rising() -> Rising:
    """What a machine is told that goes on: it is not the one that was written down, nor another one."""
    return {
        "now_ns": time.time_ns(),
        "entropy": os.urandom(64),
    }


def waking(draft: Draft, size: Sizes) -> Waking:
    """What the machine is told: nothing in it is any other machine's."""
    shown = [(f"{_SHARE}/{i}", template.READ_ONLY) for i in range(len(draft.shown))]
    steps = list(draft.guest)
    if draft.image:
        devices, furnishing = template.image_root(draft.uid, first=len(shown))
        shown += [(tree["source"], tree["attributes"]) for tree in devices]
        steps = [*furnishing, *steps]
    else:
        for name in _DEVICES:
            steps.append(("show", f"/dev/{name}", len(shown), False))
            shown.append((f"/dev/{name}", template.DEVICE))
        steps += [*template.after_binds(), ("protect", "/proc/sys")]
    for verb, path, *rest in draft.inner:
        if verb == "bind":
            tree = draft.mounted[rest[0]]
            shown.append((f"{_MOUNTS}/{rest[0]}", tree["attributes"]))
            rest = [len(shown) - 1]
        steps.append((verb, path, *rest))
    workdir = session_root(draft.spec)
    if must_make(workdir, draft.mounts, of_image=draft.image is not None):
        steps.append(("session_dir", workdir))
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: size.open_files}
    if draft.spec.limits.disk_bytes:
        limits[resource.RLIMIT_FSIZE] = size.disk_bytes
    return {
        "hostname": template.HOSTNAME,
        "now_ns": time.time_ns(),
        "entropy": os.urandom(64),
        "size_bytes": size.disk_bytes,
        "inodes": size.inodes,
        "memory_bytes": size.memory_bytes,
        "uid": draft.uid,
        "gid": draft.uid,
        "steps": steps,
        "trees": shown,
        "image": 0 if draft.image else -1,
        "agent": {
            "own_kernel": True,
            "uid": draft.uid,
            "id_map": "0 0 65536",
            "pids": size.pids,
            "memory_bytes": 0,
            # A machine that is kept waiting for a processor does not know it: its guest counts on.
            "counts_cpu": draft.spec.limits.cpus is None,
            "rlimits": [(which, value, value) for which, value in limits.items()],
            "seccomp": b"",
            "tag_key": 0,
            "covered": [],
            "place": "",
        },
    }
