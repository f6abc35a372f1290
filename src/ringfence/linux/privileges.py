"""Giving rights up for good: capabilities(7), securebits, no_new_privs, dumpable, prctl(2)."""

from __future__ import annotations

import _struct as struct
import errno
import posix as os

from . import cdata
from .libc import declare, raise_errno

# include/uapi/linux/prctl.h, securebits.h, capability.h
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
# In its third argument, which the kernel does not read: the filter knows us by it.
REALLY = 0x52464E44
PR_SET_NAME = 15
PR_CAPBSET_DROP = 24
PR_SET_SECUREBITS = 28
PR_SET_MM, PR_SET_MM_EXE_FILE = 35, 13
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_GET_NO_NEW_PRIVS = 39
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
# NOROOT, NO_SETUID_FIXUP and NO_CAP_AMBIENT_RAISE on, KEEP_CAPS off, each with its lock bit.
SECUREBITS_LOCKED = 0x01 | 0x02 | 0x04 | 0x08 | 0x20 | 0x40 | 0x80
CAP_KILL, CAP_SYS_PTRACE = 1 << 5, 1 << 19  # as in a mask
_LEAST_KNOWN = 38  # CAP_AUDIT_READ, Linux 3.16: every kernel that we run on knows more
_CAPABILITY_VERSION_3 = 0x20080522

_word = cdata.c_ulong
_prctl = declare("prctl", cdata.c_int, _word, _word, _word, _word)
_prctl_text = declare("prctl", cdata.c_int, cdata.c_char_p, _word, _word, _word)
_capset = declare("capset", cdata.c_char_p, cdata.c_char_p)


def prctl(option: int, arg: int = 0, arg3: int = 0) -> int:
    """Call prctl.

    Source: prctl(2).
    """
    result = _prctl(option, arg, arg3, 0, 0)
    if result < 0:
        raise_errno("prctl")
    return result


def empty_bounding_set(keep: int = 0) -> None:
    """Drop every capability from the bounding and ambient sets.

    Args:
        keep: A mask of those that stay in the bounding set.

    Precondition: CAP_SETPCAP in the user namespace.
    Source: capabilities(7).
    """
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    capability = 0
    # Forty calls on the way of every start. EINVAL is one past the last that this kernel knows.
    while keep >> capability & 1 or _prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    if cdata.get_errno() != errno.EINVAL or capability < _LEAST_KNOWN:
        raise_errno("prctl PR_CAPBSET_DROP", capability)


def lock_securebits() -> None:
    """Uid 0 and changes of uid no longer mean anything to capabilities, for good.

    Precondition: CAP_SETPCAP in the user namespace.
    Source: capabilities(7), "The securebits flags".
    """
    prctl(PR_SET_SECUREBITS, SECUREBITS_LOCKED)


def empty_capability_sets(keep: int = 0) -> None:
    """Empty the effective, permitted and inheritable sets.

    Args:
        keep: A mask of those that stay effective and permitted.

    Source: capset(2).
    """
    low, high = keep & 0xFFFFFFFF, keep >> 32
    sets = struct.pack("6I", low, low, 0, high, high, 0)
    if _capset(struct.pack("Ii", _CAPABILITY_VERSION_3, 0), sets) < 0:
        raise_errno("capset")


def drop_groups() -> None:
    """Give up supplementary groups, where the user namespace allows it: that of an ordinary user does not.

    Precondition: CAP_SETGID in it, as after entering it. Without, setgroups(2) would fail for the same reason.
    """
    try:
        os.setgroups([])
    except PermissionError:  # user_namespaces(7): its /proc/PID/setgroups says deny, for good
        pass


def set_no_new_privs() -> None:
    """From now on execve(2) grants nothing: no setuid, no file capabilities."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, as PID 1 does: a subreaper."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def set_dumpable(dumpable: bool) -> None:
    """Allow or forbid other processes of the uid to trace this one and open its /proc files."""
    prctl(PR_SET_DUMPABLE, int(dumpable), REALLY)


def set_name(name: bytes) -> None:
    """The name of this thread, at most 15 bytes."""
    if _prctl_text(PR_SET_NAME, name[:15], 0, 0, 0) < 0:
        raise_errno("prctl")


def die_with_parent(signum: int) -> None:
    """Ask for `signum` when the parent thread dies. Cleared by every change of credentials."""
    prctl(PR_SET_PDEATHSIG, signum)
