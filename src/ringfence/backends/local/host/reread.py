"""Files of the kernel's that are read again and again: a few are kept open, for to find one costs more."""

from __future__ import annotations

import os
from _thread import allocate_lock

_MOST = 32  # of those read last, in a process that may have thousands of sandboxes
_BYTES = 4096  # none of them is longer

_open: dict[str, int] = {}  # by path, in the order in which they were opened
_lock = allocate_lock()


def read(path: str) -> str:
    """All of it, as it is now; empty where it is not there."""
    with _lock:
        try:
            fd = _open.get(path, -1)
            is_new = fd < 0
            if is_new:
                fd = _open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            text = os.pread(fd, _BYTES, 0).decode("utf-8", "replace")
        except OSError:  # of a cgroup that is gone; or we have too many files open
            _close(path)
            return ""
        if is_new and not _has_room(fd):
            _close(path)
        elif len(_open) > _MOST:
            _close(next(iter(_open)))
        return text


def _has_room(fd: int) -> bool:
    """Return whether less than half of the open-file limit is used: cached descriptors must not exhaust it."""
    import resource

    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most == resource.RLIM_INFINITY or fd < most // 2


def forget(path: str) -> None:
    """Keep it open no longer; idempotent."""
    with _lock:
        _close(path)


def _close(path: str) -> None:
    fd = _open.pop(path, -1)
    if fd >= 0:
        os.close(fd)


def _after_fork() -> None:
    """The lock may have been held by a thread that is not in the child."""
    global _lock
    _lock = allocate_lock()


os.register_at_fork(after_in_child=_after_fork)
