"""Plan of a jail around an emulator, and of the machine in it, for a spec. Decides; starts nothing."""

from __future__ import annotations

import os
import resource
import time

from ...errors import InvalidRequest, Unsupported
from ...guest.machine import SHARES
from ...model import capabilities as can
from ...model.limits import Limits
from ...model.mount import ALWAYS_THERE, MEMORY_DIR, READ_WRITE
from ...model.session import ResolvedMount
from ...model.spec import DEBUG, OS_HARDENED, OWN_ROOT, STRONG, UNRESTRICTED, SandboxSpec
from ...policy.protected import check_names
from ..local.host import identity
from ..local.host.facts import host
from ..local.jailed.bare_jail import bare_jail, filter_of_jail
from ..local.mounts import template
from ..local.network import check_given_secrets
from ..local.session import (
    all_mounts,
    check_idle_timeout,
    check_least,
    check_sources,
    must_make,
    session_root,
)
from ..local.sizes import sizes
from .mounts import MOUNTS, SHARE, MachineMounts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ...guest.machine import Rising, Waking
    from ...launcher.jail.jail import JailPlan
    from ...launcher.plan import Tree
    from ...model.mount import Mount
    from ..local.host.facts import Host
    from ..local.mounts.images import Held
    from ..local.mounts.trusted import Trusted
    from ..local.sizes import Sizes

    Steps = list[tuple[Any, ...]]

NAME = "microvm"
PROFILES = (OS_HARDENED, DEBUG, OWN_ROOT, UNRESTRICTED)
_MIB = 1 << 20
DEFAULT_MEMORY = 1 << 30
EMULATOR_BYTES = 768 << 20  # translated code, and the emulator itself
EMULATOR_PIDS = 256  # its threads
_SHARE_BYTES, _SHARE_INODES = 1 << 20, 1024  # mount points only
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_OF_THE_EMULATOR = ("null", "zero", "urandom")
LEAST = {
    "open_files": (64, "the agent lives under it too"),
    "memory_bytes": (32 * _MIB, "every exec lives in it"),
    "inodes": (256, "the sandbox's own directories are some of them"),
}
_NO_HOST = "a machine has no network device that could lead to the host's own network"
NEVER = {
    can.NETWORK_UNRESTRICTED: _NO_HOST,
    can.IO_LIMIT: "there is no disk: files lie in the guest's memory",
    can.PREWARM: "machines already start from the snapshot of a booted machine",
    can.GPU: "the microVM backend passes none on",
}
"""Capabilities that every microVM lacks, and why: known without starting one."""


def refusal(operation: str, field: str, why: str = "", hint: str = "") -> Unsupported:
    return Unsupported(why, backend=NAME, operation=operation, field=field, hint=hint)


def check(spec: SandboxSpec) -> None:
    """Refuse what this backend does not do, before anything is made."""
    if spec.tier != STRONG:
        raise refusal(f"tier {spec.tier}", "tier", f"a microVM is tier {STRONG}")
    if spec.template != "default":
        raise InvalidRequest(
            f"unknown template {spec.template!r}",
            field="template",
            hint="a microVM starts from image=NAME",
        )
    if spec.profile not in PROFILES:
        known = ", ".join(PROFILES)
        raise InvalidRequest(
            f"unknown profile {spec.profile!r}", field="profile", hint=f"one of {known}"
        )
    identity.uid_of(spec.user)
    if spec.network.is_unrestricted:
        hint = "list the destinations in the policy, or use tier light"
        raise refusal("network unrestricted", "network", _NO_HOST, hint)
    check_given_secrets(spec)
    if spec.disk_root:
        why = "the guest's files are in its memory: its kernel is started without a disk"
        hint = "use native or gvisor, or mount a directory of the host"
        raise refusal("disk_root", "disk_root", why, hint)
    if spec.limits.io_bytes_per_s is not None:
        raise refusal("limit io_bytes_per_s", "limits.io_bytes_per_s")
    check_idle_timeout(spec, NAME)
    check_least(spec, LEAST)
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


class Draft(MachineMounts):
    """A plan under way.

    Args:
        first_host_id: 0 when rootless.
        image: What the root is of; None: the template's.
        attached: What was mounted later in the machine that goes on.

    Attributes:
        shown: What the machine sees of the host besides what is mounted, an image's files first.
        hidden: What the machine does last of all with its root.
    """

    def __init__(
        self,
        spec: SandboxSpec,
        sandbox_id: str,
        first_host_id: int,
        image: Held | None = None,
        attached: Sequence[Mount] = (),
    ) -> None:
        super().__init__(spec, first_host_id)
        self.id = sandbox_id
        self.uid, self.image = identity.uid_of(spec.user), image
        self.shown: list[Tree] = []
        self.guest: Steps = []
        self.trusted: Trusted | None = None
        self.note: str | None = None  # of the journal
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
        try:
            for mount in (*all_mounts(spec), *attached):
                self.add(mount)
            self.hidden = self.deny(self._where_shown()) if spec.deny else []
        except BaseException:
            for each in self.protected:
                each.remove_placeholders()
            self.close()
            raise

    def _where_shown(self) -> list[tuple[str, int]]:
        """List the host's trees with their places in the machine."""
        image = [("/", 0)] if self.image else []
        steps = [step for step in self.guest if step[0] in ("show", "bind")]
        return [*image, *((target, number) for _verb, target, number, *_ in steps)]

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
        """List the host paths visible to the machine, in its order."""
        return [tree["source"] for tree in (*self.shown, *self.mounted)]


def jail(draft: Draft, here: Host, argv: list[str], files: dict[str, str], passes: int) -> JailPlan:
    """The emulator's isolation: what it sees of the host is its program, and what the guest sees.

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
    return {
        **bare_jail(draft.id, here, f"0 {draft.first_host_id} 1", filter_of_jail()),
        "trees": trees,
        "steps": steps,
        "guest": {
            "path": SHARE,
            "image": -1,
            "disk": -1,
            "size_bytes": _SHARE_BYTES,
            "inodes": _SHARE_INODES,
            "owner": 0,
            "steps": share,
            "has_content": False,
            "process_image": "",
            "process_image_bytes": 0,
        },
        "after": after,
        "passes": passes,
        "share": {"shown": SHARE, "mounts": MOUNTS, "whose": draft.uid},
        "argv": argv,
        "env": {"PATH": "/usr/bin"},
        "placeholders": draft.placeholders,
    }


def rising() -> Rising:
    """Build the message for a restored machine: fresh time and entropy, so that no two copies are alike."""
    return {"now_ns": time.time_ns(), "entropy": os.urandom(64)}


def waking(draft: Draft, size: Sizes) -> Waking:
    """Build the first message for a machine; nothing in it is shared with another machine."""
    shown = [(f"{SHARE}/{i}", template.READ_ONLY) for i in range(len(draft.shown))]
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
            shown.append((f"{MOUNTS}/{rest[0]}", tree["attributes"]))
            rest = [len(shown) - 1]
        steps.append((verb, path, *rest))
    workdir = session_root(draft.spec)
    if must_make(workdir, draft.mounts, of_image=draft.image is not None):
        steps.append(("session_dir", workdir))
    steps += draft.hidden
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
            "room": None,
            "shm_bytes": 0,
            "anew": False,
            "place": "",
        },
    }
