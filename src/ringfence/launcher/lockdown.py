"""Locking a process down for good: one finished, replayable list of steps."""

from __future__ import annotations

import _signal as signal
import posix as os
import resource

from ..linux import landlock, privileges, seccomp
from .pid1 import notifications

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .plan import Plan, Shape


def apply_rlimits(limits: list[tuple[int, int, int]]) -> None:
    """Lower limits; a hard limit that is already lower stays."""
    for which, soft, hard in limits:
        _, current = resource.getrlimit(which)
        if current != resource.RLIM_INFINITY:
            hard = current if hard == resource.RLIM_INFINITY else min(hard, current)
        if hard != resource.RLIM_INFINITY:
            soft = hard if soft == resource.RLIM_INFINITY else min(soft, hard)
        resource.setrlimit(which, (soft, hard))


def bound(shape: Shape) -> None:
    """Nothing that is ever executed here gains a capability; what the process itself has, it keeps."""
    if not shape["keep_capabilities"]:
        privileges.empty_bounding_set(_of_root(shape))


def _of_root(shape: Shape) -> int:
    """The capabilities that this process keeps: none, unless it is root where root was to have some."""
    return 0 if shape["uid"] else shape["root_capabilities"]


def become_user(plan: Plan, uid: int, gid: int) -> None:
    """Switch to the sandbox's ids for good, with every capability set empty, but for root's own.

    Precondition: `bound`.
    """
    if plan["keep_capabilities"]:
        os.setresgid(gid, gid, gid)
        privileges.prctl(privileges.PR_SET_SECUREBITS, 0x04)  # NO_SETUID_FIXUP: a control in tests
        os.setresuid(uid, uid, uid)
        return
    kept = _of_root(plan)
    if not kept:
        privileges.lock_securebits()
    os.setresgid(gid, gid, gid)
    # NO_SETUID_FIXUP is locked on, so this keeps the capabilities; the next line empties them.
    os.setresuid(uid, uid, uid)
    privileges.empty_capability_sets(kept)


def seal(plan: Plan, *, with_parent: bool = True, serves: bool = False) -> int:
    """no_new_privs, Landlock and, last of all, the system-call filter.

    Args:
        with_parent: Die with the parent process.
        serves: Go on as who answers when others ask for what the first filter does not decide.

    Returns:
        Where these ask: see `notifications.guard`; -1: nowhere.

    Precondition: the process already has its final ids and root.
    """
    if with_parent:
        # After the last change of credentials, which clears it.
        privileges.die_with_parent(signal.SIGKILL)
    privileges.set_dumpable(False)
    if plan["no_new_privs"]:
        privileges.set_no_new_privs()
    restrict_file_system(plan)
    if not plan["seccomp"]:
        return -1
    key = plan["tag_key"] if plan["connects"] else 0
    listener_fd = notifications.guard(serves=serves, connect_key=key)
    seccomp.install_filter(plan["seccomp"])
    return listener_fd


def restrict_file_system(plan: Plan) -> None:
    """Landlock, where the plan has it: defence in depth behind the mounts."""
    if plan["landlock"] is None:
        return
    handled_fs, handled_net, scoped, abi, rules = plan["landlock"]
    ruleset = landlock.create_ruleset(handled_fs, handled_net, scoped, abi=abi)
    for path, access in rules:
        landlock.allow_beneath(ruleset, path, access)
    landlock.restrict_self(ruleset)
    os.close(ruleset)
