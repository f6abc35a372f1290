"""File systems in user space: the messages of /dev/fuse. Source: include/uapi/linux/fuse.h."""

from __future__ import annotations

import _struct as struct

HEADER = struct.Struct("=IIQQIIII")  # length, operation, unique, node, uid, gid, pid
ANSWER = struct.Struct("=IiQ")  # length, negative errno or 0, unique
ENTRY = struct.Struct(
    "=QQQQII"
)  # node, generation, seconds and nanoseconds that name and attributes hold
HOLDS = struct.Struct("=QII")  # of attributes alone: seconds, nanoseconds
# inode, size, blocks, three times; their nanoseconds, mode, links, uid, gid, device, block size
ATTRIBUTES = struct.Struct("=QQQQQQIIIIIIIIII")
OPENED = struct.Struct("=QII")  # handle, FOPEN_*
STATFS_OUT = struct.Struct("=QQQQQIIII24x")
DIRENT = struct.Struct("=QQII")  # inode, offset of the next, length of the name, type
INIT_OUT = struct.Struct("=IIIIHHIIHHI28x")

GETATTR_IN = struct.Struct("=IIQ")  # flags, handle
# Which, handle, size, lock owner, three times; their nanoseconds, mode, uid, gid
SETATTR_IN = struct.Struct("=IIQQQQQQIIIIIIII")
MKNOD_IN = struct.Struct("=IIII")  # mode, device, umask
MKDIR_IN = struct.Struct("=II")  # mode, umask
RENAME_IN = struct.Struct("=Q")  # the other directory
RENAME2_IN = struct.Struct("=QII")  # the other directory, flags
LINK_IN = struct.Struct("=Q")  # what gets another name
OPEN_IN = struct.Struct("=II")  # flags
CREATE_IN = struct.Struct("=IIII")  # flags, mode, umask
IO_IN = struct.Struct("=QQIIQII")  # handle, offset, size, flags, lock owner, flags of the file
RELEASE_IN = struct.Struct("=QIIQ")  # handle
FSYNC_IN = struct.Struct("=QII")  # handle
WRITTEN = struct.Struct("=II")  # bytes
FALLOCATE_IN = struct.Struct("=QQQII")  # handle, offset, length, mode
FORGET_IN = struct.Struct("=Q")  # how many lookups
BATCH_FORGET_IN = struct.Struct("=II")  # how many of the next
FORGET_ONE = struct.Struct("=QQ")  # node, lookups

LOOKUP, FORGET, GETATTR, SETATTR, READLINK, SYMLINK = 1, 2, 3, 4, 5, 6
MKNOD, MKDIR, UNLINK, RMDIR, RENAME, LINK, OPEN, READ, WRITE = 8, 9, 10, 11, 12, 13, 14, 15, 16
STATFS, RELEASE, FSYNC, FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR = 17, 18, 20, 25, 26, 27, 28, 29
FSYNCDIR, CREATE, INTERRUPT, DESTROY, BATCH_FORGET, FALLOCATE, RENAME2 = 30, 35, 36, 38, 42, 43, 45
READDIRPLUS = 44

ROOT = 1  # the node of a file system's root
GETATTR_FH = 1
FATTR_MODE, FATTR_UID, FATTR_GID, FATTR_SIZE = 1, 2, 4, 8
FATTR_ATIME, FATTR_MTIME, FATTR_FH = 16, 32, 64
FATTR_ATIME_NOW, FATTR_MTIME_NOW = 128, 256
_ASYNC_READ, _BIG_WRITES, _AUTO_INVAL_DATA = 1, 1 << 5, 1 << 12
_PARALLEL_DIROPS, _MAX_PAGES, _CACHE_SYMLINKS = 1 << 18, 1 << 22, 1 << 23
_INIT_EXT = 1 << 30  # there are more flags than fit in 32 bits
DO_READDIRPLUS, READDIRPLUS_AUTO = 1 << 13, 1 << 14
ALLOW_IDMAP = 1 << 40  # Linux 6.12
MOST_BYTES = 1 << 18  # of one read or write
BUFFER = MOST_BYTES + (1 << 13)  # of a message: what the kernel wants there to be room for


def agreed(message: bytes | bytearray | memoryview, besides: int = 0) -> bytes:
    """The answer to INIT: protocol 7.31, and what we have of it.

    Args:
        besides: Further flags, where the kernel offers them.
    """
    _length, _operation, unique, *_ = HEADER.unpack_from(message)
    offered = struct.unpack_from("=I", message, HEADER.size + 12)[0]
    if offered & _INIT_EXT:
        offered |= struct.unpack_from("=I", message, HEADER.size + 16)[0] << 32
    wanted = _ASYNC_READ | _BIG_WRITES | _AUTO_INVAL_DATA | besides
    wanted |= _PARALLEL_DIROPS | _MAX_PAGES | _CACHE_SYMLINKS
    if wanted >> 32:
        wanted |= _INIT_EXT
    flags, more = (wanted & offered) & 0xFFFFFFFF, (wanted & offered) >> 32
    body = INIT_OUT.pack(
        *(7, 31, MOST_BYTES, flags, 16, 12, MOST_BYTES, 1, MOST_BYTES >> 12, 0, more)
    )
    return ANSWER.pack(ANSWER.size + len(body), 0, unique) + body


def dirent(entry: tuple[str, int, int], following: int) -> bytes:
    """A name in a directory, its inode and type: filled up as the kernel wants it.

    Args:
        following: The offset of the next.
    """
    name, inode, kind = entry
    raw = name.encode("utf-8", "surrogateescape")
    packed = DIRENT.pack(inode, following, len(raw), kind) + raw
    return packed + bytes(-len(packed) % 8)
