"""Requests to create a sandbox, checked once, before anything is planned or made."""

from __future__ import annotations

import resource

from ...errors import InvalidRequest, Unsupported
from ...model.capabilities import NAMESPACES
from ...model.spec import LIGHT
from ..local.host import identity
from ..local.host.facts import host
from ..local.host.mountinfo import masks_of_proc
from ..local.network import check_given_secrets
from ..local.session import check_idle_timeout, check_least, check_sources
from ..local.sizes import sizes
from . import ids
from .profiles import profile_named

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ...model.spec import SandboxSpec
    from ..local.mounts.images import Held
    from ..local.mounts.layered import Layered
    from .profiles import Profile

    Base = Held | Layered
    Over = Callable[[Held | None], Base | None]
    Kind = tuple[int, bool, bool, bool, bool, int, str, str | None, tuple[int, int], bool]

_MIB = 1 << 20
# Least limits with which a sandbox can start at all.
LEAST = {
    "open_files": (64, "PID 1 of the sandbox lives under it too"),
    "memory_bytes": (8 * _MIB, "PID 1 of the sandbox lives in it too"),
    "inodes": (128, "the sandbox's own directories are some of them"),
}
BORROWED = (
    "command lines, users, mounts, connections and numbers of open files of the processes in it, other "
    "sandboxes' too, can be read there, and pids in it are not those of the sandbox"
)
"""Consequences for a sandbox that has its caller's /proc."""
LEAST_LANDLOCK_ABI = 2  # before it, rules would break every rename between directories


class Request:
    """A spec, and what follows from it alone.

    Attributes:
        base: The held files below its writable layer; of the sandbox once there is one.
        kind: The parts that are fixed in a sandbox before it gets a plan.
    """

    def __init__(
        self, spec: SandboxSpec, profile: Profile, uid: int, base: Base | None = None
    ) -> None:
        self.spec, self.profile, self.uid, self.base = spec, profile, uid, base
        self.sizes = sizes(spec, host())

    @property
    def borrows_proc(self) -> bool:
        return may_borrow_proc(self.spec, self.profile)

    @property
    def kind(self) -> Kind:
        return kind_of(self.spec, self.profile)

    def __enter__(self) -> Request:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exc: object) -> None:
        """Let go of the files unless a sandbox was made."""
        if kind is not None and self.base is not None:
            self.base.close()


def request(spec: SandboxSpec, profiles: dict[str, Profile], over: Over | None = None) -> Request:
    """The request for `spec`. Everything that may be wrong with it is refused here.

    Args:
        over: Returns what its root lies over, given its held image, which that owns then.

    Raises:
        InvalidRequest, Unsupported: This host, or the native backend, cannot serve it.
        ImageNotFound: Its image is not on this machine.
    """

    def make(resolved: SandboxSpec, held: Held | None) -> Request:
        asked = checked(resolved, profiles, held)
        if over is not None:
            asked.base = over(held)
        return asked

    if spec.image is None:
        return make(spec, None)
    from ..local.mounts import images

    return images.made_from(spec, make)


def checked(spec: SandboxSpec, profiles: dict[str, Profile], base: Base | None = None) -> Request:
    """As `request`, of a spec with everything filled in that its held image decides."""
    check(spec)
    profile = profile_named(spec.profile, profiles)
    ids.check(profile)
    if profile.policy is not None and NAMESPACES in spec.allow_degraded and masks_of_proc():
        raise Unsupported(
            "a policy of your own takes a new /proc, and the kernel mounts none beside masked paths",
            backend="native",
            operation=f"profile {profile.name}",
            field="profile",
            hint="use os_hardened, or unmask /proc: --security-opt systempaths=unconfined",
        )
    if profile.landlock and host().landlock_abi < LEAST_LANDLOCK_ABI:
        require_allowed(spec, "landlock", "this kernel has no usable Landlock", "profile")
    return Request(spec, profile, identity.uid_of(spec.user), base)


def kind_of(spec: SandboxSpec, profile: Profile) -> Kind:
    """Select the parts of a spec that are fixed before a claim."""
    size = sizes(spec, host())
    return (
        identity.uid_of(spec.user),
        spec.network.is_unrestricted,
        spec.python_env,
        profile.forbid_user_namespaces,
        profile.drop_capabilities,
        profile.root_capabilities,
        spec.template,
        spec.image,
        (size.disk_bytes, size.inodes) if size.on_disk else (0, 0),
        may_borrow_proc(spec, profile),
    )


def may_borrow_proc(spec: SandboxSpec, profile: Profile) -> bool:
    """Return whether the caller's own /proc is shown where the kernel refuses a new one.

    Processes of the caller's container, and so of other sandboxes in it, can be listed there with their
    command lines: it takes the name of what is weaker, and `*` is not enough. PID 1 finds its numbers
    by calls that another policy might refuse.
    """
    return NAMESPACES in spec.allow_degraded and profile.policy is None and bool(masks_of_proc())


def check(spec: SandboxSpec) -> None:
    if spec.tier != LIGHT:
        raise Unsupported(
            "the native backend is tier light",
            backend="native",
            operation=f"tier {spec.tier}",
            field="tier",
            hint="omit the backend: Ringfence then uses a strong backend that works here",
        )
    if spec.template != "default":
        raise InvalidRequest(
            f"unknown template {spec.template!r}", field="template", hint="one of default"
        )
    unlimited = ["io_bytes_per_s"]
    if spec.network.is_unrestricted:
        unlimited.append("network_bytes")  # nobody counts them there
    for name in unlimited:
        if getattr(spec.limits, name) is not None:
            raise Unsupported(backend="native", operation=f"limit {name}", field=f"limits.{name}")
    _check_open_files(spec.limits.open_files)
    check_idle_timeout(spec, "native")
    check_least(spec, LEAST)
    check_sources(spec)
    check_given_secrets(spec)
    if spec.unprotect:
        from ...policy.protected import check_names

        check_names(spec.unprotect)


def _check_open_files(wanted: int | None) -> None:
    """Refuse a request above our own hard limit; the default is silently lowered to it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if wanted is not None and most != resource.RLIM_INFINITY and wanted > most:
        raise InvalidRequest(
            f"{wanted} exceeds this process's hard limit, {most}",
            field="limits.open_files",
            hint="request fewer, or start Ringfence with a higher hard limit: `ulimit -Hn`",
        )


def require_allowed(spec: SandboxSpec, protection: str, why: str, field_name: str) -> None:
    """Refuse a start without `protection`, unless the user allowed that by name.

    Raises:
        Unsupported: It is not allowed to be missing.
    """
    if protection in spec.allow_degraded or "*" in spec.allow_degraded:
        return
    raise Unsupported(
        f"{protection} cannot be enforced here: {why}",
        backend="native",
        operation=protection,
        field=field_name,
        hint=f"run `ringfence doctor` for the fix, or allow it by name: allow_degraded=[{protection!r}]",
    )
