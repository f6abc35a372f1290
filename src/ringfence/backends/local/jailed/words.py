"""Standard error of a launcher, an emulator or gVisor: a bounded file in memory."""

from __future__ import annotations

import fcntl
import os

_ROOM = 1 << 20  # gVisor's last words, with every stack, are long
_READ = 1 << 16
_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


def room_for_words(name: str) -> int:
    """A file for them that takes no more memory than that, whoever comes to write to it.

    A program may leave it open in a process that what it confines can look into, as Codex does; and no limit
    of a sandbox counts what its user has written to a file of ours.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, _ROOM)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def last_words(errors: int, *idle: str) -> str:
    """The last lines of what the program, or one in it, wrote to its standard error.

    Args:
        idle: A line with one of these in it says nothing of how it ended.
    """
    text = os.pread(errors, _ROOM, 0).rstrip(b"\0")[-_READ:]
    said = text.decode("utf-8", "replace").splitlines()
    lines = [
        line.strip() for line in said if line.strip() and not any(word in line for word in idle)
    ]
    return " / ".join(lines[-3:])[:1000]
