"""Files of a native sandbox.

PID 1 opens a path as the sandbox sees it and passes the descriptor out, so that no name which the
guest controls is ever resolved on the host; directories are read through such descriptors, one
name at a time, without following links. Trees travel as tar streams made and unpacked by a helper
inside the sandbox.
"""

from __future__ import annotations

import errno
import os
import stat

from ...errors import FileError, IsADirectory, file_error
from ...model.files import FileInfo
from ..local.agents.fileinfo import describe, first_names
from ..local.agents.files import LocalFiles

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO

    from .live import LiveSandbox
    from .trees import Helper

    Progress = Callable[[int, str], None]


class NativeFiles(LocalFiles):
    def __init__(self, sandbox: LiveSandbox) -> None:
        super().__init__(sandbox)
        self._sandbox = sandbox

    def open_read(self, path: str) -> BinaryIO:
        return open(self._open_file(path, os.O_RDONLY, 0), "rb", buffering=1 << 18)

    def open_write(self, path: str, *, append: bool = False, mode: int = 0o644) -> BinaryIO:
        flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC)
        return open(self._open_file(path, flags, mode), "wb", buffering=1 << 18)

    def list(self, path: str, after: str = "", most: int | None = None) -> list[FileInfo]:
        base = self._absolute(path)
        fd = self._open(base, os.O_RDONLY | os.O_DIRECTORY, 0)
        try:
            with os.scandir(fd) as entries:
                names = first_names((each.name for each in entries), after, most)
            found = (_info(base, name, fd) for name in names)
            return [info for info in found if info]
        except OSError as exc:
            raise file_error(exc.errno or errno.EIO, base) from exc
        finally:
            os.close(fd)

    def move(self, src: str, dst: str) -> None:
        source = self._absolute(src)
        self._ask(source, "move", source, self._absolute(dst))

    def start_helper(self, what: str, path: str, options: str = "") -> Helper:
        from .trees import Helper

        self._sandbox.require_awake()
        return Helper(self._sandbox, what, self._absolute(path), options=options)

    # -- inner ------------------------------------------------------------------------------

    def _remove_tree(self, path: str) -> None:
        from .trees import remove

        remove(self._sandbox, path)

    def _ask(self, path: str, verb: str, *args: object) -> bytes:
        try:
            return self._sandbox.ask_files(verb, *args)[0]
        except OSError as exc:
            raise file_error(exc.errno or 5, path) from exc

    def _open(self, path: str, flags: int, mode: int) -> int:
        try:
            _body, fds = self._sandbox.ask_files("open", path, flags, mode)
        except OSError as exc:
            raise file_error(exc.errno or 5, path) from exc
        return fds[0]

    def _open_file(self, path: str, flags: int, mode: int) -> int:
        where = self._absolute(path)
        fd = self._open(where, flags, mode)
        kind = stat.S_IFMT(os.fstat(fd).st_mode)
        if kind == stat.S_IFREG:
            os.set_blocking(fd, True)
            return fd
        os.close(fd)
        if kind == stat.S_IFDIR:
            raise IsADirectory(f"{where}: is a directory", path=where)
        hint = "read a device, pipe or socket with a program inside: exec([...])"
        raise FileError(f"{where}: is not a regular file", path=where, hint=hint)


def _info(base: str, name: str, directory: int) -> FileInfo | None:
    """None for what went away while we looked, or became something else: programs run inside."""
    try:
        info = os.stat(name, dir_fd=directory, follow_symlinks=False)
        link = os.readlink(name, dir_fd=directory) if stat.S_ISLNK(info.st_mode) else ""
    except OSError as exc:
        if exc.errno not in (errno.ENOENT, errno.EINVAL):  # EINVAL: no symlink any longer
            raise
        return None
    path = f"{base.rstrip('/')}/{name}"
    return describe(path, name, info.st_mode, info.st_size, info.st_mtime_ns, link)
