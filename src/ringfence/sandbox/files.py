"""The files of a sandbox, as whole values, streams and trees."""

from __future__ import annotations

from contextlib import contextmanager

from ..model.base import checks
from ..model.base.helpful import helpful

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import BinaryIO

    from ..backends.protocol import BackendFiles, Progress
    from ..errors import RingfenceError
    from ..model.files import FileInfo
    from ..model.found import AllReplaced, FileChange, FoundFiles, FoundLines
    from ..model.session import ResolvedMount
    from .looking import Watch

_CHUNK = 1 << 22
_MOST_FOUND = 2**31
_MOST_LINKS = 40  # include/linux/namei.h MAXSYMLINKS
_ELOOP = 40  # include/uapi/asm-generic/errno.h


@helpful
class Files:
    """`sandbox.files`. Relative paths start at the session's root; text is UTF-8.

    Every method raises a `FileError` that says what is wrong with the path, or
    `ResourceExhausted` when the sandbox's disk is full.
    """

    def __init__(
        self, inner: BackendFiles, mounts: Callable[[], Iterable[ResolvedMount]] = tuple
    ) -> None:
        # `mounts` is called on each use: mounts can be added to a running sandbox.
        self._inner, self._mounts = inner, mounts

    def _lead_to(self, inner: BackendFiles, mounts: Callable[[], Iterable[ResolvedMount]]) -> None:
        """Serve the files of another sandbox from now on."""
        self._inner, self._mounts = inner, mounts

    def read(self, path: str, *, offset: int = 0, max_bytes: int | None = None) -> bytes:
        """The whole file, of at most 1 GiB; or of what follows `offset` the first `max_bytes`."""
        checks.part_of_file(offset, max_bytes)
        stream = self._inner.open_read(path)
        try:
            with stream as file:
                _skip(file, offset)
                return _whole(file, path) if max_bytes is None else file.read(max_bytes)
        except OSError as exc:
            raise _typed(exc, path) from exc

    def read_text(self, path: str) -> str:
        """The whole file as text, bad bytes replaced."""
        return self.read(path).decode("utf-8", "replace")

    def write(
        self,
        path: str,
        data: bytes | str,
        *,
        append: bool = False,
        mode: int = 0o644,
        parents: bool = False,
    ) -> None:
        """Write a file, creating or replacing it; with `parents` its directories too."""
        from ..errors import FileNotFound

        checks.permissions(mode)
        # Before it is opened: that empties what was there.
        content = data.encode() if isinstance(data, str) else checks.binary(data, "data")
        try:
            stream = self._inner.open_write(path, append=append, mode=mode)
        except FileNotFound:
            if not parents:
                raise
            self._inner.make_dir(path.rpartition("/")[0] or ".", parents=True)
            stream = self._inner.open_write(path, append=append, mode=mode)
        try:
            with stream as file:
                file.write(content)
        except OSError as exc:
            raise _typed(exc, path) from exc

    def open_read(self, path: str) -> BinaryIO:
        """A stream over a file of any size."""
        return self._inner.open_read(path)

    def open_write(self, path: str, *, append: bool = False, mode: int = 0o644) -> BinaryIO:
        """A stream into a file of any size."""
        checks.permissions(mode)
        return self._inner.open_write(path, append=append, mode=mode)

    def list(self, path: str = ".") -> list[FileInfo]:
        """The entries of a directory, by name."""
        return self._inner.list(path)

    def stat(self, path: str, *, follow: bool = False) -> FileInfo:
        """Stat one path; the symlink itself, or with `follow` its final target.

        Raises:
            FileError: Symlinks lead in a circle.
        """
        info = self._inner.stat(path)
        for _ in range(_MOST_LINKS):
            if not follow or info.link_target is None:
                return info
            # Joined, not normalised: the kernel inside resolves `..` behind further links.
            parent = info.path.rpartition("/")[0]
            target = info.link_target
            info = self._inner.stat(target if target.startswith("/") else f"{parent}/{target}")
        raise _typed(OSError(_ELOOP, ""), path)

    def exists(self, path: str) -> bool:
        """Return whether the path exists; a dangling symlink exists."""
        from ..errors import FileNotFound, NotADirectory

        try:
            self._inner.stat(path)
        except (FileNotFound, NotADirectory):
            return False
        return True

    def make_dir(self, path: str, *, parents: bool = True) -> None:
        """Create a directory, with its parents unless told otherwise."""
        self._inner.make_dir(path, parents=parents)

    def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file or an empty directory; a whole tree when `recursive`."""
        self._inner.remove(path, recursive=recursive)

    def move(self, src: str, dst: str) -> None:
        """Rename, replacing a file at `dst`."""
        self._inner.move(src, dst)

    def upload(self, local: str, remote: str, *, progress: Progress | None = None) -> None:
        """Copy a host file, with its permissions, or a directory tree into the sandbox.

        `remote` is the copy's own path.
        """
        from .shared import to_read

        with to_read(local, self._mounts()) as place:
            self._upload(place, remote, _told_of(local, place, progress))

    def _upload(self, local: str, remote: str, progress: Progress | None) -> None:
        import os

        if os.path.isdir(local):
            self._inner.upload_tree(local, remote, progress=progress)
            return
        with _open_local(local, "rb") as source:
            # A script stays executable; nobody becomes its owner's user by it.
            mode = os.fstat(source.fileno()).st_mode & 0o777
            stream = self._inner.open_write(remote, mode=mode)
            try:
                with stream as target:
                    _copy(source, target, local, progress)
            except OSError as exc:
                raise _typed(exc, remote) from exc

    def download(
        self, remote: str, local: str, *, overwrite: bool = False, progress: Progress | None = None
    ) -> None:
        """Copy a file or directory tree out of the sandbox; `local` is the copy's own path.

        Raises:
            FileExists: A file that the copy would replace is there, and `overwrite` is not set.
        """
        from ..client.unpack import created
        from ..model.files import DIRECTORY
        from .shared import to_fill, to_write

        if self._inner.stat(remote).kind == DIRECTORY:
            with to_fill(local, self._mounts()) as place:
                self._inner.download_tree(remote, place, overwrite=overwrite, progress=progress)
            return
        with (
            self._inner.open_read(remote) as source,
            to_write(local, self._mounts(), overwrite=overwrite) as place,
            # A path in /proc is of a file that `to_write` has just made.
            created(place, overwrite=overwrite or place != local) as target,
        ):
            _copy(source, target, remote, progress)

    # -- looking through them, which not every backend can -------------------------------------

    def glob(self, pattern: str, path: str = ".", *, limit: int = 1000) -> FoundFiles:
        """Paths below `path` that match: `*` within a name, `**` any number of directories."""
        from ..model.found import FoundFiles

        asked = {"pattern": pattern, "most": limit}
        return FoundFiles.from_json(self._ask("find", path, asked))

    def search(
        self,
        pattern: str,
        path: str = ".",
        *,
        regex: bool = False,
        ignore_case: bool = False,
        glob: str = "",
        limit: int = 1000,
    ) -> FoundLines:
        """Lines of text files below `path` in which `pattern` is found.

        Args:
            glob: Only in files that match.
        """
        from ..model.found import FoundLines

        asked = {"pattern": pattern, "regex": regex, "ignore_case": ignore_case}
        return FoundLines.from_json(
            self._ask("search", path, {**asked, "glob": glob, "most": limit})
        )

    def replace(
        self,
        paths: Sequence[str],
        pattern: str,
        replacement: str,
        *,
        regex: bool = False,
        ignore_case: bool = False,
    ) -> AllReplaced:
        """Replace text in files; each is put in place whole, or left as it was.

        Args:
            replacement: With `regex`, `\\1` is the first group.
        """
        from ..model.found import AllReplaced

        asked = {"pattern": pattern, "regex": regex, "ignore_case": ignore_case}
        return AllReplaced.from_json(
            self._ask(
                "replace",
                ".",
                {**asked, "replacement": replacement, "files": checks.arguments(paths, "paths")},
            )
        )

    @contextmanager
    def watch(self, path: str = ".", *, recursive: bool = False) -> Iterator[Iterator[FileChange]]:
        """Watch `path` and everything below it for changes until the block ends.

        The iterator ends when `path` is removed.
        """
        watch = self.begin_watch(path, recursive=recursive)
        try:
            yield _changes(watch)
        finally:
            watch.close()

    def begin_watch(self, path: str, *, recursive: bool) -> Watch:
        """Start the watch behind `watch` and its asynchronous counterpart."""
        from .looking import Watch

        return Watch(self._inner, path, recursive=recursive)

    def _ask(self, what: str, path: str, asked: dict[str, object]) -> dict[str, object]:
        from .looking import ask

        for name in ("pattern", "glob", "replacement"):
            checks.text(asked.get(name, ""), name)
        checks.integer(asked.get("most", 1), "limit", 0, _MOST_FOUND)
        return ask(self._inner, what, path, asked)


def _changes(watch: Watch) -> Iterator[FileChange]:
    yield from watch.early
    while found := watch.read():
        yield from found


def _told_of(local: str, place: str, progress: Progress | None) -> Progress | None:
    """The same, told of what is below `local` where that is held as `place`."""
    if progress is None or place == local:
        return progress
    tell = progress
    return lambda copied, name: tell(copied, name.replace(place, local, 1))


def _whole(file: BinaryIO, path: str) -> bytes:
    from ..model.files import MOST_READ, too_long

    parts, left = [], MOST_READ
    while part := file.read(min(left + 1, _CHUNK)):
        if len(part) > left:
            raise too_long(path)
        parts.append(part)
        left -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _skip(file: BinaryIO, count: int) -> None:
    """Go on `count` bytes further; some backends have a pipe there."""
    if count and file.seekable():
        file.seek(count)
        return
    while count > 0 and (data := file.read(min(count, _CHUNK))):
        count -= len(data)


def _typed(exc: OSError, path: str) -> RingfenceError:
    """Map an OSError of a file stream to our error type; ENOSPC means the sandbox's disk is full."""
    from ..errors import file_error

    return file_error(exc.errno or 5, path)


