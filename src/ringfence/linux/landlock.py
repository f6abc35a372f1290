"""Landlock rulesets: landlock(7), Documentation/userspace-api/landlock.rst."""

from __future__ import annotations

import _struct as struct
import errno
import posix as os

from . import cdata
from .libc import declare, raise_errno

LANDLOCK_CREATE_RULESET_VERSION = 1  # include/uapi/linux/landlock.h
LANDLOCK_RULE_PATH_BENEATH = 1

_create_ruleset = declare("landlock_create_ruleset", cdata.c_char_p, cdata.c_size_t, cdata.c_uint)
_add_rule = declare("landlock_add_rule", cdata.c_int, cdata.c_int, cdata.c_char_p, cdata.c_uint)
_restrict_self = declare("landlock_restrict_self", cdata.c_int, cdata.c_uint)


def abi_version() -> int:
    """The Landlock ABI of this kernel; 0 when it has none or it is switched off."""
    version = _create_ruleset(None, 0, LANDLOCK_CREATE_RULESET_VERSION)
    if version < 0:
        if cdata.get_errno() in (errno.ENOSYS, errno.EOPNOTSUPP):
            return 0
        raise_errno("landlock_create_ruleset")
    return version


def create_ruleset(handled_fs: int, handled_net: int, scoped: int, *, abi: int) -> int:
    """A ruleset, as a file descriptor, that refuses every handled access without a rule.

    Source: landlock_create_ruleset(2). The struct grew with ABI 4 (net) and 6 (scoped).
    """
    words = [handled_fs] + ([handled_net] if abi >= 4 else []) + ([scoped] if abi >= 6 else [])
    fd = _create_ruleset(struct.pack(f"={len(words)}Q", *words), 8 * len(words), 0)
    if fd < 0:
        raise_errno("landlock_create_ruleset")
    return fd


def allow_beneath(ruleset_fd: int, path: str, access: int) -> None:
    """Allow `access` to `path` and everything below it.

    Source: landlock_add_rule(2).
    """
    parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        # struct landlock_path_beneath_attr is packed: __u64 allowed_access, __s32 parent_fd
        attr = struct.pack("=Qi", access, parent)
        if _add_rule(ruleset_fd, LANDLOCK_RULE_PATH_BENEATH, attr, 0) < 0:
            raise_errno("landlock_add_rule", path)
    finally:
        os.close(parent)


def restrict_self(ruleset_fd: int) -> None:
    """Put the calling thread and all its children under the ruleset, for good.

    Source: landlock_restrict_self(2).
    """
    if _restrict_self(ruleset_fd, 0) < 0:
        raise_errno("landlock_restrict_self")
