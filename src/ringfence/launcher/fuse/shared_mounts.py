"""FUSE server of the host directories that a machine's user mounted: as `share`, but both sides
write.

So the guest's kernel asks each time, files are held open for it, and whether one may be written is for the
mounts in the jail to say.
"""

from __future__ import annotations

import _stat as stat
import errno
import marshal
import posix as os
import time

from ...linux import files, fuse
from . import share
from .nodes import text
from .share import checked, name_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_FLAGS = os.O_ACCMODE | os.O_APPEND
_NOREPLACE = 1  # include/uapi/linux/fs.h: RENAME_NOREPLACE


class Handle:
    """An open file, or an open directory with its entries; then `fd` is -1."""

    __slots__ = ("entries", "fd", "flags", "node")

    def __init__(
        self, node: int, flags: int, fd: int, entries: share.Entries | None = None
    ) -> None:
        self.node, self.flags, self.fd = node, flags, fd
        self.entries = entries or []


class SharedMounts(share.Share):
    """See `Share`. Modes have no set-id bits, and nobody is given anything."""

    holds_s = 0

    def __init__(self, root: int, whose: int = 0) -> None:
        super().__init__(root, whose)
        self.handles: dict[int, Handle] = {}
        self.last_handle = 0

    # -- open files ---------------------------------------------------------------------------

    def opened(self, handle: Handle) -> bytes:
        self.last_handle += 1
        self.handles[self.last_handle] = handle
        return fuse.OPENED.pack(self.last_handle, 0, 0)

    def open(self, node: int, body: memoryview) -> bytes:
        flags = fuse.OPEN_IN.unpack_from(body)[0] & _FLAGS
        return self.opened(Handle(node, flags, self.open_fd(node, flags)))

    def create(self, node: int, body: memoryview) -> bytes:
        flags, mode, _umask, _ = fuse.CREATE_IN.unpack_from(body)
        name = name_in(body[fuse.CREATE_IN.size :])
        how = flags & (_FLAGS | os.O_EXCL) | os.O_CREAT | share.SAFE
        directory = self.nodes.directory(node)
        try:
            fd = os.open(name, how, mode & 0o1777, dir_fd=directory)
        finally:
            os.close(directory)
        try:
            entry = self.entry(node, name)
        except BaseException:
            os.close(fd)
            raise
        number = fuse.FORGET_IN.unpack_from(entry)[0]
        return entry + self.opened(Handle(number, flags & _FLAGS, fd))

    def open_directory(self, node: int, _body: memoryview) -> bytes:
        return self.opened(Handle(node, 0, -1, self.listed(node)))

    def entries(self, node: int, handle: int, offset: int) -> share.Entries:
        if not offset:
            self.handles[handle].entries = self.listed(node)  # also after a rewinddir(3)
        return self.handles[handle].entries

    def release(self, _node: int, body: memoryview) -> bytes:
        opened = self.handles.pop(fuse.RELEASE_IN.unpack_from(body)[0], None)
        if opened is not None and opened.fd >= 0:
            os.close(opened.fd)
        return b""

    def fd_of(self, node: int, handle: int) -> int:
        del node
        opened = self.handles.get(handle)
        if opened is None or opened.fd < 0:
            raise OSError(errno.EBADF, "is not open")
        return opened.fd

    def stat(self, node: int, handle: int = 0) -> Any:
        opened = self.handles.get(handle)
        if opened is not None and opened.fd >= 0:
            return os.fstat(opened.fd)
        return super().stat(node)

    def write(self, node: int, body: memoryview) -> bytes:
        handle, offset, size, *_ = fuse.IO_IN.unpack_from(body)
        fd, data = self.fd_of(node, handle), body[fuse.IO_IN.size : fuse.IO_IN.size + size]
        done = 0
        while done < len(data):
            done += os.pwrite(fd, data[done:], offset + done)
        return fuse.WRITTEN.pack(done, 0)

    def fsync(self, node: int, body: memoryview) -> bytes:
        os.fsync(self.fd_of(node, fuse.FSYNC_IN.unpack_from(body)[0]))
        return b""

    def allocate(self, node: int, body: memoryview) -> bytes:
        handle, offset, length, mode, _ = fuse.FALLOCATE_IN.unpack_from(body)
        if mode:
            raise OSError(errno.EOPNOTSUPP, "only to make room")
        os.posix_fallocate(self.fd_of(node, handle), offset, length)
        return b""

    # -- names --------------------------------------------------------------------------------

    def _in(self, node: int, name: str, do: Callable[[str, int], None]) -> None:
        directory = self.nodes.directory(node)
        try:
            do(name, directory)
        finally:
            os.close(directory)

    def _make(self, node: int, name: str, do: Callable[[str, int], None]) -> bytes:
        self._in(node, name, do)
        return self.entry(node, name)

    def make_directory(self, node: int, body: memoryview) -> bytes:
        mode, _umask = fuse.MKDIR_IN.unpack_from(body)
        name = name_in(body[fuse.MKDIR_IN.size :])
        return self._make(node, name, lambda name, at: os.mkdir(name, mode & 0o1777, dir_fd=at))

    def make_node(self, node: int, body: memoryview) -> bytes:
        mode, _device, _umask, _ = fuse.MKNOD_IN.unpack_from(body)
        # A socket would be the guest's kernel's alone, and in the way of programs of the host that find it.
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise OSError(errno.EPERM, "no devices, and no sockets")
        kind = stat.S_IFMT(mode) | mode & 0o777
        name = name_in(body[fuse.MKNOD_IN.size :])
        return self._make(node, name, lambda name, at: os.mknod(name, kind, dir_fd=at))

    def make_link(self, node: int, body: memoryview) -> bytes:
        name, target, *_ = bytes(body).split(b"\0")
        to = text(target)
        return self._make(node, checked(name), lambda name, at: os.symlink(to, name, dir_fd=at))

    def link(self, node: int, body: memoryview) -> bytes:
        source, old = self.nodes.place(fuse.LINK_IN.unpack_from(body)[0])

        def link(name: str, at: int) -> None:
            os.link(old, name, src_dir_fd=source, dst_dir_fd=at, follow_symlinks=False)

        try:
            return self._make(node, name_in(body[fuse.LINK_IN.size :]), link)
        finally:
            os.close(source)

    def remove(self, node: int, body: memoryview) -> bytes:
        return self._remove(node, name_in(body), os.unlink)

    def remove_directory(self, node: int, body: memoryview) -> bytes:
        return self._remove(node, name_in(body), os.rmdir)

    def _remove(self, node: int, name: str, remove: Callable[..., None]) -> bytes:
        self._in(node, name, lambda name, at: remove(name, dir_fd=at))
        self.nodes.gone(node, name)
        return b""

    def rename(self, node: int, body: memoryview) -> bytes:
        return self._move(node, fuse.RENAME_IN.unpack_from(body)[0], body[fuse.RENAME_IN.size :])

    def rename_as(self, node: int, body: memoryview) -> bytes:
        """With RENAME_NOREPLACE, the guest's kernel has looked that nothing is there."""
        to, flags, _ = fuse.RENAME2_IN.unpack_from(body)
        if flags & ~_NOREPLACE:
            raise OSError(errno.EINVAL, "is not served")
        return self._move(node, to, body[fuse.RENAME2_IN.size :])

    def _move(self, node: int, to: int, names: memoryview) -> bytes:
        old, new = (checked(each) for each in bytes(names).split(b"\0")[:2])
        source = self.nodes.directory(node)
        try:
            self._in(
                to, new, lambda name, at: os.rename(old, name, src_dir_fd=source, dst_dir_fd=at)
            )
        finally:
            os.close(source)
        self.nodes.moved((node, old), (to, new))
        return b""

    # -- attributes ---------------------------------------------------------------------------

    def setattr(self, node: int, body: memoryview) -> bytes:
        which, _, handle, size, _, *times, mode, _, uid, gid, _ = fuse.SETATTR_IN.unpack_from(body)
        handle = handle if which & fuse.FATTR_FH else 0
        if which & (fuse.FATTR_UID | fuse.FATTR_GID):
            self._check_owner(
                node, uid if which & fuse.FATTR_UID else -1, gid if which & fuse.FATTR_GID else -1
            )
        if which & fuse.FATTR_SIZE:
            self._truncate(node, handle, size)
        if which & fuse.FATTR_MODE:
            self._at(node, lambda name, at: files.chmod_nofollow(at, name, mode & 0o1777))
        if which & (fuse.FATTR_ATIME | fuse.FATTR_MTIME):
            ns = self._times(node, handle, which, times)
            self._at(node, lambda name, at: os.utime(name, ns=ns, dir_fd=at, follow_symlinks=False))
        return self.described(node, handle)

    def _at(self, node: int, do: Callable[[str, int], None]) -> None:
        """Do something with a file by its name."""
        directory, name = self.nodes.place(node)
        try:
            do(name, directory)
        finally:
            os.close(directory)

    def _check_owner(self, node: int, uid: int, gid: int) -> None:
        info = self.stat(node)
        for wanted, found in ((uid, info.st_uid), (gid, info.st_gid)):
            if wanted not in (-1, found or self.whose):
                raise PermissionError(errno.EPERM, "the owner is the host's and cannot change")

    def _truncate(self, node: int, handle: int, size: int) -> None:
        opened = self.handles.get(handle)
        if opened is not None and opened.fd >= 0:
            os.ftruncate(opened.fd, size)
            return
        fd = self.open_fd(node, os.O_WRONLY)
        try:
            os.ftruncate(fd, size)
        finally:
            os.close(fd)

    def _times(self, node: int, handle: int, which: int, said: list[int]) -> tuple[int, int]:
        """Of access and of change, in ns: as said, as they are, or now."""
        info = self.stat(node, handle)
        now, given = time.time_ns(), [said[i] * 10**9 + said[i + 3] for i in (0, 1)]
        kinds = (
            (fuse.FATTR_ATIME, fuse.FATTR_ATIME_NOW, info.st_atime_ns, given[0]),
            (fuse.FATTR_MTIME, fuse.FATTR_MTIME_NOW, info.st_mtime_ns, given[1]),
        )
        atime, mtime = (
            (now if which & at_once else wanted) if which & bit else found
            for bit, at_once, found, wanted in kinds
        )
        return atime, mtime

    # -- with the machine -----------------------------------------------------------------------

    def written(self) -> bytes:
        handles = [(i, each.node, each.flags, each.fd < 0) for i, each in self.handles.items()]
        return marshal.dumps((self.nodes.written(), self.last_handle, handles))

    def read_back(self, said: bytes) -> None:
        """As `Share`. What cannot be opened again is, to the guest, not open."""
        known, self.last_handle, handles = marshal.loads(said)
        self.nodes.read(known)
        for number, node, flags, is_directory in handles:
            try:
                fd = -1 if is_directory else self.open_fd(node, flags)
                self.handles[number] = Handle(
                    node, flags, fd, self.listed(node) if is_directory else None
                )
            except OSError:
                continue
