"""Confinement of a process of ours that reads what strangers wrote: an image's layers, a snapshot's stream."""

from __future__ import annotations

import os
import resource
from dataclasses import replace

from ..linux import landlock, privileges, seccomp
from . import landlock as rules
from .seccomp import Rule, SeccompPolicy, compile_filter

_MEMORY_BYTES = 2 << 30


def confine(*targets: str, keep: int = 0, whiteouts: bool = False) -> None:
    """Give up everything but writing below `targets`.

    Args:
        keep: Mask of capabilities that stay.
        whiteouts: Allow character devices 0, 0, which need no capability.

    Precondition: everything is imported and every descriptor open.
    """
    # With 0, a core_pattern with a pipe would run; of a caller who has none it stays that.
    core = 0 if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0 else 1
    resource.setrlimit(resource.RLIMIT_CORE, (core, core))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    program = _filter(whiteouts=whiteouts)
    privileges.empty_capability_sets(keep)
    privileges.set_no_new_privs()
    _restrict_files(targets, rules.MAKE_CHAR if whiteouts else 0)
    seccomp.install_filter(program)


def _restrict_files(targets: tuple[str, ...], also: int) -> None:
    plan = rules.plan_landlock(landlock.abi_version(), writable=targets, network=False)
    if plan.is_empty:
        return  # an old kernel: names are resolved below the target all the same
    ruleset = landlock.create_ruleset(
        plan.handled_fs, plan.handled_net, plan.scoped, abi=landlock.abi_version()
    )
    for path, access in plan.rules:
        if path in targets:  # and nothing to read: every layer is open by now
            landlock.allow_beneath(ruleset, path, access | also)
    landlock.restrict_self(ruleset)
    os.close(ruleset)


def _filter(*, whiteouts: bool) -> bytes:
    """The default policy, without programs and sockets; modes are ours, and never set-id."""
    never = ("socket", "socketpair", "execve", "execveat", "fork", "vfork", "ptrace")
    policy = SeccompPolicy.default()
    allowed = ("openat2", "mknod", "mknodat") if whiteouts else ("openat2",)
    first = (Rule(allowed, "allow"), Rule(never, "EPERM"))
    return compile_filter(policy=replace(policy, guards=(*first, *policy.guards)))
