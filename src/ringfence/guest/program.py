"""The agent's executable, if a process image: it is deleted, yet gVisor treats it as our
program.
"""

from __future__ import annotations

import os

from ..launcher.machine_code import process_image_elf
from ..linux import libc, privileges


def leave(place: str) -> None:
    """Be a program that can be saved: gVisor saves none whose file is gone.

    Args:
        place: The directory that it came in.
    """
    if not os.readlink("/proc/self/exe").startswith(f"{place}/"):
        return
    fd = os.open(_python(place), os.O_RDONLY | os.O_CLOEXEC)
    try:
        privileges.prctl(privileges.PR_SET_MM, privileges.PR_SET_MM_EXE_FILE, fd)
    finally:
        os.close(fd)
    libc.munmap(process_image_elf.BASE, process_image_elf.MOST_BYTES)


def _python(place: str) -> str:
    """Find the interpreter behind the process image: the first executable that is mapped."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            rights, path = line.split(None, 2)[1], line[line.find("/") :].rstrip("\n")
            if "x" in rights and path.startswith("/") and not path.startswith(f"{place}/"):
                return path
    raise FileNotFoundError("no program is mapped")
