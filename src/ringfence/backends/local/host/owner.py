"""Owner of a cgroup or a note: a label in its name, and a check that the owner is dead."""

from __future__ import annotations

import os


def label(pid: int = 0, started: int = 0) -> str:
    """A process for good: pid, when it started (clock ticks since boot), PID namespace.

    Args:
        pid: 0 is this process.
        started: If that is known.
    """
    if pid:
        return f"{pid}.{started or start_time(pid)}.{_pid_namespace()}"
    pid = os.getpid()
    if pid not in _labels:
        _labels.clear()  # of who forked us
        _labels[pid] = label(pid)
    return _labels[pid]


_labels: dict[int, str] = {}


def read(words: list[str]) -> tuple[int, int, int] | None:
    """The label in the dotted parts of a name; None where there is none."""
    if len(words) != 3 or not all(word.isdigit() for word in words):
        return None
    return int(words[0]), int(words[1]), int(words[2])


def is_stranger(owner: tuple[int, int, int]) -> bool:
    """Return whether the owner lives in another PID namespace, where its pid is a different process."""
    return owner[2] != _pid_namespace()


def is_gone(owner: tuple[int, int, int]) -> bool:
    """Return whether the owner is known to have ended; False in doubt (another namespace, no
    descriptor left).
    """
    if is_stranger(owner):
        return False
    try:
        return start_time(owner[0]) != owner[1]
    except OSError:
        return False


def start_time(pid: int) -> int:
    """In clock ticks since boot; 0 for no process, or a zombie, which holds nothing: proc(5)."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        fields = os.read(fd, 4096).rpartition(b")")[2].split()
    except ProcessLookupError:
        return 0
    finally:
        os.close(fd)
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
