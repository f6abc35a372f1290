"""The three sides of a merge: trees in tar streams, and a directory of the host."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tarfile
import tempfile
from functools import partial

from ..errors import (
    FileNotFound,
    InvalidRequest,
    IoError,
    NotADirectory,
    ResourceExhausted,
    file_error,
    host_file_error,
)
from ..launcher.helpers.layers import GONE, WHITEOUT
from ..launcher.helpers.tars import Reader, new_digest
from ..linux import files
from ..model.files import DIRECTORY, FILE, OTHER, SYMLINK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO, Protocol

    from .targets import MergeFiles, Task

    Entry = tuple[str, int, int, bytes]  # kind, size, mode, digest of the content or link target
    Index = dict[str, Entry]
    Pack = Callable[[BinaryIO], None]

    class Side(Protocol):
        """A tree of files. Paths begin with "/" and are below its top."""

        def get(self, path: str) -> Entry | None:
            """Return kind, size, mode and digest of what is at `path`; None: there is nothing."""
            ...

        def pieces(self, path: str) -> Iterator[bytes]: ...

    class Changing(Side, Protocol):
        """The side that a merge changes."""

        def look_at(self, paths: set[str]) -> None:
            """Get ready for questions about these paths and the directories above them."""
            ...

        def names(self, path: str) -> set[str]:
            """Return the names in a directory."""
            ...

    class Compared(Side, Protocol):
        """A side that is compared.

        Attributes:
            entries: By path; at least where it differs from the other one, and the directories above.
            is_absent: There is no such directory.
        """

        entries: Index
        is_absent: bool


MOST_ENTRIES = 250_000  # of one side: about 300 bytes of memory each
MOST_NAMES = 32 << 20  # characters of their paths and link targets: a path may have 4,096
MOST_BYTES = 4 << 30  # of the content of one side: a sparse file claims any size
_CLIMBS = re.compile(r"\A[^/]|/\.{0,2}(?:/|\Z)")
_MODES = {stat.S_IFREG: FILE, stat.S_IFDIR: DIRECTORY, stat.S_IFLNK: SYMLINK}
_KINDS = {
    tarfile.REGTYPE: FILE,
    tarfile.AREGTYPE: FILE,
    tarfile.DIRTYPE: DIRECTORY,
    tarfile.SYMTYPE: SYMLINK,
}
_PIECE = 1 << 20
_BATCH = 12_000  # bytes of paths: with more a request is no longer one message


class StreamTree:
    """A tree read from tar streams, which are kept in a file without a name.

    Args:
        is_layer: `.wh.NAME` in them removes NAME.
    """

    def __init__(self, *, is_layer: bool = False) -> None:
        self._file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        self._bounded, self._budget = _Bounded(self._file), Budget()
        self._offsets: dict[str, int] = {}
        self._is_layer = is_layer
        self.entries: Index = {}
        self.is_absent = True

    def add(self, pack: Pack) -> None:
        """Read a stream, if `pack` writes one.

        Raises:
            InvalidRequest: It is no tar stream.
        """
        at = self._file.seek(0, os.SEEK_END)
        pack(self._bounded)  # type: ignore[arg-type]
        self._file.flush()
        if self._file.tell() == at:
            return
        self.is_absent = False
        try:
            index(
                self._file.fileno(),
                is_layer=self._is_layer,
                offsets=self._offsets,
                at=at,
                budget=self._budget,
                found=self.entries,
            )
        except tarfile.ReadError as exc:
            raise InvalidRequest(f"the files could not be read: {exc}", field="path") from exc

    def get(self, path: str) -> Entry | None:
        return self.entries.get(path)

    def pieces(self, path: str) -> Iterator[bytes]:
        return pieces_at(self._file.fileno(), self._offsets[path], self.entries[path][1])

    def close(self) -> None:
        self._file.close()


class SandboxTree:
    """A directory of a sandbox, of which only what is asked for is read.

    Args:
        directory: Without a "/" at its end.
    """

    def __init__(self, files: MergeFiles, directory: str) -> None:
        self._files, self._directory = files, directory
        self._tree = StreamTree()

    def look_at(self, paths: set[str]) -> None:
        for some in _batches(paths):
            self._tree.add(partial(pack, self._files, self._directory or "/", options=some))

    def get(self, path: str) -> Entry | None:
        return self._tree.get(path)

    def pieces(self, path: str) -> Iterator[bytes]:
        return self._tree.pieces(path)

    def names(self, path: str) -> set[str]:
        try:
            return {each.name for each in self._files.list(self._directory + path)}
        except (FileNotFound, NotADirectory):
            return set()

    def close(self) -> None:
        """Free the disk space."""
        self._tree.close()


def _batches(paths: set[str]) -> Iterator[str]:
    """Yield options for helpers that pack these paths, each of a message's size."""
    some: list[str] = []
    size = 0
    for each in sorted(paths):
        size += len(each) + 4
        if some and size > _BATCH:
            yield json.dumps(some)
            some, size = [], len(each)
        some.append(each[1:])
    if some:
        yield json.dumps(some)


