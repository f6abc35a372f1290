"""User namespaces that exist only to carry an id map, for idmapped mounts."""

from __future__ import annotations

import posix as os

from ..linux import namespaces
from . import build

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .plan import Tree


def restricted(fd: int, tree: Tree) -> int:
    """A detached copy of a mount, made what its tree says: ids are mapped, too.

    Raises:
        OSError: It cannot be; then `fd` is closed.
    """
    idmap_fd = -1
    try:
        if tree["idmap"]:
            idmap_fd = user_namespace(tree["idmap"], tree["idmap_gid"])
        build.restrict_tree(fd, tree, idmap_fd)
    except OSError:
        os.close(fd)
        raise
    finally:
        if idmap_fd >= 0:
            os.close(idmap_fd)
    return fd


def user_namespace(uid_map: str, gid_map: str) -> int:
    """A descriptor of a new user namespace with these maps.

    Source: mount_setattr(2), MOUNT_ATTR_IDMAP.
    """
    ready_read, ready_write = os.pipe2(os.O_CLOEXEC)
    pid, pidfd = namespaces.clone3(namespaces.CLONE_NEWUSER)
    if pid == 0:
        os.close(ready_write)
        os.read(ready_read, 1)  # until the parent has opened our namespace
        os._exit(0)
    try:
        namespaces.write_id_maps(pid, uid_map, gid_map, deny_setgroups=False)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(ready_write)
        os.close(ready_read)
        os.close(pidfd)
        os.waitpid(pid, 0)
