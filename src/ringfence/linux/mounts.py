"""Mount calls, old API (mount(2), umount2(2)) and new (open_tree(2), move_mount(2), ...)."""

from __future__ import annotations

import posix as os

from . import cdata
from .libc import declare, path_bytes, raise_errno

# include/uapi/linux/mount.h
MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_MOVE = 8192
MS_REC = 16384
MS_PRIVATE = 1 << 18
MS_SLAVE = 1 << 19
MS_SHARED = 1 << 20
MNT_DETACH = 2  # include/linux/fs.h

OPEN_TREE_CLONE = 1
OPEN_TREE_CLOEXEC = os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH = 0x4
MOUNT_ATTR_RDONLY = 0x1
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_NODEV = 0x4
MOUNT_ATTR_NOEXEC = 0x8
MOUNT_ATTR_IDMAP = 0x100000
AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000

_path, _fd, _flags = cdata.c_char_p, cdata.c_int, cdata.c_uint
_mount = declare("mount", _path, _path, _path, cdata.c_ulong, _path)
_umount2 = declare("umount2", _path, cdata.c_int)
_pivot_root = declare("pivot_root", _path, _path)
_open_tree = declare("open_tree", _fd, _path, _flags)
_move_mount = declare("move_mount", _fd, _path, _fd, _path, _flags)


def mount(source: str, target: str, fstype: str, flags: int = 0, data: str = "") -> None:
    """Mount `source` at `target`.

    Source: mount(2).
    """
    options = path_bytes(data) if data else None
    names = path_bytes(source), path_bytes(target), path_bytes(fstype)
    if _mount(*names, flags, options) < 0:
        raise_errno("mount", target)


def umount2(target: str, flags: int = 0) -> None:
    """Detach the filesystem mounted at `target`.

    Raises:
        OSError: EINVAL if `target` is not a mount point; EBUSY if in use.

    Source: umount2(2).
    """
    if _umount2(path_bytes(target), flags) < 0:
        raise_errno("umount2", target)


def pivot_root(new_root: str, put_old: str) -> None:
    """Make `new_root` the root mount; the old one goes to `put_old`.

    Source: pivot_root(2), "pivot_root('.', '.')" in its NOTES.
    """
    if _pivot_root(path_bytes(new_root), path_bytes(put_old)) < 0:
        raise_errno("pivot_root", new_root)


def open_tree(path: str, *, dir_fd: int = AT_FDCWD, recursive: bool = True) -> int:
    """A descriptor of a detached copy of the mount tree at `path`; of `dir_fd` itself when empty.

    Source: open_tree(2), Linux 5.2.
    """
    flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | (AT_RECURSIVE if recursive else 0)
    flags |= AT_EMPTY_PATH if not path else 0
    fd = _open_tree(dir_fd, path_bytes(path), flags)
    if fd < 0:
        raise_errno("open_tree", path)
    return fd


def move_mount(tree_fd: int, target: str, *, dir_fd: int = AT_FDCWD) -> None:
    """Attach the detached tree `tree_fd` at `target`.

    Source: move_mount(2), Linux 5.2.
    """
    flags = MOVE_MOUNT_F_EMPTY_PATH
    if not target:
        flags |= 0x40  # MOVE_MOUNT_T_EMPTY_PATH: the target is dir_fd itself
    if _move_mount(tree_fd, b"", dir_fd, path_bytes(target), flags) < 0:
        raise_errno("move_mount", target)


_fsopen = declare("fsopen", _path, _flags)
_fsconfig = declare("fsconfig", _fd, _flags, _path, _path, cdata.c_int)
_fsmount = declare("fsmount", _fd, _flags, _flags)
_SET_FLAG, _SET_STRING, _CREATE = 0, 1, 6  # enum fsconfig_command


def new_mount(fstype: str, settings: dict[str, str], attributes: int) -> int:
    """Return a descriptor of a new, detached mount; a setting with an empty value is a flag.

    Source: fsopen(2), fsconfig(2), fsmount(2), Linux 5.2.
    """
    context = _fsopen(path_bytes(fstype), 1)  # FSOPEN_CLOEXEC
    if context < 0:
        raise_errno("fsopen", fstype)
    try:
        for name, value in settings.items():
            kind = _SET_STRING if value else _SET_FLAG
            text = path_bytes(value) if value else None
            if _fsconfig(context, kind, path_bytes(name), text, 0) < 0:
                raise_errno("fsconfig", name)
        if _fsconfig(context, _CREATE, None, None, 0) < 0:
            raise_errno("fsconfig", fstype)
        fd = _fsmount(context, 1, attributes)  # FSMOUNT_CLOEXEC
        if fd < 0:
            raise_errno("fsmount", fstype)
        return fd
    finally:
        os.close(context)


class _MountAttr(cdata.Structure):
    """struct mount_attr, include/uapi/linux/mount.h."""

    _fields_ = (
        ("attr_set", cdata.c_uint64),
        ("attr_clr", cdata.c_uint64),
        ("propagation", cdata.c_uint64),
        ("userns_fd", cdata.c_uint64),
    )


_mount_setattr = declare("mount_setattr", _fd, _path, _flags, cdata.c_void_p, cdata.c_size_t)


def mount_setattr(fd: int, attributes: int, *, userns_fd: int = 0, recursive: bool = True) -> None:
    """Set `attributes` on the mount tree behind `fd`, on every mount in it when `recursive`.

    Source: mount_setattr(2), Linux 5.12; MOUNT_ATTR_IDMAP wants a mount not yet attached.
    """
    attr = _MountAttr(attributes, 0, 0, userns_fd)
    flags = AT_EMPTY_PATH | (AT_RECURSIVE if recursive else 0)
    if _mount_setattr(fd, b"", flags, cdata.byref(attr), cdata.sizeof(attr)) < 0:
        raise_errno("mount_setattr")
