"""The part of a tree that is a mounted host directory: every call goes to the host.

A symlink is handed out as a symlink, so that its target is looked up inside the sandbox.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from .nodes import Directory, File, Node, Symlink

if TYPE_CHECKING:
    from typing import BinaryIO


class HostFile(File):
    """A file of the host."""

    def __init__(self, path: str, info: os.stat_result) -> None:
        super().__init__(stat.S_IMODE(info.st_mode))
        self.path = path
        self.size = info.st_size
        self.mtime_s = info.st_mtime

    def open_read(self) -> BinaryIO:
        return open(self.path, "rb")

    def open_write(self, *, append: bool) -> BinaryIO:
        return open(self.path, "ab" if append else "wb", buffering=0)


class HostDirectory(Directory):
    """A directory of the host."""

    def __init__(self, path: str, info: os.stat_result) -> None:
        super().__init__(stat.S_IMODE(info.st_mode))
        self.path = path
        self.mtime_s = info.st_mtime

    def names(self) -> list[str]:
        return os.listdir(self.path)

    def get(self, name: str) -> Node | None:
        try:
            return host_node(os.path.join(self.path, name))
        except FileNotFoundError:
            return None

    def add_file(self, name: str, mode: int) -> File:
        path = os.path.join(self.path, name)
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, mode)
            return HostFile(path, os.fstat(fd))
        finally:
            os.close(fd)

    def add_directory(self, name: str, mode: int = 0o755) -> Directory:
        path = os.path.join(self.path, name)
        os.mkdir(path, mode)
        return HostDirectory(path, os.lstat(path))

    def add_symlink(self, name: str, target: str) -> None:
        os.symlink(target, os.path.join(self.path, name))

    def drop(self, name: str) -> None:
        path = os.path.join(self.path, name)
        if stat.S_ISDIR(os.lstat(path).st_mode):
            os.rmdir(path)
        else:
            os.unlink(path)


def host_node(path: str) -> Node:
    """Make the node of a host path; OSError when there is none."""
    info = os.lstat(path)
    if stat.S_ISLNK(info.st_mode):
        return Symlink(os.readlink(path))
    if stat.S_ISDIR(info.st_mode):
        return HostDirectory(path, info)
    if stat.S_ISREG(info.st_mode):
        return HostFile(path, info)
    return Node(stat.S_IMODE(info.st_mode))
