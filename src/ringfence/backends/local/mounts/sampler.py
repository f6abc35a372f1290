"""A program that prints the size of a directory again and again: ``sampler.py PATH EVERY_S``.

It runs by path, alone, with nothing of Ringfence imported. In a user namespace of its own it can read
directories that their owner has closed to itself, as `chmod 0` does inside.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time

_CLONE_NEWUSER = 0x10000000
_REST = 20  # a look takes at most so small a part of the time
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def main(path: str, every_s: float) -> None:
    os.nice(10)
    _read_everything()
    while True:
        began = time.monotonic()
        size, count = measure(path)
        try:
            os.write(1, b"%d %d\n" % (size, count))
        except BrokenPipeError:
            return
        time.sleep(max(every_s, _REST * (time.monotonic() - began)))


def _read_everything() -> None:
    if os.geteuid() == 0:
        return
    uid, gid = os.geteuid(), os.getegid()
    if ctypes.CDLL(None).unshare(_CLONE_NEWUSER) == 0:
        ids = ("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")
        for name, text in ids:
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)


def measure(top: str) -> tuple[int, int]:
    """Bytes and number of inodes below a directory; what vanishes meanwhile is left out."""
    seen, sums = set[int](), [0, 0]
    here = os.open(top, _DIRECTORY)
    pending = [_look(here, seen, sums)]  # names of directories, of each level on the way down
    while pending:
        try:
            if pending[-1]:
                # One open directory at a time, by name: no depth is too deep, no link is followed.
                below = os.open(pending[-1].pop(), _DIRECTORY, dir_fd=here)
                pending.append(_look(below, seen, sums))
            else:
                pending.pop()
                if not pending:
                    break
                below = os.open("..", _DIRECTORY, dir_fd=here)
        except OSError:
            continue  # this one is gone
        os.close(here)
        here = below
    os.close(here)
    return sums[0], sums[1]


def _look(directory: int, seen: set[int], sums: list[int]) -> list[str]:
    """Add what is in a directory; return the names of those below it."""
    names: list[str] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                info = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if info.st_ino not in seen:
                seen.add(info.st_ino)
                sums[0] += info.st_blocks * 512
                sums[1] += 1
                if entry.is_dir(follow_symlinks=False):
                    names.append(entry.name)
    return names


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
