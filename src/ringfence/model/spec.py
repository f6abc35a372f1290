"""Specification of a sandbox."""

from __future__ import annotations

from .base import checks, jsonform
from .base.checks import FrozenMap
from .base.ids import check_id
from .base.model import Model
from .base.record import dataclass, field
from .capabilities import weaker
from .limits import Limits
from .mount import MEMORY_DIR, Mount, check_target, with_presets
from .net.network import NetworkPolicy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

LIGHT = "light"
STRONG = "strong"
TIERS = (LIGHT, STRONG)

OS_HARDENED = "os_hardened"
OWN_ROOT = "own_root"
DEBUG = "debug"
UNRESTRICTED = "unrestricted"

LINEAGE = "ringfence.lineage"
"""Label of a fork: ids of the sandboxes that it descends from, the first one first, separated by spaces."""

_YEAR_S = 366 * 86_400
_LONGEST_IMAGE = 1000
_DIGEST = 71  # characters of sha256: and 64 digits
MOST_MOUNTS = 200  # each travels as a descriptor, and one message carries 253


@dataclass(frozen=True, eq=False, repr=False)
class SandboxSpec(Model):
    """A request for one sandbox; safe by default.

    Attributes:
        id: None generates one, time-ordered and prefixed by the backend's name.
        template: `default` shows the host's /usr; the name or id of a built template adds its
            packages, read-only.
        image: An OCI image on this machine whose files are the root instead; user, environment and
            working directory are the image's where this spec says nothing.
        secrets: Name to value; kept out of `repr`, of snapshots and of `to_json`.
        tier: `light` (kernel isolation) or `strong` (gVisor, microVM); never swapped silently.
        profile: `os_hardened`, `own_root`, `debug`, `unrestricted` (by name each time, and reported)
            or a profile the backend was configured with.
        user: Default user of execs, by name or uid; None is the unprivileged `sandbox`.
        workdir: The session's root, where relative paths start; None is the home directory.
        ttl_s: Seconds after which the sandbox is terminated whatever it does.
        python_env: Also show the caller's Python environment, read-only.
        disk_root: Files outside mounts are on the host's disk, not in memory. A disk limit above the memory
            limit implies it where a backend can do both.
        memory_dir: Host directory behind /mnt/memory, to survive the session; None: private.
        protect: Paths inside writable mounts that stay read-only, relative to each mount or
            absolute inside, besides the built-in set; `@git`, `@agents` and `@ci` are presets.
        unprotect: Members of the built-in set that are left writable.
        deny: Absolute paths inside that can be neither read nor written, whatever a mount would
            show there, and even where nothing is there yet.
        allow_degraded: Protections and limits, by name, that may be missing: those of
            `capabilities.MAY_BE_WEAKER`; `*` allows all but `namespaces`, with which the backend
            landlock is taken where the host refuses them, and the caller's /proc is shown where it
            refuses a new one.
    """

    id: str | None = None
    labels: Mapping[str, str] = field(default_factory=FrozenMap)
    network: NetworkPolicy = field(default_factory=NetworkPolicy)
    mounts: tuple[Mount, ...] = ()
    limits: Limits = field(default_factory=Limits)
    template: str = "default"
    image: str | None = None
    env: Mapping[str, str] = field(default_factory=FrozenMap)
    secrets: Mapping[str, str] = field(default_factory=FrozenMap, repr=False)
    tier: str = LIGHT
    profile: str = OS_HARDENED
    user: str | None = None
    workdir: str | None = None
    ttl_s: float | None = None
    python_env: bool = False
    disk_root: bool = False
    memory_dir: str | None = None
    protect: tuple[str, ...] | None = None
    unprotect: tuple[str, ...] = ()
    allow_degraded: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_identity()
        self._check_environment()
        self._check_parts()
        self._check_protection()

    def _put(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_identity(self) -> None:
        if self.id is not None:
            self._put("id", check_id(self.id))
        self._put("labels", checks.labels(self.labels, "labels"))
        checks.choice(self.tier, "tier", TIERS, "light or strong")
        checks.name(self.profile, "profile")
        if not str(self.template).startswith("sha256:"):
            checks.name(self.template, "template")
        elif len(checks.text(self.template, "template")) != _DIGEST:
            checks.refuse("template", "is not a whole id", "as `id` of the built template has it")
        if self.image is not None:
            image = checks.text(self.image, "image", empty=False)
            if len(image) > _LONGEST_IMAGE:
                checks.refuse("image", f"is longer than {_LONGEST_IMAGE} characters")
        if self.user is not None:
            self._put("user", checks.user(self.user, "user"))

    def _check_environment(self) -> None:
        self._put("env", checks.env_map(self.env, "env"))
        self._put("secrets", checks.env_map(self.secrets, "secrets"))
        if self.env or self.secrets:
            checks.weigh("env", checks.NOTES_BYTES, self.env, self.secrets)
        if self.workdir is not None:
            self._put("workdir", checks.absolute_path(self.workdir, "workdir"))
        if self.memory_dir is not None:
            given = checks.path(self.memory_dir, "memory_dir")
            if not given.startswith("/"):
                import os

                hint = f"as {os.path.abspath(given)}"
                checks.refuse("memory_dir", f"{given!r} is not an absolute host path", hint)
            self._put("memory_dir", given)
        if self.ttl_s is not None:
            self._put("ttl_s", checks.number(self.ttl_s, "ttl_s", 0.001, _YEAR_S))
        checks.flag(self.python_env, "python_env")
        checks.flag(self.disk_root, "disk_root")

    def _check_parts(self) -> None:
        checks.instance(self.network, "network", NetworkPolicy)
        checks.instance(self.limits, "limits", Limits)
        mounts = checks.items(self.mounts, "mounts")
        if len(mounts) > MOST_MOUNTS:
            hint = "mount one directory that contains them"
            checks.refuse("mounts", f"{len(mounts)} are more than {MOST_MOUNTS}", hint)
        for i, mount in enumerate(mounts):
            checks.instance(mount, f"mounts[{i}]", Mount)
        self._check_targets(mounts)
        self._put("mounts", mounts)

    def _check_targets(self, mounts: tuple[Mount, ...]) -> None:
        """Refuse two mounts at one target: the later would hide the earlier."""
        taken = {MEMORY_DIR: "memory_dir"} if self.memory_dir is not None else {}
        for i, mount in enumerate(mounts):
            if (other := taken.setdefault(mount.target, f"mounts[{i}]")) != f"mounts[{i}]":
                hint = "give each mount its own target; nested targets are allowed"
                said = f"{mount.target} is the target of {other} already"
                checks.refuse(f"mounts[{i}].target", said, hint)

    def _check_protection(self) -> None:
        for name in ("protect", "unprotect"):
            given = getattr(self, name)
            if given is not None:
                whole = with_presets(given, name) if name == "protect" else given
                inner = enumerate(checks.at_most(whole, name, checks.MOST_PATHS))
                paths = tuple(checks.normal_path(path, f"{name}[{i}]") for i, path in inner)
                self._put(name, paths)
        denied = enumerate(checks.at_most(self.deny, "deny", checks.MOST_PATHS))
        self._put("deny", tuple(check_target(path, f"deny[{i}]") for i, path in denied))
        self._put("allow_degraded", weaker(self.allow_degraded, "allow_degraded"))

    def to_json(self, *, with_secrets: bool = False) -> dict[str, Any]:
        """The JSON object; secret values only where asked for by name."""
        form = jsonform.dump(self)
        if not with_secrets:
            del form["secrets"]
        return form