def pack(files: MergeFiles, directory: str, file: BinaryIO, *, options: str = "ours") -> None:
    """Write the tree at `directory` of a sandbox to `file`; nothing where there is no directory.

    Args:
        options: Of the `out` helper.

    Raises:
        NotADirectory: It is something else.
    """
    try:
        if files.stat(directory).kind != DIRECTORY:
            raise file_error(errno.ENOTDIR, directory)
    except FileNotFound:
        return
    helper = files.start_helper("out", directory, options)
    copy(helper, directory, file)


def copy(helper: Task, path: str, file: BinaryIO) -> None:
    """Write what a helper sends to `file`; raise the helper's error, which is about `path`."""
    try:
        while data := os.read(helper.stream, _PIECE):
            file.write(data)
    except BaseException:
        helper.abandon()
        raise
    helper.finish(path)


def pieces_at(fd: int, offset: int, left: int) -> Iterator[bytes]:
    """Yield so many bytes of a file from `offset` on."""
    while left > 0:
        data = os.pread(fd, min(left, _PIECE), offset)
        if not data:
            raise ResourceExhausted("a temporary file was cut off", retryable=False)
        offset, left = offset + len(data), left - len(data)
        yield data


class _Bounded:
    """A file that takes `MOST_BYTES` of content and the headers of `MOST_ENTRIES` files."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._left = file, MOST_BYTES + MOST_ENTRIES * 2048

    def write(self, data: bytes) -> int:
        self._left -= len(data)
        if self._left < 0:
            raise too_large()
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()


class Budget:
    """Entries and characters that may be taken from guests yet."""

    def __init__(self) -> None:
        self._entries, self._characters = MOST_ENTRIES, MOST_NAMES

    def take(self, entries: int, characters: int) -> None:
        """Count these.

        Raises:
            ResourceExhausted: They are more than 250,000 entries, or too long paths.
        """
        self._entries -= entries
        self._characters -= characters
        if self._entries < 0 or self._characters < 0:
            raise too_many()


def too_many() -> ResourceExhausted:
    """The error of a tree with too many files, or too long paths."""
    return ResourceExhausted(
        f"the sandbox has more than {MOST_ENTRIES} files to compare,"
        f" or {MOST_NAMES} characters in their paths",
        hint="remove files that it does not need",
        retryable=False,
    )


def too_large() -> ResourceExhausted:
    """The error of a tree with too much content."""
    return ResourceExhausted(
        f"there are more than {MOST_BYTES >> 30} GiB of files to merge",
        hint="a sparse file inside? Remove it, or merge a smaller directory with path=",
        retryable=False,
    )


class HostTree:
    """A directory of the host. No symlink in it is followed.

    Raises:
        FileNotFound, NotADirectory: There is no such directory.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        try:
            self.fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as exc:
            raise host_file_error(exc.errno or 5, directory) from exc

    def look_at(self, paths: set[str]) -> None:
        """Do nothing: each is looked at when it is asked for."""

    def get(self, path: str) -> Entry | None:
        try:
            return entry_below(self.fd, path)
        except PermissionError as exc:
            raise host_file_error(errno.EACCES, f"{self.directory}/{path}") from exc

    def pieces(self, path: str) -> Iterator[bytes]:
        return pieces_of(self.fd, path)

    def names(self, path: str) -> set[str]:
        fd = open_directory(self.fd, path)
        try:
            return set(os.listdir(fd))
        finally:
            os.close(fd)

    def close(self) -> None:
        os.close(self.fd)


def pieces_of(root: int, path: str) -> Iterator[bytes]:
    """Yield the content of a file below the directory `root`."""
    try:
        # By way of O_PATH: opening a pipe or a device would have an effect.
        fd = open_below(root, path)
        try:
            with open(f"/proc/self/fd/{fd}", "rb") as file:
                while data := file.read(_PIECE):
                    yield data
        finally:
            os.close(fd)
    except OSError as exc:
        raise host_file_error(exc.errno or errno.EIO, path) from exc