def _open_local(local: str, mode: str) -> BinaryIO:
    """A file of the host; its errors are typed as those of the sandbox are."""
    try:
        return open(local, mode)  # type: ignore[return-value]
    except OSError as exc:
        from ..errors import host_file_error

        raise host_file_error(exc.errno or 5, local) from exc


def _data_of(fd: int) -> Iterator[tuple[int, int]]:
    """Where a file has data, as (start, end): lseek(2), SEEK_DATA. A guest's may be all hole."""
    import errno
    import os

    end, size = 0, os.fstat(fd).st_size
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, start, os.SEEK_HOLE)
        except OSError as exc:
            if exc.errno == errno.ENXIO:
                return  # nothing but hole from here on, or no longer that large
            raise
        yield start, end


def _copy(source: BinaryIO, target: BinaryIO, name: str, progress: Progress | None) -> None:
    """In the kernel where both ends are files, through a buffer where one is not."""
    import errno
    import os

    copied = 0
    target.flush()
    if not (source.seekable() and target.seekable()):  # a stream out of a guest, or into one
        _copy_through(source, target, name, progress)
        return
    try:
        for offset, end in _data_of(source.fileno()):
            os.lseek(target.fileno(), offset, os.SEEK_SET)
            while offset < end and (
                count := os.sendfile(
                    target.fileno(), source.fileno(), offset, min(_CHUNK, end - offset)
                )
            ):
                offset += count
                copied += count
                if progress:
                    progress(copied, name)
        if size := os.fstat(source.fileno()).st_size:
            os.ftruncate(target.fileno(), size)
            return
    except OSError as exc:
        # UnsupportedOperation is an OSError without errno: an in-memory file.
        if copied or exc.errno not in (None, errno.EINVAL, errno.ENOSYS):
            raise
    # Not a file with a size, but one of /proc, say; or in memory.
    source.seek(0)
    _copy_through(source, target, name, progress)


def _copy_through(source: BinaryIO, target: BinaryIO, name: str, progress: Progress | None) -> None:
    copied = 0
    while data := source.read(_CHUNK):
        target.write(data)
        copied += len(data)
        if progress:
            progress(copied, name)
