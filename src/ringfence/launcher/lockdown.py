"""Locking a process down for good: one finished, replayable list of steps."""

from __future__ import annotations

import _signal as signal
import posix as os
import resource

from ..linux import landlock, privileges, seccomp
from . import wire
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


def is_ruler(shape: Shape) -> bool:
    """Return whether what this process starts may become another user, and has to be ended all the same."""
    return not shape["keep_capabilities"] and bool(_of_root(shape))


def become_user(plan: Plan, uid: int, gid: int, *, also: int = 0) -> None:
    """Switch to the sandbox's ids for good, with every capability set empty, but for root's own.

    Args:
        also: A mask of more that stay, which no program gets by execve(2).

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
    privileges.empty_capability_sets(kept | also)


def become_init(plan: Plan) -> None:
    """As `become_user`, for PID 1."""
    also = privileges.CAP_KILL if is_ruler(plan) else 0
    become_user(plan, plan["uid"], plan["gid"], also=also)


def become_agent(plan: Plan, uid: int, gid: int) -> None:
    """As `become_user`, but with a real and a saved id that no program has.

    kill(2) compares the sender's ids with those two: a program of the user cannot signal the agent, which acts
    with the user's effective id. Its programs become the user for good before they begin: see `Becoming`.
    Some capabilities stay, in the sandbox's user namespace, and no program gets them by execve(2).
    """
    if plan["keep_capabilities"]:
        become_user(plan, uid, gid)
        return
    kept = _of_root(plan)
    if not kept:
        privileges.lock_securebits()
    os.setresgid(gid, gid, gid)
    os.setresuid(wire.AGENT_UID, uid, wire.AGENT_UID)
    if is_ruler(plan):
        kept |= privileges.CAP_KILL
    if plan["connects"]:
        kept |= privileges.CAP_SYS_PTRACE  # pidfd_getfd(2) compares real ids
    privileges.empty_capability_sets(kept)


class Becoming:
    """In a child of an agent, before its program: become the user of that agent for good.

    The system-call filter is in force by then; a filter of the user's own may refuse the call.
    """

    def __init__(self, plan: Plan) -> None:
        self._uid = plan["uid"]

    def check(self) -> None:
        """Have a filter refuse it before any program is to be started."""
        os.setresuid(-1, -1, -1)

    def __call__(self) -> None:
        os.setresuid(self._uid, self._uid, self._uid)


def seal(
    plan: Plan, *, with_parent: bool = True, serves: bool = False, is_agent: bool = False
) -> int:
    """no_new_privs, Landlock and, last of all, the system-call filter.

    Args:
        with_parent: Die with the parent process.
        serves: Go on as who answers when others ask for what the first filter does not decide.
        is_agent: Not PID 1: then no number that is known beforehand protects it.

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
    refused = notifications.protect_agents() if plan["root_capabilities"] else []
    refused += notifications.protect_scheduling(os.getpid()) if is_agent else []
    listener_fd = notifications.guard(serves=serves, connect_key=key, refused=refused)
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
