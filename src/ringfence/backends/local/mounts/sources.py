"""Host paths that are mounted: resolved once, by descriptor."""

from __future__ import annotations

import errno
import os
import stat

from ....errors import InvalidRequest, IsolationError
from ....linux import files, mounts
from ..session import no_source
from . import template

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ....launcher.plan import Tree
    from ....model.mount import Mount

_AT_FDCWD = -100  # linux/fcntl.h
_PINNED = os.O_PATH | os.O_CLOEXEC
_READ_WRITE = mounts.MOUNT_ATTR_NOSUID | mounts.MOUNT_ATTR_NODEV


def pin(mount: Mount, owner: int | None) -> tuple[Tree, int]:
    """Resolve a host path once; what is mounted later is this very inode or nothing.

    Args:
        owner: The host id that the source's owner is to appear as; None leaves ids as they are.

    Returns:
        The tree, and the descriptor that pins it, the caller's to close.

    Raises:
        InvalidRequest: It does not exist, may not be seen by the caller, or is a link not to be followed.
    """
    try:
        fd = _open(mount)
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


def _open(mount: Mount) -> int:
    if mount.nofollow:
        try:
            return files.openat2(
                _AT_FDCWD, mount.source, _PINNED, resolve=files.RESOLVE_NO_SYMLINKS
            )
        except OSError as exc:
            if exc.errno != errno.ELOOP:
                raise
            raise _link(f"{mount.source}: a symbolic link is on the way", mount.source) from exc
    info = os.lstat(mount.source)
    # Another user could have it lead anywhere. The rule of proc_sys_fs(5), protected_symlinks.
    if stat.S_ISLNK(info.st_mode) and info.st_uid not in (0, os.geteuid()):
        raise _link(f"{mount.source} is a symbolic link of user {info.st_uid}", mount.source)
    return os.open(mount.source, _PINNED)


def _link(what: str, source: str) -> InvalidRequest:
    return InvalidRequest(
        what,
        field="mounts.source",
        hint=f"if the link is correct, use its target: {os.path.realpath(source)}",
    )


_SCANNED_ENTRIES = 50_000


def refuse_sockets(source: str) -> None:
    """A directory with unix sockets is not shown to a sandbox that may connect to them.

    Raises:
        IsolationError: It has one, or is too large to tell.
    """
    seen = 0
    _refuse_socket(source)
    for directory, names, others in os.walk(source):
        for name in others:
            _refuse_socket(os.path.join(directory, name))
        seen += len(names) + len(others)
        if seen > _SCANNED_ENTRIES:
            raise IsolationError(
                f"{source} has too many files to look for unix sockets in it",
                hint="give the mount when the sandbox is created",
            )


def _refuse_socket(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return  # it went away since its name was read
    if stat.S_ISSOCK(mode):
        raise IsolationError(
            f"{path} is a unix socket, and this sandbox may connect to it",
            hint="give the mount when the sandbox is created: it then connects to sockets of its own only",
        )
