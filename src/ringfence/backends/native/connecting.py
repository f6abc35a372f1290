"""Host requirements for PID 1 to connect Unix sockets on behalf of programs: see `launcher.pid1.connects`.

Kept separate: the planner and the reader of protections both ask, and neither imports the other.
"""

from __future__ import annotations

import os

_ACTIONS = "/proc/sys/kernel/seccomp/actions_avail"
_PTRACE_SCOPE = "/proc/sys/kernel/yama/ptrace_scope"
_LEAST = (5, 9)  # SECCOMP_IOCTL_NOTIF_ID_VALID as we number it; pidfd_getfd(2) is of 5.6


def why_not() -> str:
    """Return the missing requirement; empty if none is."""
    if not _answers:
        _answers.append(_look())
    return _answers[0]


_answers: list[str] = []  # asked for with every start


def _look() -> str:
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    if release < _LEAST:
        return "Linux 5.9"
    if "user_notif" not in _read(_ACTIONS).split():
        return "seccomp's user notification"
    if int(_read(_PTRACE_SCOPE) or "0") > 1:
        return "kernel.yama.ptrace_scope below 2"
    return ""


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""
