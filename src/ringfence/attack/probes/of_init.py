"""Attacks on PID 1, which has the same user: slow, starve, or rob it.

PID 1 ends execs in time and kills their whole trees; a process that weakens it escapes a timeout.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct

from .kit import NO_SECCOMP, Outcome, call, escaped, held, probe, said, status_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_RTTIME = 15
_ZERO = ctypes.create_string_buffer(struct.pack("i", 0), 4)
_MASK = ctypes.create_string_buffer(b"\xff" * 128, 128)
# As PID 1 may be: nobody may take this flag away.
_RESET_ON_FORK = 0x40000000
_NICE = ctypes.create_string_buffer(struct.pack("=IIQiIQQQ", 48, 0, 1, 5, 0, 0, 0, 0), 48)


def _same_limits(which: int) -> ctypes.Array[ctypes.c_char]:
    """The limits as they are: a call that gets through changes nothing."""
    return ctypes.create_string_buffer(
        struct.pack("=QQ", *map(_u64, resource.getrlimit(which))), 16
    )


def _u64(value: int) -> int:
    return value & (1 << 64) - 1


_WAYS: dict[str, tuple[str, str, Callable[[], int]]] = {
    "limits": (
        "high",
        "Its limits must not be lowered until it can start and kill nothing.",
        lambda: call(
            "prlimit64", 1, resource.RLIMIT_NOFILE, _same_limits(resource.RLIMIT_NOFILE), 0
        ),
    ),
    "scheduler": (
        "medium",
        "It must not be made to wait behind the processes it must kill.",
        lambda: call("sched_setscheduler", 1, _RESET_ON_FORK | os.SCHED_BATCH, _ZERO),
    ),
    "scheduling-attributes": (
        "medium",
        "Nor by sched_setattr.",
        lambda: call("sched_setattr", 1, _NICE, 0),
    ),
    "scheduling-parameters": (
        "medium",
        "Nor by sched_setparam.",
        lambda: call("sched_setparam", 1, _ZERO),
    ),
    "affinity": (
        "medium",
        "It must not be tied to one processor.",
        lambda: call("sched_setaffinity", 1, 128, _MASK),
    ),
    "nice": (
        "medium",
        "Its nice value must not be changed.",
        lambda: call("setpriority", 0, 1, 15),
    ),
    "nice-of-group": (
        "medium",
        "Nor that of its process group.",
        lambda: call("setpriority", 1, 1, 15),
    ),
    "nice-of-user": (
        "medium",
        "Nor that of every process of its user.",
        lambda: call("setpriority", 2, 0, 15),
    ),
    "io-priority": (
        "low",
        "Its I/O priority must not be changed.",
        lambda: call("ioprio_set", 1, 1, 2 << 13 | 4),
    ),
    "io-priority-of-user": (
        "low",
        "Nor that of every process of its user.",
        lambda: call("ioprio_set", 3, os.getuid(), 2 << 13 | 4),
    ),
}


def _probe_of(action: Callable[[], int]) -> Callable[[dict[str, Any]], Outcome]:
    def run(_context: dict[str, Any]) -> Outcome:
        if status_of(1).get("Name") != "ringfence-init":
            return held("PID 1 is not a sandbox's: left alone")
        result = action()
        return held(said(result)) if result < 0 else escaped("worked")

    return run


for _name, (_severity, _about, _action) in _WAYS.items():
    probe(f"syscalls.init-{_name}", _severity, NO_SECCOMP, about=f"Of PID 1: {_about}")(
        _probe_of(_action)
    )


# -- the tag that all processes of an exec carry ----------------------------------------------


@probe("syscalls.tag-by-prlimit", "high", NO_SECCOMP)
def tag_by_prlimit(_context: dict[str, Any]) -> Outcome:
    """A process must not change the tag by which its whole tree is found and killed."""
    result = call("prlimit64", 0, _RTTIME, _same_limits(_RTTIME), 0)
    return (
        held(f"prlimit: {said(result)}")
        if result == -errno.EPERM
        else escaped(f"prlimit: {said(result)}")
    )


@probe("syscalls.tag-by-setrlimit", "high", NO_SECCOMP)
def tag_by_setrlimit(_context: dict[str, Any]) -> Outcome:
    """Nor by the older call."""
    result = call("setrlimit", _RTTIME, _same_limits(_RTTIME))
    return (
        held(f"setrlimit: {said(result)}")
        if result == -errno.EPERM
        else escaped(f"setrlimit: {said(result)}")
    )


@probe("syscalls.tag-by-guessing", "high", NO_SECCOMP)
def tag_by_guessing(_context: dict[str, Any]) -> Outcome:
    """Nor by guessing the key with which PID 1 sets it."""
    limits = _same_limits(_RTTIME)
    guesses = [b"ringfenc", bytes(8), b"\xff" * 8, *(os.urandom(8) for _ in range(200))]
    for guess in guesses:
        high, low = struct.unpack(">II", guess)
        result = call("prlimit64", high << 32, low << 32 | _RTTIME, limits, 0)
        if result != -errno.EPERM:
            return escaped(f"key {guess.hex()}: {said(result)}")
    return held(f"{len(guesses)} keys refused")


@probe("syscalls.adopt-orphans", "high", NO_SECCOMP)
def adopt_orphans(_context: dict[str, Any]) -> Outcome:
    """A process must not take orphans from PID 1, who would then not see their end."""
    result = call("prctl", 36, 1, 0, 0, 0)
    return (
        escaped("PR_SET_CHILD_SUBREAPER: worked") if result == 0 else held(f"prctl: {said(result)}")
    )
