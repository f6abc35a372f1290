"""Whether PID 1 of a sandbox can connect for the programs in it: see `launcher.connects`."""

from __future__ import annotations

import os

_ACTIONS = "/proc/sys/kernel/seccomp/actions_avail"
_PTRACE_SCOPE = "/proc/sys/kernel/yama/ptrace_scope"
_LEAST = (5, 9)  # SECCOMP_IOCTL_NOTIF_ID_VALID as we number it; pidfd_getfd(2) is of 5.6


def why_not() -> str:
    """What this host lacks for it; empty for nothing."""
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
