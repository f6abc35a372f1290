"""Empty directories that stood in for absent protected paths on the host, and their removal."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    # (directory, name, device, inode) of what was made
    Placeholder = tuple[str, str, int, int]

_OPEN_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove(made: list[Placeholder]) -> None:
    """Remove those that are still what we made and still empty, innermost first; others stay."""
    for directory, name, device, inode in reversed(made):
        try:
            parent = os.open(directory, _OPEN_DIR)
        except OSError:
            continue
        try:
            found = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if (found.st_dev, found.st_ino) == (device, inode):
                os.rmdir(name, dir_fd=parent)
        except OSError:
            pass  # gone already, or the sandbox put something next to what is protected
        finally:
            os.close(parent)
