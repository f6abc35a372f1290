"""FUSE server of read-only host files for a machine's kernel.

The guest's input is untrusted: names are single names, numbers are looked up, no link is ever
followed. The guest's kernel may cache all replies and open nothing: so nothing is held open for it,
and the only state is names.
"""

from __future__ import annotations

import _stat as stat
import errno
import marshal
import posix as os

from ...linux import fuse
from .nodes import Nodes, text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Entries = list[tuple[str, int, int]]  # name, inode, type

_FOREVER_S = 1 << 20
SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_DIRECTORY, _REGULAR, _LINK = 4, 8, 10  # DT_*, include/linux/fs_types.h
_ITSELF = [(".", 1, _DIRECTORY), ("..", 1, _DIRECTORY)]  # which the guest's kernel finds without us


class Share:
    """All below one directory, as one guest sees it.

    Args:
        root: Its descriptor.
        whose: Who the files are to be of there that are ours here.
    """

    holds_s = _FOREVER_S  # so long need the guest's kernel not ask again
    most_open = 32  # files, of those read last

    def __init__(self, root: int, whose: int = 0) -> None:
        self.nodes, self.whose = Nodes(root), whose
        self._open: dict[int, int] = {}
        self._listed: tuple[int, Entries] = (0, [])

    def answer(self, message: memoryview) -> bytes:
        """Answer one message; empty for those without an answer."""
        _length, operation, unique, node, *_ = fuse.HEADER.unpack_from(message)
        problem, body = 0, b""
        try:
            name = _OPERATIONS.get(operation, "")
            if not hasattr(self, name):
                raise OSError(errno.ENOSYS, "is not served")
            body = getattr(self, name)(node, message[fuse.HEADER.size :])
            if body is None:
                return b""
        except OSError as exc:
            problem = exc.errno or errno.EIO
        except Exception:  # noqa: BLE001  whatever is wrong with it: the guest has sent it
            problem = errno.EIO
        said = b"" if problem else body
        return fuse.ANSWER.pack(fuse.ANSWER.size + len(said), -problem, unique) + said

    # -- looking ------------------------------------------------------------------------------

    def owner(self, node: int, info: Any) -> tuple[int, int]:
        """Return a file's owner as the guest sees it."""
        del node
        return info.st_uid or self.whose, info.st_gid or self.whose

    def attributes(self, node: int, info: Any) -> bytes:
        """Pack a file's attributes as the guest sees them."""
        uid, gid = self.owner(node, info)
        times = info.st_atime_ns, info.st_mtime_ns, info.st_ctime_ns
        return fuse.ATTRIBUTES.pack(
            *(self.inode(info), info.st_size, info.st_blocks),
            *(each // 10**9 for each in times),
            *(each % 10**9 for each in times),
            *(info.st_mode, info.st_nlink, uid, gid, info.st_rdev & 0xFFFFFFFF, info.st_blksize, 0),
        )

    def inode(self, info: Any) -> int:
        """The number that programs see."""
        return int(info.st_ino)

    def look(self, parent: int, name: str, info: Any) -> int:
        """The number that the guest's kernel is to know a name by."""
        del info
        return self.nodes.look(parent, name)

    def entry(self, parent: int, name: str) -> bytes:
        """A name that the guest's kernel shall know: its number and attributes."""
        directory = self.nodes.directory(parent)
        try:
            info = os.stat(name, dir_fd=directory, follow_symlinks=False)
        finally:
            os.close(directory)
        number = self.look(parent, name, info)
        head = fuse.ENTRY.pack(number, 0, self.holds_s, self.holds_s, 0, 0)
        return head + self.attributes(number, info)

    def lookup(self, node: int, body: memoryview) -> bytes:
        try:
            return self.entry(node, name_in(body))
        except FileNotFoundError:
            if not self.holds_s:
                raise
            head = fuse.ENTRY.pack(0, 0, self.holds_s, self.holds_s, 0, 0)
            return head + bytes(fuse.ATTRIBUTES.size)

    def stat(self, node: int, handle: int = 0) -> Any:
        del handle
        directory, name = self.nodes.place(node)
        try:
            return os.stat(name, dir_fd=directory, follow_symlinks=False)
        finally:
            os.close(directory)

    def getattr(self, node: int, body: memoryview) -> bytes:
        flags, _, handle = fuse.GETATTR_IN.unpack_from(body)
        return self.described(node, handle if flags & fuse.GETATTR_FH else 0)

    def described(self, node: int, handle: int = 0) -> bytes:
        """Attributes, and how long they hold."""
        info = self.stat(node, handle)
        return fuse.HOLDS.pack(self.holds_s, 0, 0) + self.attributes(node, info)

    def readlink(self, node: int, _body: memoryview) -> bytes:
        directory, name = self.nodes.place(node)
        try:
            return os.readlink(name, dir_fd=directory).encode("utf-8", "surrogateescape")
        finally:
            os.close(directory)

    def statfs(self, node: int, _body: memoryview) -> bytes:
        directory, _name = self.nodes.place(node)
        try:
            of = os.statvfs(directory)
        finally:
            os.close(directory)
        return fuse.STATFS_OUT.pack(
            *(of.f_blocks, of.f_bfree, of.f_bavail, of.f_files, of.f_ffree),
            *(of.f_bsize, of.f_namemax, of.f_frsize, 0),
        )

    def forget(self, node: int, body: memoryview) -> None:
        self.nodes.forget(node, fuse.FORGET_IN.unpack_from(body)[0])

    def forget_several(self, _node: int, body: memoryview) -> None:
        count = fuse.BATCH_FORGET_IN.unpack_from(body)[0]
        for i in range(count):
            at = fuse.BATCH_FORGET_IN.size + i * fuse.FORGET_ONE.size
            self.nodes.forget(*fuse.FORGET_ONE.unpack_from(body, at))

    # -- reading ------------------------------------------------------------------------------

    def open_fd(self, node: int, flags: int) -> int:
        directory, name = self.nodes.place(node)
        try:
            fd = os.open(name, flags | SAFE, dir_fd=directory)
        finally:
            os.close(directory)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EACCES, "is not a regular file")
        return fd

    def fd_of(self, node: int, handle: int) -> int:
        del handle
        fd = self._open.pop(node, -1)
        if fd < 0:
            fd = self.open_fd(node, os.O_RDONLY)
        self._open[node] = fd
        if len(self._open) > self.most_open:
            os.close(self._open.pop(next(iter(self._open))))
        return fd

    def read(self, node: int, body: memoryview) -> bytes:
        handle, offset, size, *_ = fuse.IO_IN.unpack_from(body)
        return os.pread(self.fd_of(node, handle), min(size, fuse.MOST_BYTES), offset)

    def listed(self, node: int) -> Entries:
        directory, name = self.nodes.place(node)
        try:
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | SAFE, dir_fd=directory)
        finally:
            os.close(directory)
        try:
            with os.scandir(fd) as found:
                return _ITSELF + [(each.name, each.inode(), _type_of(each)) for each in found]
        finally:
            os.close(fd)

    def entries(self, node: int, handle: int, offset: int) -> Entries:
        """The same from one part of a listing to the next."""
        del handle
        if not offset or self._listed[0] != node:
            self._listed = node, self.listed(node)
        return self._listed[1]

    def list(self, node: int, body: memoryview) -> bytes:
        handle, offset, size, *_ = fuse.IO_IN.unpack_from(body)
        said = bytearray()
        entries = self.entries(node, handle, offset)
        for i in range(offset, len(entries)):
            one = fuse.dirent(entries[i], i + 1)
            if len(said) + len(one) > size:
                break
            said += one
        return bytes(said)

    # -- with the machine -----------------------------------------------------------------------

    def written(self) -> bytes:
        """Serialise the inode table for the server of a machine restored from this one."""
        return marshal.dumps(self.nodes.written())

    def read_back(self, said: bytes) -> None:
        """Go on where another has left off."""
        self.nodes.read(marshal.loads(said))


