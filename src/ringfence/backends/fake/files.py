"""The files API of the fake: the tree with typed errors, and copies of whole trees."""

from __future__ import annotations

import io
import os
import shutil
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from ...errors import FileError, FileNotFound, InvalidRequest, Unsupported, file_error
from ...model.files import FileInfo
from .nodes import Directory, Symlink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO

    from ..protocol import HelperTask, Progress
    from .filesystem import FileSystem
    from .nodes import Node


@contextmanager
def typed_errors(path: str) -> Iterator[None]:
    """Turn an `OSError` met at `path` into the error a caller can catch by name."""
    try:
        yield
    except OSError as exc:
        raise file_error(exc.errno or 0, path, exc.strerror or str(exc)) from exc


class FakeFiles:
    """Files of one sandbox; see `BackendFiles`.

    Args:
        check: Raises when the sandbox's state forbids touching its files.
        home: Where relative paths start.
    """

    def __init__(self, tree: FileSystem, home: str, check: Callable[[], None]) -> None:
        self._tree = tree
        self._home = home
        self._check = check

    @contextmanager
    def _at(self, path: str) -> Iterator[FileSystem]:
        self._check()
        if not path or "\0" in path:
            raise InvalidRequest("must be a path: not empty, no NUL", field="path")
        with typed_errors(path):
            yield self._tree

    def start_helper(self, what: str, path: str, options: str = "") -> HelperTask:
        del path, options
        raise Unsupported(backend="fake", operation=what)

    def open_read(self, path: str) -> BinaryIO:
        with self._at(path) as tree:
            return cast("BinaryIO", TypedFile(tree.open_read(path, self._home), path))

    def open_write(self, path: str, *, append: bool = False, mode: int = 0o644) -> BinaryIO:
        with self._at(path) as tree:
            file = tree.open_write(path, self._home, append=append, mode=mode & 0o777)
            return cast("BinaryIO", TypedFile(file, path))

    def list(self, path: str, after: str = "", most: int | None = None) -> list[FileInfo]:
        with self._at(path) as tree:
            found = []
            names = sorted(name for name in tree.names(path, self._home) if name > after)
            for name in names[:most]:
                entry = f"{path}/{name}"
                where = tree.canonical(entry, self._home, follow=False)
                found.append(_info(where, tree.find(entry, self._home, follow=False)))
            return found

    def stat(self, path: str) -> FileInfo:
        with self._at(path) as tree:
            where = tree.canonical(path, self._home, follow=False)
            return _info(where, tree.find(path, self._home, follow=False))

    def make_dir(self, path: str, *, parents: bool = True) -> None:
        with self._at(path) as tree:
            if parents:
                tree.make_dirs(path, self._home)
            else:
                tree.make_dir(path, self._home)

    def remove(self, path: str, *, recursive: bool = False) -> None:
        with self._at(path) as tree:
            if recursive and isinstance(tree.find(path, self._home, follow=False), Directory):
                for name in tree.names(path, self._home):
                    self.remove(f"{path}/{name}", recursive=True)
            tree.remove(path, self._home)

    def move(self, src: str, dst: str) -> None:
        with self._at(src) as tree:
            node = tree.find(src, self._home, follow=False)
            inner = tree.canonical(src, self._home, follow=False)
        with self._at(dst) as tree:
            self._make_way(dst, node, inner)
            self._copy(src, node, dst)
        self.remove(src, recursive=True)

    def upload_tree(self, local: str, remote: str, *, progress: Progress | None = None) -> None:
        self._check()
        if not os.path.lexists(local):
            raise FileNotFound(f"{local} does not exist on the host", path=local)
        _Upload(self, progress).run(os.fspath(local), remote)

    def download_tree(self, remote: str, local: str, *, progress: Progress | None = None) -> None:
        self._check()
        _Download(self, progress).run(remote, os.fspath(local))

    def make_symlink(self, path: str, target: str) -> None:
        """A symlink at `path`; part of uploads, not of the protocol."""
        with self._at(path) as tree:
            tree.make_symlink(path, target, self._home)

    def set_mode(self, path: str, mode: int) -> None:
        """Change permissions; part of uploads, not of the protocol."""
        with self._at(path) as tree:
            tree.find(path, self._home).mode = mode & 0o777

    def _make_way(self, dst: str, node: Node, inner: str) -> None:
        """Remove what rename(2) would replace, and refuse what it would refuse."""
        tree = self._tree
        try:
            there = tree.find(dst, self._home, follow=False)
        except FileNotFoundError:
            if (tree.canonical(_parent(dst), self._home) + "/").startswith(inner + "/"):
                raise InvalidRequest(f"{dst} lies inside what is moved", field="dst") from None
            return
        if isinstance(there, Directory) and not isinstance(node, Directory):
            raise IsADirectoryError(21, os.strerror(21))
        tree.remove(dst, self._home)

    def _copy(self, src: str, node: Node, dst: str) -> None:
        if isinstance(node, Symlink):
            self.make_symlink(dst, node.target)
        elif isinstance(node, Directory):
            self.make_dir(dst, parents=False)
            for name in self._tree.names(src, self._home):
                below = self._tree.find(f"{src}/{name}", self._home, follow=False)
                self._copy(f"{src}/{name}", below, f"{dst}/{name}")
            self.set_mode(dst, node.mode)
        else:
            with self.open_read(src) as reader, self.open_write(dst, mode=node.mode) as writer:
                shutil.copyfileobj(reader, writer)


