"""Starting a zygote, a jailer or an fd store, from the host process: the first of all things that `run` does.

So it imports next to nothing, and lies here, behind the fewest packages.
"""

from __future__ import annotations

import _signal as signal
import _socket as socket
import os
import stat
import sys

ZYGOTE = (
    "import gc, sys; gc.disable(); sys.path.append(sys.argv[1]); "
    "from ringfence.launcher.zygote import main; main()"
)
JAILER = ZYGOTE.replace("zygote", "jail.jailer")
FD_STORE = ZYGOTE.replace("zygote", "fd_store")
LEAST_FILES = 128
"""Descriptors without which a process that creates sandboxes would fail somewhere in the middle."""
_CONTROL_FD = 3  # zygote.CONTROL_FD, jailer.CONTROL_FD; importing that would import all of it


COPY = "/usr/local/lib/ringfence/python"
"""The copy of Python that `ringfence doctor --fix` makes: AppArmor knows programs by their path, and only
Ringfence runs this one.
"""


class Started:
    """A process that boots: its pid, and our end of its socket."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid, self.control = pid, control


def spawn(code: str = ZYGOTE, *arguments: str, outlives: bool = False) -> Started:
    """Start one. The caller is never forked, whatever threads it has.

    Args:
        code: What it runs; with the directory that has the package, and `arguments`, in sys.argv.
        outlives: It may run on when we have ended, so it must not hold our standard error open.
    """
    package = os.path.abspath(sys.modules["ringfence"].__file__ or "")
    package_parent = os.path.dirname(os.path.dirname(package))
    kind = socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    # Isolated: no site-packages, no environment, no current directory.
    python = interpreter()
    # A duplicate onto itself would keep close-on-exec: make sure that 3 is not the source.
    if theirs.fileno() == _CONTROL_FD:
        moved = socket.socket(fileno=os.dup(_CONTROL_FD))
        theirs.close()
        theirs = moved
    actions = [
        (os.POSIX_SPAWN_DUP2, null, 0),
        (os.POSIX_SPAWN_DUP2, null, 1),
        (os.POSIX_SPAWN_DUP2, theirs.fileno(), _CONTROL_FD),
    ]
    if outlives:
        actions.append((os.POSIX_SPAWN_DUP2, null, 2))
    try:
        # A session of its own: an interrupt from the terminal is the caller's to handle.
        pid = os.posix_spawn(
            python,
            [python, "-I", "-S", "-c", code, package_parent, *arguments],
            {},
            file_actions=actions,
            setsid=True,
            setsigmask=[],
            # Signals ignored by the caller would stay ignored: without SIGCHLD the end of an exec
            # goes unnoticed.
            setsigdef=signal.valid_signals(),
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
        os.close(null)
    return Started(pid, ours)


def interpreter() -> str:
    """Return the base interpreter, or its copy where root has made one that nobody else can change."""
    base = getattr(sys, "_base_executable", sys.executable) or sys.executable
    try:
        copy, directory = os.lstat(COPY), os.lstat(os.path.dirname(COPY))
    except OSError:
        return base
    is_roots = stat.S_ISREG(copy.st_mode) and all(
        found.st_uid == 0 and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        for found in (copy, directory)
    )
    return COPY if is_roots and is_copy(copy, base) else base


def is_copy(copy: os.stat_result, base: str) -> bool:
    """Tell whether a file is a copy of an interpreter as it is now: an upgrade changes size or time."""
    try:
        found = os.stat(base)
    except OSError:
        return False
    return (copy.st_size, copy.st_mtime_ns) == (found.st_size, found.st_mtime_ns)