def name_in(body: memoryview) -> str:
    return checked(bytes(body).partition(b"\0")[0])


def checked(name: bytes) -> str:
    """A name in a directory, and nothing more.

    Raises:
        OSError: EINVAL if it is more.
    """
    if not name or b"/" in name or name in (b".", b".."):
        raise OSError(errno.EINVAL, "is not a name")
    return text(name)


def _type_of(entry: Any) -> int:
    if entry.is_symlink():
        return _LINK
    if entry.is_dir(follow_symlinks=False):
        return _DIRECTORY
    return _REGULAR if entry.is_file(follow_symlinks=False) else 0


# Which method answers to what; a share that cannot be written to has only some.
_OPERATIONS = {
    fuse.LOOKUP: "lookup",
    fuse.FORGET: "forget",
    fuse.BATCH_FORGET: "forget_several",
    fuse.GETATTR: "getattr",
    fuse.SETATTR: "setattr",
    fuse.READLINK: "readlink",
    fuse.SYMLINK: "make_link",
    fuse.MKNOD: "make_node",
    fuse.MKDIR: "make_directory",
    fuse.UNLINK: "remove",
    fuse.RMDIR: "remove_directory",
    fuse.RENAME: "rename",
    fuse.RENAME2: "rename_as",
    fuse.LINK: "link",
    fuse.OPEN: "open",
    fuse.CREATE: "create",
    fuse.READ: "read",
    fuse.WRITE: "write",
    fuse.STATFS: "statfs",
    fuse.RELEASE: "release",
    fuse.RELEASEDIR: "release",
    fuse.FSYNC: "fsync",
    fuse.FALLOCATE: "allocate",
    fuse.OPENDIR: "open_directory",
    fuse.READDIR: "list",
    fuse.READDIRPLUS: "list_with_attributes",
}
