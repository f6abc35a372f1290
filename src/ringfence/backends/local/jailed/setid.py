"""No set-id bits on the host, whoever serves a guest's files.

A file in a writable mount belongs on the host to the owner of the mount, who may be root: with such a
bit, any user of the host could become that owner. gVisor's file server passes the bits on as they are.
"""

from __future__ import annotations

import functools

from ....policy.seccomp import Rule, SeccompPolicy, compile_filter

_SET_ID = 0o6000


@functools.cache
def filter_of_jail(*more: Rule) -> bytes:
    """A filter for all of a jail's processes that refuses these bits, what `more` says, and nothing else.

    The guest's system calls do not pass it: gVisor takes them before the host's kernel sees them.
    """
    ours = SeccompPolicy.default()
    guards = tuple(rule for rule in ours.guards if any(each.mask == _SET_ID for each in rule.args))
    return compile_filter(policy=SeccompPolicy("allow", "allow", guards, more))