def open_directory(root: int, path: str) -> int:
    """Open a directory below `root`, through no symlink."""
    resolve = files.RESOLVE_BENEATH | files.RESOLVE_NO_SYMLINKS
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    return files.openat2(root, path.strip("/") or ".", flags, resolve=resolve)


def index(
    fd: int,
    *,
    is_layer: bool,
    offsets: dict[str, int] | None = None,
    at: int = 0,
    budget: Budget | None = None,
    found: Index | None = None,
) -> Index:
    """Read a tar stream to its end: path to kind, size, mode and digest.

    Args:
        is_layer: `.wh.NAME` in it removes NAME.
        offsets: Filled with the place of each file's content in the stream.
        at: Where it begins in the file.
        found: Filled with the entries, and returned.

    Raises:
        ResourceExhausted: It has more than 250,000 entries, or too long paths.
        IoError: A path in it climbs.
    """
    found = {} if found is None else found
    budget = budget or Budget()
    os.lseek(fd, at, os.SEEK_SET)
    with Reader(fd) as tar:
        for member in tar:
            budget.take(1, len(member.name) + len(member.linkname))
            path = member.name.removeprefix(".") or "/"
            if _CLIMBS.search(path) and path != "/":
                # Another spelling of a path would pass by what protects that path.
                raise IoError(f"the sandbox sent {member.name!r}, which is no path in a tree")
            directory, _, name = path.rpartition("/")
            if is_layer and name.startswith(WHITEOUT):
                found[f"{directory}/{name.removeprefix(WHITEOUT)}"] = (GONE, 0, 0, b"")
            elif member.islnk():
                first = found.get(member.linkname.removeprefix("."))
                if first is not None:
                    found[path] = first
                    if offsets is not None and first[0] == FILE:
                        offsets[path] = offsets[member.linkname.removeprefix(".")]
            else:
                if offsets is not None and member.isreg():
                    offsets[path] = tar.offset
                found[path] = _entry(member, tar)
    return found


def _entry(member: tarfile.TarInfo, tar: Reader) -> Entry:
    kind = _KINDS.get(member.type, OTHER)
    if kind == SYMLINK:
        return kind, 0, 0, os.fsencode(member.linkname)
    mode = stat.S_IMODE(member.mode)
    if kind != FILE:
        return kind, 0, mode, b"-"
    digest = new_digest()
    for piece in tar.content():
        digest.update(piece)
    return kind, member.size, mode, digest.digest()


def entry_below(root: int, path: str) -> Entry | None:
    """Return the entry of what is at `path` below the directory `root`, reached without symlinks."""
    try:
        fd = open_below(root, path)
    except OSError:
        return None  # not there, or below a link, which hides nothing
    try:
        info = os.fstat(fd)
        kind, mode = _MODES.get(stat.S_IFMT(info.st_mode), OTHER), stat.S_IMODE(info.st_mode)
        if kind == SYMLINK:
            return kind, 0, 0, os.fsencode(os.readlink("", dir_fd=fd))
        if kind != FILE:
            return kind, 0, mode, b"-"
        return kind, info.st_size, mode, _digest_of(fd, info.st_size)
    finally:
        os.close(fd)


def _digest_of(place: int, size: int) -> bytes:
    """Digest of a file that is open by O_PATH. `hashlib.file_digest` clears 256 KiB for each of them."""
    digest, most = new_digest(), min(size + 1, _PIECE)
    fd = os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        while data := os.read(fd, most):
            digest.update(data)
            if len(data) < most:
                break
    finally:
        os.close(fd)
    found: bytes = digest.digest()
    return found


def open_below(root: int, path: str) -> int:
    """Open `path` below the directory `root`, with O_PATH and without symlinks."""
    resolve = files.RESOLVE_IN_ROOT | files.RESOLVE_NO_SYMLINKS | files.RESOLVE_NO_MAGICLINKS
    return files.openat2(root, path, os.O_PATH | os.O_NOFOLLOW, resolve=resolve)


def read(side: Side, path: str, most: int) -> bytes | None:
    """Return the content of a file of at most `most` bytes; None for anything else."""
    entry = side.get(path)
    if entry is None or entry[0] != FILE or entry[1] > most:
        return None
    data = b"".join(side.pieces(path))
    return data if len(data) <= most else None


def is_directory(entry: Entry | None) -> bool:
    return entry is not None and entry[0] == DIRECTORY
