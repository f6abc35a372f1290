"""FUSE server of read-only host files for one tenant's sandboxes.

The kernel asks by FUSE and keeps what it was told in the page cache of that file system, which is the
tenant's alone. Each tenant has file systems of its own; one process serves all of a jailer's, in a jail
whose root holds what is shown and nothing else.
"""

from __future__ import annotations

import _stat as stat
import errno
import fcntl
import posix as os
import resource
import select

from ...linux import files, fuse, privileges, seccomp
from .. import wire
from ..parent import rename_process
from .share import Share

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .share import Entries

SHOWN = "/shown"  # in the jail's root
_CONTROL_FD = 3
_CAP_DAC_READ_SEARCH = 1 << 2  # over files of the one id that its user namespace has
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_BESIDES = fuse.DO_READDIRPLUS | fuse.READDIRPLUS_AUTO | fuse.ALLOW_IDMAP
_SPARE_FILES = 64
_NOTHING = bytes(fuse.ENTRY.size + fuse.ATTRIBUTES.size)  # of an entry: it is not looked up
_FREE_INODE_BITS = 48  # no file system in use has longer numbers


class View(Share):
    """All below one directory, whose files somebody on the host may replace.

    Args:
        own: What user and group the kernel that asks knows the one id by that is 0 here.

    A file is what it was when it was looked up, or it is stale: what was cached of one version never
    mixes with another. What has been read is held open, so that it outlives its replacement.
    """

    holds_s = 30  # after that long, what has been replaced is seen

    def __init__(self, root: int, most_open: int = 0, own: tuple[int, int] = (0, 0)) -> None:
        super().__init__(root)
        self.most_open = most_open or self.most_open
        self._own = own
        self._devices: dict[int, int] = {}

    def owner(self, node: int, info: Any) -> tuple[int, int]:
        del node
        uid, gid = self._own
        return info.st_uid or uid, info.st_gid or gid

    def inode(self, info: Any) -> int:
        """Make inode numbers unique: the served trees of several file systems appear as one."""
        which = self._devices.setdefault(info.st_dev, len(self._devices))
        return int(info.st_ino) ^ which << _FREE_INODE_BITS

    def look(self, parent: int, name: str, info: Any) -> int:
        return self.nodes.look(parent, name, _stamp(info))

    def stat(self, node: int, handle: int = 0) -> Any:
        held = self._open.get(node, -1)
        info = os.fstat(held) if held >= 0 else super().stat(node, handle)
        self._check(node, info)
        return info

    def fd_of(self, node: int, handle: int) -> int:
        fd = super().fd_of(node, handle)
        self._check(node, os.fstat(fd))
        return fd

    def _check(self, node: int, info: Any) -> None:
        if node != fuse.ROOT and self.nodes.stamp(node) != _stamp(info):
            closing = self._open.pop(node, -1)
            if closing >= 0:
                os.close(closing)
            raise OSError(errno.ESTALE, "was replaced")

    def forget(self, node: int, body: memoryview) -> None:
        super().forget(node, body)
        self._let_go(node)

    def forget_several(self, node: int, body: memoryview) -> None:
        super().forget_several(node, body)
        for each in [each for each in self._open if not self.nodes.stamp(each)]:
            self._let_go(each)

    def _let_go(self, node: int) -> None:
        if node in self._open and not self.nodes.stamp(node):
            os.close(self._open.pop(node))

    def list_with_attributes(self, node: int, body: memoryview) -> bytes:
        """A listing whose names are looked up at once."""
        handle, offset, size, *_ = fuse.IO_IN.unpack_from(body)
        said = bytearray()
        entries: Entries = self.entries(node, handle, offset)
        for i in range(offset, len(entries)):
            one = fuse.dirent(entries[i], i + 1)
            if len(said) + len(_NOTHING) + len(one) > size:
                break
            said += self._looked_up(node, entries[i][0]) + one
        return bytes(said)

    def _looked_up(self, node: int, name: str) -> bytes:
        if name in (".", ".."):
            return _NOTHING
        try:
            return self.entry(node, name)
        except OSError:
            return _NOTHING  # gone meanwhile: who asks for it hears so

    def close(self) -> None:
        for fd in (*self._open.values(), self.nodes.root):
            os.close(fd)


def _stamp(info: Any) -> tuple[int, ...]:
    """Identify a file's version; a directory's content is always read again."""
    if stat.S_ISDIR(info.st_mode):
        return info.st_dev, info.st_ino
    return info.st_dev, info.st_ino, info.st_mtime_ns, info.st_size


class Server:
    """Answers the kernel for every file system that it was given, until its jailer is gone."""

    def __init__(self, control: wire.Socket) -> None:
        self.control = control
        self._views: dict[int, View] = {}  # by the descriptor where the kernel asks
        self._poll = select.poll()
        self._poll.register(control.fileno(), select.POLLIN)
        self._buffer = bytearray(fuse.BUFFER)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        # Of few tenants each has enough; with many, what was read longest ago is opened anew.
        self._most_open = max(16, (min(most, 1 << 16) - _SPARE_FILES) // 16)

    def run(self) -> None:
        """Serve; when it returns, nobody can ask any more."""
        while True:
            for fd, _events in self._poll.poll():
                if fd != self.control.fileno():
                    self._serve(fd)
                elif not self._take():
                    return

    def _take(self) -> bool:
        """Add a file system: its FUSE device, and the directory it serves, if that is not `SHOWN`.

        The message holds the ids by which that kernel knows our own.
        """
        said, fds = wire.receive_raw(self.control)
        if not said:
            return False
        device, *root = fds
        own = tuple(map(int, said.split()))
        fcntl.fcntl(device, fcntl.F_SETFL, os.O_NONBLOCK)
        shown = root[0] if root else os.open(SHOWN, _DIRECTORY)
        self._views[device] = View(shown, self._most_open, (own[0], own[1]))
        self._poll.register(device, select.POLLIN)
        return True

    def _serve(self, device: int) -> None:
        view, buffer = self._views[device], memoryview(self._buffer)
        while True:
            try:
                size = os.readv(device, [self._buffer])
                message = buffer[:size]
                if fuse.HEADER.unpack_from(message)[1] == fuse.INIT:
                    said = fuse.agreed(message, _BESIDES)
                else:
                    said = view.answer(message)
                if said:
                    os.write(device, said)
            except BlockingIOError:
                return
            except OSError as exc:
                if exc.errno in (errno.ENOENT, errno.EINTR):
                    continue  # who asked has been interrupted
                self._drop(device)  # ENODEV: it is mounted nowhere any more
                return

    def _drop(self, device: int) -> None:
        self._poll.unregister(device)
        self._views.pop(device).close()
        os.close(device)


def serve(control: wire.Socket, program: bytes) -> None:
    """Give up what is not needed, say so, and serve.

    Args:
        program: The system-call filter for it.

    Precondition: in a jail, and all is imported: our own files are out of sight.
    """
    rename_process(b"ringfence-view")
    os.dup2(control.fileno(), _CONTROL_FD)
    control = wire.adopt(_CONTROL_FD)
    files.close_from(_CONTROL_FD + 1)
    server = Server(control)
    privileges.empty_bounding_set(_CAP_DAC_READ_SEARCH)
    privileges.lock_securebits()
    privileges.empty_capability_sets(_CAP_DAC_READ_SEARCH)
    privileges.set_dumpable(False)
    if program:
        seccomp.install_filter(program)
    wire.send_raw(control, b"O")
    server.run()
