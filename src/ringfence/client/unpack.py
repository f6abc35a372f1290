"""Unpacking on the host a tar stream that came out of a sandbox.

Nothing in it is trusted: every name is taken one component at a time relative to a descriptor of
the destination, symlinks are written but never followed, and only files, directories, symlinks and
hard links within the tree are made (CVE-2025-4517 is what happens otherwise).
"""

from __future__ import annotations

import contextlib
import os
import tarfile

from ..errors import FileError, IoError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    Progress = Callable[[int, str], None]
    _Read = TypeVar("_Read")

_BUFFER = 1 << 20
_ZEROS = bytes(_BUFFER)
_LARGEST_HEADER = 1 << 16  # two paths as long as Linux allows, in any encoding
_EXTENDED = (*tarfile.GNU_TYPES, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def unpack(stream: int, local: str, progress: Progress | None = None) -> None:
    """Unpack `stream` below `local`, which is created; files that exist are replaced.

    Raises:
        FileError: A name in the stream would lead outside, or through a symlink.
        IoError: Writing here failed, or the stream ended too early.
    """
    try:
        os.makedirs(local, exist_ok=True)
        root = os.open(local, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with open(stream, "rb", buffering=_BUFFER, closefd=False) as raw:
                _Unpacker(root, progress).run(raw)
        finally:
            os.close(root)
    except tarfile.TarError as exc:
        raise IoError(f"the tree was not copied whole: {exc}", retryable=True) from exc
    except OSError as exc:
        raise IoError(f"{local}: {exc}") from exc


class _Member(tarfile.TarInfo):
    """One whose extended header, which is read into memory whole, has a bound.

    None has holes: of such a one a few bytes say how many zeros there are, and how long a map of them is.
    Nobody of ours writes it, and who reads it would be kept busy for as long as a guest likes.
    """

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo | tarfile.TarFile:
        if self.size < 0 or (self.type in _EXTENDED and self.size > _LARGEST_HEADER):
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        if self.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.ReadError("a file with holes is not taken as such")
        return super()._proc_member(tar)  # type: ignore[misc,no-any-return]

    def _apply_pax_info(self, headers: dict[str, str], encoding: str, errors: str) -> None:
        if any(key.startswith("GNU.sparse.") for key in headers):
            raise tarfile.ReadError("a file with holes is not taken as such")
        super()._apply_pax_info(headers, encoding, errors)  # type: ignore[misc]


class _Unpacker:
    def __init__(self, root: int, progress: Progress | None) -> None:
        self._root, self._progress, self._copied = root, progress, 0
        self._modes: list[tuple[tuple[str, ...], tarfile.TarInfo]] = []

    def run(self, raw) -> None:  # type: ignore[no-untyped-def]
        with _header(
            lambda: tarfile.open(fileobj=raw, mode="r|", bufsize=_BUFFER, tarinfo=_Member)
        ) as tar:
            while (member := _header(tar.next)) is not None:
                self._one(tar, member, parts(member.name))
                tar.members.clear()  # type: ignore[attr-defined]  # a guest may have very many files
        while raw.read(_BUFFER):
            pass  # padding; the writer must not die of a closed pipe
        for path, member in reversed(self._modes):
            self._finish_directory(path, member)

    def _one(self, tar: tarfile.TarFile, member: tarfile.TarInfo, path: tuple[str, ...]) -> None:
        if member.isdir():
            os.close(self._open(path, create=True))
            self._modes.append((path, member))
            return
        if not path:
            raise FileError("the stream's root is not a directory")
        parent = self._open(path[:-1], create=True)
        try:
            if member.isreg():
                self._file(tar, member, parent, path[-1])
            elif member.issym():
                _clear(parent, path[-1])
                os.symlink(member.linkname, path[-1], dir_fd=parent)
            elif member.islnk():
                self._hard_link(member, parent, path[-1])
        finally:
            os.close(parent)
        if self._progress:
            self._progress(self._copied, member.name)

    def _file(self, tar: tarfile.TarFile, member: tarfile.TarInfo, parent: int, name: str) -> None:
        _clear(parent, name)
        fd = os.open(name, _NEW, 0o600, dir_fd=parent)
        with open(fd, "wb", buffering=0) as file:
            source = tar.extractfile(member)
            while source is not None and (data := source.read(_BUFFER)):
                self._copied += len(data)
                if data == _ZEROS[: len(data)]:
                    os.lseek(fd, len(data), os.SEEK_CUR)  # sparse inside, and so here
                    continue
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
            os.ftruncate(fd, member.size)
            os.fchmod(fd, member.mode & 0o777)  # never setuid on the host
            _stamp(fd, member)

    def _hard_link(self, member: tarfile.TarInfo, parent: int, name: str) -> None:
        source = parts(member.linkname)
        if not source:
            raise FileError(f"{member.name!r} would be a second name of a directory")
        origin = self._open(source[:-1], create=False)
        try:
            _clear(parent, name)
            os.link(source[-1], name, src_dir_fd=origin, dst_dir_fd=parent, follow_symlinks=False)
        finally:
            os.close(origin)

    def _open(self, path: tuple[str, ...], *, create: bool) -> int:
        fd = os.dup(self._root)
        for name in path:
            try:
                if create:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, 0o755, dir_fd=fd)
                child = os.open(name, _DIRECTORY, dir_fd=fd)
            except NotADirectoryError as exc:
                raise FileError(
                    f"{'/'.join(path)}: would go through something not a directory"
                ) from exc
            finally:
                os.close(fd)
            fd = child
        return fd

    def _finish_directory(self, path: tuple[str, ...], member: tarfile.TarInfo) -> None:
        fd = self._open(path, create=False)
        try:
            if path:  # the destination itself stays as its owner made it
                os.fchmod(fd, member.mode & 0o777)
                _stamp(fd, member)
        finally:
            os.close(fd)


def _header(read: Callable[[], _Read]) -> _Read:
    """What `read` finds next, a first header among it."""
    try:
        return read()
    except (RecursionError, ValueError, OverflowError) as exc:
        # Headers that describe headers without end, and numbers that are none.
        raise tarfile.ReadError(f"a malformed header: {exc}") from exc


def _stamp(fd: int, member: tarfile.TarInfo) -> None:
    try:
        os.utime(fd, (member.mtime, member.mtime))
    except (ValueError, OverflowError) as exc:
        raise tarfile.ReadError(f"{member.name!r}: a time that no file can have") from exc


def parts(name: str) -> tuple[str, ...]:
    """The components of a member's name.

    Raises:
        FileError: It is absolute, climbs, or holds a NUL.
    """
    found = tuple(part for part in name.split("/") if part not in ("", "."))
    if name.startswith("/") or ".." in found or "\0" in name:
        raise FileError(f"{name!r} would lead outside the destination")
    return found


def _clear(parent: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=parent)