class TypedFile(io.RawIOBase):
    """An open file whose later errors are typed too: a quota may run out half way."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._file = file
        self._path = path

    def readable(self) -> bool:
        return self._file.readable()

    def writable(self) -> bool:
        return self._file.writable()

    def seekable(self) -> bool:
        return self._file.seekable()

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def read(self, size: int | None = -1) -> bytes:
        with typed_errors(self._path):
            return self._file.read(-1 if size is None else size)

    def readinto(self, buffer: Any) -> int:
        piece = self.read(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)

    def write(self, data: Any) -> int:
        with typed_errors(self._path):
            return self._file.write(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class _Upload:
    """Host to sandbox."""

    def __init__(self, files: FakeFiles, progress: Progress | None) -> None:
        self._files = files
        self._progress = progress
        self._copied = 0

    def run(self, local: str, remote: str) -> None:
        kind = os.lstat(local).st_mode
        if stat.S_ISLNK(kind):
            self._clear(remote)
            self._files.make_symlink(remote, os.readlink(local))
        elif stat.S_ISDIR(kind):
            self._files.make_dir(remote)
            for name in sorted(os.listdir(local)):
                self.run(os.path.join(local, name), f"{remote}/{name}")
            self._files.set_mode(remote, stat.S_IMODE(kind))
        elif stat.S_ISREG(kind):
            self._file(local, remote, stat.S_IMODE(kind))
        else:
            raise FileError(f"{local}: neither file, directory nor symlink", path=local)
        if self._progress is not None:
            self._progress(self._copied, remote)

    def _file(self, local: str, remote: str, mode: int) -> None:
        self._files.make_dir(_parent(remote))
        self._clear(remote)
        with open(local, "rb") as reader, self._files.open_write(remote, mode=mode) as writer:
            shutil.copyfileobj(reader, writer)
            self._copied += reader.tell()

    def _clear(self, remote: str) -> None:
        """A file or symlink that is there is replaced, never written through."""
        try:
            self._files.remove(remote)
        except FileError:
            pass


class _Download:
    """Sandbox to host."""

    def __init__(self, files: FakeFiles, progress: Progress | None) -> None:
        self._files = files
        self._progress = progress
        self._copied = 0

    def run(self, remote: str, local: str) -> None:
        info = self._files.stat(remote)
        if info.kind == "symlink":
            self._clear(local)
            os.symlink(str(info.link_target), local)
        elif info.kind == "directory":
            self._directory(remote, local, info.mode)
        elif info.kind == "file":
            self._file(remote, local, info.mode)
        else:
            raise FileError(f"{remote}: neither file, directory nor symlink", path=remote)
        if self._progress is not None:
            self._progress(self._copied, remote)

    def _directory(self, remote: str, local: str, mode: int) -> None:
        os.makedirs(local, exist_ok=True)
        for entry in self._files.list(remote):
            below = os.path.join(local, entry.name)
            if entry.kind == "directory":
                self._clear(below)
            self.run(f"{remote}/{entry.name}", below)
        os.chmod(local, mode & 0o777)

    def _file(self, remote: str, local: str, mode: int) -> None:
        self._clear(local)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        with (
            self._files.open_read(remote) as reader,
            open(local, "wb", opener=lambda path, _: os.open(path, flags, 0o600)) as writer,
        ):
            shutil.copyfileobj(reader, writer)
            os.fchmod(writer.fileno(), mode & 0o777)
            self._copied += writer.tell()

    @staticmethod
    def _clear(local: str) -> None:
        """A symlink or file that is there is replaced, never followed."""
        if os.path.islink(local) or os.path.isfile(local):
            os.unlink(local)


def _info(path: str, node: Node) -> FileInfo:
    return FileInfo(
        path=path,
        name=path.rpartition("/")[2],
        kind=node.kind,
        size_bytes=node.size,
        mode=node.mode,
        mtime_s=node.mtime_s,
        link_target=node.target if isinstance(node, Symlink) else None,
    )


def _parent(path: str) -> str:
    head, slash, _ = path.rstrip("/").rpartition("/")
    return head or (slash or ".")
