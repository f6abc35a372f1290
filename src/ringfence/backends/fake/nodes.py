"""Nodes of a file tree: files, directories and symlinks held in memory."""

from __future__ import annotations

import errno
import io
import os
import time
from typing import TYPE_CHECKING, Any, ClassVar, cast

from ...model import files

if TYPE_CHECKING:
    from typing import BinaryIO, TypeVar

    from _typeshed import ReadableBuffer

    T = TypeVar("T", bound="Node")

ROOT_UID = 0
SANDBOX_UID = 1000
READ, WRITE, EXECUTE = 4, 2, 1  # as in a mode's digits


class Quota:
    """Room for file contents and for nodes; None is without end."""

    def __init__(self, size_bytes: int | None = None, inodes: int | None = None) -> None:
        self.size_bytes = size_bytes
        self.inodes = inodes
        self.used_bytes = 0
        self.used_inodes = 0

    def charge(self, size_bytes: int = 0, inodes: int = 0) -> None:
        """Take room, or give it back; ENOSPC when there is not enough."""
        if size_bytes > 0 and _exceeds(self.used_bytes + size_bytes, self.size_bytes):
            raise oserror(errno.ENOSPC)
        if inodes > 0 and _exceeds(self.used_inodes + inodes, self.inodes):
            raise oserror(errno.ENOSPC)
        self.used_bytes += size_bytes
        self.used_inodes += inodes


class Node:
    """A node of a file tree."""

    kind: ClassVar[str] = files.OTHER
    size: int = 0

    def __init__(self, mode: int, owner: int = SANDBOX_UID) -> None:
        self.mode = mode
        self.owner = owner
        self.mtime_s = time.time()

    def allows(self, wanted: int) -> bool:
        """Return whether the sandbox's user has this access, by the mode's owner or other digit."""
        digit = self.mode >> 6 if self.owner == SANDBOX_UID else self.mode
        return digit & wanted == wanted


class File(Node):
    """Bytes that can be opened."""

    kind = files.FILE

    def open_read(self) -> BinaryIO:
        """The content from its beginning."""
        raise NotImplementedError

    def open_write(self, *, append: bool) -> BinaryIO:
        """The content to be replaced or continued."""
        raise NotImplementedError


class Directory(Node):
    """Names of further nodes."""

    kind = files.DIRECTORY

    def names(self) -> list[str]:
        """Every name, in no particular order."""
        raise NotImplementedError

    def get(self, name: str) -> Node | None:
        """The node of that name."""
        raise NotImplementedError

    def add_file(self, name: str, mode: int) -> File:
        """A new, empty file; the name is free."""
        raise NotImplementedError

    def add_directory(self, name: str, mode: int = 0o755) -> Directory:
        """A new, empty directory; the name is free."""
        raise NotImplementedError

    def add_symlink(self, name: str, target: str) -> None:
        """A new symlink; the name is free."""
        raise NotImplementedError

    def drop(self, name: str) -> None:
        """Forget a node; a directory is empty by then."""
        raise NotImplementedError


class Symlink(Node):
    """A path to go on with."""

    kind = files.SYMLINK

    def __init__(self, target: str, owner: int = SANDBOX_UID) -> None:
        super().__init__(0o777, owner)
        self.target = target
        self.size = len(os.fsencode(target))


class NullDevice(File):
    """/dev/null."""

    kind = files.OTHER

    def open_read(self) -> BinaryIO:
        return io.BytesIO()

    def open_write(self, *, append: bool) -> BinaryIO:  # noqa: ARG002 (nothing is kept)
        return open(os.devnull, "wb", buffering=0)


class MemoryFile(File):
    """A file whose bytes count against a quota."""

    def __init__(self, mode: int, quota: Quota, owner: int = SANDBOX_UID) -> None:
        super().__init__(mode, owner)
        self.data = bytearray()
        self.quota = quota

    @property
    def size(self) -> int:  # type: ignore[override]
        return len(self.data)

    def open_read(self) -> BinaryIO:
        return cast("BinaryIO", io.BufferedReader(_Reader(self)))

    def open_write(self, *, append: bool) -> BinaryIO:
        if not append:
            self.quota.charge(-len(self.data))
            self.data.clear()
        return cast("BinaryIO", _Appender(self))


class _Reader(io.RawIOBase):
    """Reads what is there at the time, as a reader of a growing file does."""

    def __init__(self, file: MemoryFile) -> None:
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        start = (0, self._position, self._file.size)[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        piece = bytes(self._file.data[self._position : self._position + len(buffer)])
        buffer[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)


class _Appender(io.RawIOBase):
    """Writes at the end."""

    def __init__(self, file: MemoryFile) -> None:
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer) -> int:
        piece = bytes(data)
        self._file.quota.charge(len(piece))
        self._file.data += piece
        self._file.mtime_s = time.time()
        return len(piece)


class MemoryDirectory(Directory):
    """A directory whose nodes count against a quota."""

    def __init__(self, mode: int, quota: Quota, owner: int = SANDBOX_UID) -> None:
        super().__init__(mode, owner)
        self.children: dict[str, Node] = {}
        self.quota = quota

    def names(self) -> list[str]:
        return list(self.children)

    def get(self, name: str) -> Node | None:
        return self.children.get(name)

    def add_file(self, name: str, mode: int) -> MemoryFile:
        return self._add(name, MemoryFile(mode, self.quota))

    def add_directory(self, name: str, mode: int = 0o755) -> MemoryDirectory:
        return self._add(name, MemoryDirectory(mode, self.quota))

    def add_symlink(self, name: str, target: str) -> None:
        self._add(name, Symlink(target))

    def drop(self, name: str) -> None:
        node = self.children.pop(name)
        self.quota.charge(-(node.size if isinstance(node, MemoryFile) else 0), -1)

    def copy(self, quota: Quota) -> MemoryDirectory:
        """An independent copy of everything below, counted against `quota`."""
        copy = MemoryDirectory(self.mode, quota, self.owner)
        for name, node in self.children.items():
            copy._add(name, _copy(node, quota))
        copy.mtime_s = self.mtime_s
        return copy

    def _add(self, name: str, node: T) -> T:
        self.quota.charge(inodes=1)
        self.children[name] = node
        self.mtime_s = time.time()
        return node


def _copy(node: Node, quota: Quota) -> Node:
    if isinstance(node, MemoryDirectory):
        return node.copy(quota)
    if isinstance(node, MemoryFile):
        copy = MemoryFile(node.mode, quota, node.owner)
        quota.charge(node.size)
        copy.data += node.data
        copy.mtime_s = node.mtime_s
        return copy
    return node  # symlinks and devices never change


def _exceeds(wanted: int, limit: int | None) -> bool:
    return limit is not None and wanted > limit


def oserror(number: int) -> OSError:
    """The `OSError` of an errno."""
    return OSError(number, os.strerror(number))
