"""Our Python on the root of an image, which may have no C library or another one.

The host's files that it needs are shown read-only at a place of their own, and the loader that it was
linked with starts it from there: no file of the image's is opened on the way, but for
`/etc/ld.so.preload`, which no loader leaves out and which is therefore always replaced.
"""

from __future__ import annotations

import functools
import os
import re
import struct

PLACE, PRELOAD = "/.ringfence-runtime", "/etc/ld.so.preload"
_PT_INTERP = 3  # elf.h
_SHARED = re.compile(r"\s(/\S+\.so[.\d]*)$", re.MULTILINE)


@functools.cache
def trees(python: str) -> tuple[tuple[str, str], ...]:
    """List the trees that the interpreter `python` needs: host directory, place inside."""
    needed = [python, *_loader(python), *_libraries(python)]
    return tuple((top, PLACE + top) for top in dict.fromkeys(map(_top, needed)))


@functools.cache
def command(python: str) -> list[str]:
    """How `python` is started from what `trees` shows."""
    loader = _loader(python)
    if not loader:
        return [PLACE + python]  # it is static
    directories = dict.fromkeys(PLACE + os.path.dirname(path) for path in _libraries(python))
    options = ["--inhibit-cache"] if "ld-linux" in loader[0] else []  # musl's has no cache
    start = PLACE + os.path.realpath(loader[0])
    return [start, *options, "--library-path", ":".join(directories), PLACE + python]


def _top(path: str) -> str:
    """The directory to show for a file: one of the system's, or the installation of another Python."""
    real = os.path.realpath(path)
    if _is_systems(real):
        return "/" + real.split("/")[1]
    return os.path.dirname(os.path.dirname(real))


def _is_systems(path: str) -> bool:
    return path.startswith(("/usr/", "/lib"))


def _libraries(python: str) -> list[str]:
    """Shared libraries of this very process: `python`, of the same version, needs such. proc_pid_maps(5)."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        found = {os.path.realpath(path) for path in _SHARED.findall(file.read())}
    # Extension modules it finds by itself; what the caller has imported is not for the agent.
    own = _top(python) + "/lib/lib"
    return sorted(path for path in found if _is_systems(path) or path.startswith(own))


def _loader(program: str) -> list[str]:
    """The loader that an ELF program names, if any. Source: elf(5)."""
    with open(program, "rb") as file:
        head = file.read(64)
        offset, size, count = struct.unpack_from("<Q14xHH", head, 32)
        for number in range(count):
            file.seek(offset + number * size)
            kind, at, length = struct.unpack("<I4xQ16xQ16x", file.read(56))
            if kind == _PT_INTERP:
                file.seek(at)
                return [os.fsdecode(file.read(length).rstrip(b"\0"))]
    return []
