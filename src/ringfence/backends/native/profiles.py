"""Hardening profiles: sets of lock-down switches. The default has all on."""

from __future__ import annotations

from ...errors import InvalidRequest
from ...model.base.record import dataclass
from ...model.spec import DEBUG, OS_HARDENED, OWN_ROOT, UNRESTRICTED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ...policy.seccomp import SeccompPolicy


@dataclass(frozen=True, eq=False, repr=False)
class Profile:
    """Switches of the lock-down.

    Only `os_hardened` has everything on. The others must be named for each sandbox, and every
    session reports them; tests use profiles of their own as controls for each protection.
    """

    name: str
    seccomp: bool = True
    landlock: bool = True
    no_new_privs: bool = True
    drop_capabilities: bool = True
    root_capabilities: int = 0  # a mask: what uid 0 inside keeps, within its own user namespace
    forbid_user_namespaces: bool = True
    tracing: bool = False
    policy: SeccompPolicy | None = None  # a system-call policy of the user's own
    unix_sockets: bool | None = None  # None: allowed unless a host directory is mounted


# include/uapi/linux/capability.h: CHOWN, DAC_OVERRIDE, FOWNER, SETGID, SETUID. Over the sandbox's own ids
# and files, and nothing of the kernel's: no network, no mounts, no devices, no tracing.
_OVER_OWN_USERS = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 6 | 1 << 7

BUILT_IN = {
    OS_HARDENED: Profile(OS_HARDENED),
    OWN_ROOT: Profile(OWN_ROOT, root_capabilities=_OVER_OWN_USERS),
    DEBUG: Profile(DEBUG, tracing=True),
    UNRESTRICTED: Profile(
        UNRESTRICTED, seccomp=False, landlock=False, forbid_user_namespaces=False, unix_sockets=True
    ),
}


def profile_named(name: str, extra: dict[str, Profile]) -> Profile:
    """The profile called `name`.

    Raises:
        InvalidRequest: There is none.
    """
    found = extra.get(name) or BUILT_IN.get(name)
    if found is None:
        known = ", ".join(sorted({**BUILT_IN, **extra}))
        raise InvalidRequest(f"unknown profile {name!r}", field="profile", hint=f"one of {known}")
    return found
