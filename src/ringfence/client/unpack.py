"""Unpacking on the host a tar stream that came out of a sandbox.

Nothing in it is trusted: every name is taken one component at a time relative to a descriptor of
the destination, symlinks are written but never followed, and only files, directories, symlinks and
hard links within the tree are made (CVE-2025-4517 is what happens otherwise).
"""

from __future__ import annotations

import contextlib
import os
import tarfile
from contextlib import closing

from ..errors import FileError, FileExists, IoError, host_file_error
from ..launcher.helpers.descent import Descent
from ..launcher.helpers.tars import Reader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO

    Progress = Callable[[int, str], None]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def unpack(
    stream: int,
    local: str,
    progress: Progress | None = None,
    *,
    overwrite: bool = True,
    made: set[tuple[str, ...]] | None = None,
) -> None:
    """Unpack `stream` below `local`, which is created.

    Args:
        overwrite: Replace files and links that exist.
        made: Receives the path of each new file. A path in it is replaced in any case: an
            earlier attempt, which broke off, created it.

    Raises:
        FileExists: A file is in the way. It is unchanged; what was copied before it stays.
        FileError: A name in the stream would lead outside, or through a symlink.
        IoError: Writing here failed, or the stream ended too early.
    """
    try:
        os.makedirs(local, exist_ok=True)
        root = os.open(local, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with Reader(stream) as tar, closing(_Unpacker(root, progress, made)) as unpacker:
                unpacker.run(tar, overwrite=overwrite)
        finally:
            os.close(root)
    except tarfile.TarError as exc:
        raise IoError(f"the tree was not copied completely: {exc}", retryable=True) from exc
    except OSError as exc:
        raise IoError(f"{local}: {exc}") from exc


def in_the_way(path: str) -> FileExists:
    """Build the error for a file that a download would replace."""
    return FileExists(
        f"{path}: a file of this host is already there, and downloads replace none",
        path=path,
        hint="download to a new path, or pass overwrite=True",
    )


@contextlib.contextmanager
def created(path: str, *, overwrite: bool) -> Iterator[BinaryIO]:
    """Open a file of the host for a download. A new one that is not written to its end is removed.

    Raises:
        FileExists: It is there, and `overwrite` is not set.
    """
    try:
        file = open(path, "wb" if overwrite else "xb")  # noqa: SIM115  its errors are typed apart
    except FileExistsError as exc:
        raise in_the_way(path) from exc
    except OSError as exc:
        raise host_file_error(exc.errno or 5, path) from exc
    with file:
        try:
            yield file
            file.flush()
        except BaseException:
            if not overwrite:
                os.unlink(path)
            raise


class _Unpacker:
    def __init__(
        self, root: int, progress: Progress | None, made: set[tuple[str, ...]] | None
    ) -> None:
        self._made = made
        self._place, self._progress, self._copied = Descent(os.dup(root)), progress, 0
        self._here: list[str] = []  # where that is, below the root
        self._modes: list[tuple[tuple[str, ...], tarfile.TarInfo]] = []
        self._last: tuple[tuple[str, ...], int] | None = None  # a directory that is held open

    def run(self, tar: Reader, *, overwrite: bool) -> None:
        for member in tar:
            self._one(tar, member, parts(member.name), overwrite=overwrite)
        tar.drain()
        for path, member in reversed(self._modes):
            self._finish_directory(path, member)

    def close(self) -> None:
        self._place.close()
        self._forget()

    def _forget(self) -> None:
        if self._last is not None:
            os.close(self._last[1])
            self._last = None

    def _one(
        self, tar: Reader, member: tarfile.TarInfo, path: tuple[str, ...], *, overwrite: bool
    ) -> None:
        if member.isdir():
            os.close(self._open(path, create=True))
            self._modes.append((path, member))
            return
        if not path:
            raise FileError("the stream's root is not a directory")
        parent = self._parent(path[:-1])
        try:
            self._make(tar, member, parent, path)
        except FileExistsError as exc:
            if not (overwrite or (self._made is not None and path in self._made)):
                raise in_the_way("/".join(path)) from exc
            _clear(parent, path[-1])
            self._make(tar, member, parent, path)
        self._note(path)
        if self._progress:
            self._progress(self._copied, member.name)

    def _note(self, path: tuple[str, ...]) -> None:
        if self._made is not None:
            self._made.add(path)

    def _make(
        self, tar: Reader, member: tarfile.TarInfo, parent: int, path: tuple[str, ...]
    ) -> None:
        """Create one file or link; no content is read if something is in the way."""
        name = path[-1]
        if member.isreg():
            self._file(tar, member, parent, path)
        elif member.issym():
            os.symlink(member.linkname, name, dir_fd=parent)
        elif member.islnk():
            self._hard_link(member, parent, name)

    def _parent(self, path: tuple[str, ...]) -> int:
        """A directory's descriptor, which is held until another one is asked for: files come together."""
        if self._last is None or self._last[0] != path:
            fd = self._open(path, create=True)
            self._forget()
            self._last = path, fd
        return self._last[1]

    def _file(
        self, tar: Reader, member: tarfile.TarInfo, parent: int, path: tuple[str, ...]
    ) -> None:
        fd = os.open(path[-1], _NEW, 0o600, dir_fd=parent)
        try:
            self._note(path)  # before its content: the stream may break off in it
            self._copied += tar.copy(fd)
            os.fchmod(fd, member.mode & 0o777)  # never setuid on the host
            _stamp(fd, member)
        finally:
            os.close(fd)

    def _hard_link(self, member: tarfile.TarInfo, parent: int, name: str) -> None:
        source = parts(member.linkname)
        if not source:
            raise FileError(f"{member.name!r} is a hard link to a directory")
        origin = self._open(source[:-1], create=False)
        try:
            os.link(source[-1], name, src_dir_fd=origin, dst_dir_fd=parent, follow_symlinks=False)
        finally:
            os.close(origin)

    def _open(self, path: tuple[str, ...], *, create: bool) -> int:
        # From the last directory, not from the top: members that are deep come together.
        same = min(len(path), len(self._here))
        if [*path[:same]] != self._here[:same]:
            same = next(i for i in range(same) if path[i] != self._here[i])
        while len(self._here) > same:
            self._place.leave()
            self._here.pop()
        for name in path[same:]:
            try:
                _enter(name, self._place, create=create)
            except NotADirectoryError as exc:
                raise FileError(f"{'/'.join(path)}: has a parent that is not a directory") from exc
            self._here.append(name)
        return os.dup(self._place.fd)

    def _finish_directory(self, path: tuple[str, ...], member: tarfile.TarInfo) -> None:
        if not path:
            return  # the destination itself stays as its owner made it
        fd = os.open(path[-1], _DIRECTORY, dir_fd=self._parent(path[:-1]))
        try:
            os.fchmod(fd, member.mode & 0o777)
            _stamp(fd, member)
        finally:
            os.close(fd)


def _enter(name: str, place: Descent, *, create: bool) -> None:
    try:
        place.enter(name)
        return
    except FileNotFoundError:
        if not create:
            raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o755, dir_fd=place.fd)
    place.enter(name)


def _stamp(fd: int, member: tarfile.TarInfo) -> None:
    try:
        os.utime(fd, (member.mtime, member.mtime))
    except (ValueError, OverflowError) as exc:
        raise tarfile.ReadError(f"{member.name!r}: its modification time is out of range") from exc


def parts(name: str) -> tuple[str, ...]:
    """The components of a member's name.

    Raises:
        FileError: It is absolute, climbs, or holds a NUL.
    """
    found = tuple(part for part in name.split("/") if part not in ("", "."))
    if name.startswith("/") or ".." in found or "\0" in name:
        raise FileError(f"{name!r} is outside the destination")
    return found


def _clear(parent: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=parent)
