"""The three sides of a merge: trees in tar streams, and a directory of the host."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tarfile
import tempfile

from ..errors import IoError, ResourceExhausted, host_file_error
from ..launcher.helpers.layers import WHITEOUT
from ..launcher.helpers.tars import Reader
from ..linux import files
from ..model.files import DIRECTORY, FILE, OTHER, SYMLINK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO, Protocol

    Entry = tuple[str, int, int, bytes]  # kind, size, mode, digest of the content or link target
    Index = dict[str, Entry]

    class Side(Protocol):
        """A tree of files. Paths begin with "/" and are below its top."""

        def get(self, path: str) -> Entry | None:
            """Return kind, size, mode and digest of what is at `path`; None: there is nothing."""
            ...

        def pieces(self, path: str) -> Iterator[bytes]: ...

        def names(self, path: str) -> set[str]: ...


MOST_ENTRIES = 250_000  # of one side: about 300 bytes of memory each
MOST_NAMES = 32 << 20  # characters of their paths and link targets: a path may have 4,096
MOST_BYTES = 4 << 30  # of the content of one side: a sparse file claims any size
GONE = "gone"
_CLIMBS = re.compile(r"\A[^/]|/\.{0,2}(?:/|\Z)")
_MODES = {stat.S_IFREG: FILE, stat.S_IFDIR: DIRECTORY, stat.S_IFLNK: SYMLINK}
_KINDS = {
    tarfile.REGTYPE: FILE,
    tarfile.AREGTYPE: FILE,
    tarfile.DIRTYPE: DIRECTORY,
    tarfile.SYMTYPE: SYMLINK,
}
_PIECE = 1 << 20


class StreamTree:
    """A tree read from a tar stream, which is kept in a file without a name.

    Args:
        pack: Writes the stream to a descriptor.
    """

    def __init__(self, pack: Callable[[BinaryIO], None]) -> None:
        self._file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        self._offsets: dict[str, int] = {}
        self._names: dict[str, set[str]] | None = None
        try:
            pack(_Bounded(self._file))  # type: ignore[arg-type]
            self._file.flush()
            self.is_absent = self._file.tell() == 0
            self.entries = (
                {}
                if self.is_absent
                else index(self._file.fileno(), is_layer=False, offsets=self._offsets)
            )
        except BaseException:
            self._file.close()
            raise

    def get(self, path: str) -> Entry | None:
        return self.entries.get(path)

    def pieces(self, path: str) -> Iterator[bytes]:
        offset, left = self._offsets[path], self.entries[path][1]
        while left > 0:
            data = os.pread(self._file.fileno(), min(left, _PIECE), offset)
            if not data:
                raise ResourceExhausted("a temporary file was cut off", retryable=False)
            offset, left = offset + len(data), left - len(data)
            yield data

    def names(self, path: str) -> set[str]:
        if self._names is None:
            self._names = {}
            for each in self.entries:
                above, _, name = each.rpartition("/")
                self._names.setdefault(above or "/", set()).add(name)
        return self._names.get(path, set())

    def close(self) -> None:
        self._file.close()


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

    def get(self, path: str) -> Entry | None:
        return entry_below(self.fd, path)

    def pieces(self, path: str) -> Iterator[bytes]:
        # By way of O_PATH: opening a pipe or a device would have an effect.
        fd = open_below(self.fd, path)
        try:
            with open(f"/proc/self/fd/{fd}", "rb") as file:
                while data := file.read(_PIECE):
                    yield data
        finally:
            os.close(fd)

    def names(self, path: str) -> set[str]:
        fd = open_directory(self.fd, path)
        try:
            return set(os.listdir(fd))
        finally:
            os.close(fd)

    def close(self) -> None:
        os.close(self.fd)


def open_directory(root: int, path: str) -> int:
    """Open a directory below `root`, through no symlink."""
    resolve = files.RESOLVE_BENEATH | files.RESOLVE_NO_SYMLINKS
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    return files.openat2(root, path.strip("/") or ".", flags, resolve=resolve)


def index(fd: int, *, is_layer: bool, offsets: dict[str, int] | None = None) -> Index:
    """Read a tar stream to its end: path to kind, size, mode and digest.

    Args:
        is_layer: `.wh.NAME` in it removes NAME.
        offsets: Filled with the place of each file's content in the stream.

    Raises:
        ResourceExhausted: It has more than 250,000 entries, or too long paths.
        IoError: A path in it climbs.
    """
    found: Index = {}
    left = MOST_NAMES
    os.lseek(fd, 0, os.SEEK_SET)
    with Reader(fd) as tar:
        for member in tar:
            left -= len(member.name) + len(member.linkname)
            if len(found) >= MOST_ENTRIES or left < 0:
                raise ResourceExhausted(
                    f"the sandbox has more than {MOST_ENTRIES} files to compare,"
                    f" or {MOST_NAMES} characters in their paths",
                    hint="remove files that it does not need",
                    retryable=False,
                )
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
    digest = hashlib.blake2b(digest_size=16)
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
        with open(f"/proc/self/fd/{fd}", "rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
        return kind, info.st_size, mode, digest.digest()
    finally:
        os.close(fd)


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
