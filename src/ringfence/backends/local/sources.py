"""Host paths that are mounted: resolved once, by descriptor."""

from __future__ import annotations

import os

from ...linux import mounts
from . import template
from .session import no_source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ...launcher.plan import Tree
    from ...model.mount import Mount

_READ_WRITE = mounts.MOUNT_ATTR_NOSUID | mounts.MOUNT_ATTR_NODEV


def pin(mount: Mount, owner: int | None) -> tuple[Tree, int]:
    """Resolve a host path once; what is mounted later is this very inode or nothing.

    Args:
        owner: The host id that the source's owner is to appear as; None leaves ids as they are.

    Returns:
        The tree, and the descriptor that pins it, the caller's to close.

    Raises:
        InvalidRequest: It does not exist or may not be seen by the caller.
    """
    try:
        fd = os.open(mount.source, os.O_PATH | os.O_CLOEXEC)
    except OSError as exc:
        raise no_source(mount, exc) from exc
    info = os.fstat(fd)
    tree: Tree = {
        "source": os.readlink(f"/proc/self/fd/{fd}"),
        "device": info.st_dev,
        "inode": info.st_ino,
        "attributes": _READ_WRITE if mount.is_writable else template.READ_ONLY,
        "idmap": "" if owner is None else f"{info.st_uid} {owner} 1",
        "idmap_gid": "" if owner is None else f"{info.st_gid} {owner} 1",
        "fd": -1,
    }
    return tree, fd
