"""Paths of the host in a directory that the sandbox can write to: the links that it puts there lead nobody.

Whoever copies to `repo/out`, with `repo` mounted writable, would else write wherever a program
inside has let `out` point to, and read there as well. Elsewhere links are the caller's own.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager

from ..client.unpack import in_the_way
from ..errors import FileError, host_file_error
from ..linux.files import RESOLVE_BENEATH, RESOLVE_NO_SYMLINKS, openat2
from ..model.mount import READ_WRITE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ..model.session import ResolvedMount

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
_MAKE = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK


@contextmanager
def to_read(local: str, mounts: Iterable[ResolvedMount]) -> Iterator[str]:
    """A path by which to read what is at `local`.

    Raises:
        FileError: The sandbox can write there, and a symlink is on the way.
    """
    with _held(local, mounts, os.O_RDONLY | os.O_NONBLOCK) as place:
        yield place


@contextmanager
def to_write(local: str, mounts: Iterable[ResolvedMount], *, overwrite: bool) -> Iterator[str]:
    """A path by which to write the file `local`; raises as `to_read`, and FileExists."""
    with _held(local, mounts, _MAKE | (os.O_TRUNC if overwrite else os.O_EXCL)) as place:
        yield place


@contextmanager
def to_fill(local: str, mounts: Iterable[ResolvedMount]) -> Iterator[str]:
    """A path of the directory `local`, which is made with all above it; raises as `to_read`."""
    with _held(local, mounts, _DIRECTORY, makes=True) as place:
        yield place


@contextmanager
def _held(
    local: str, mounts: Iterable[ResolvedMount], flags: int, *, makes: bool = False
) -> Iterator[str]:
    top, names = _split(local, mounts)
    if not top:
        yield local
        return
    try:
        root = os.open(top, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if makes:
                _make(root, names)
            fd = _open(root, names, flags)
        finally:
            os.close(root)
    except OSError as exc:
        if exc.errno == errno.EEXIST and flags & os.O_EXCL:
            raise in_the_way(local) from exc
        if exc.errno != errno.ELOOP:
            raise host_file_error(exc.errno or errno.EIO, local) from exc
        raise FileError(
            f"{local}: a symlink is on the way, and {top} is mounted: a program inside may have put it there",
            path=local,
            hint="use the link's target",
        ) from exc
    try:
        if not stat.S_ISREG(mode := os.fstat(fd).st_mode) and not stat.S_ISDIR(mode):
            # The path in /proc opens it once more, and a FIFO without a writer would block for ever.
            raise FileError(
                f"{local}: not a file or directory, and {top} is mounted: a program inside may have made it",
                path=local,
                hint="remove it, or use another path",
            )
        # A directory is looked at by name, and the link in /proc is none.
        yield (
            f"/proc/self/fd/{fd}/."
            if os.path.isdir(f"/proc/self/fd/{fd}")
            else f"/proc/self/fd/{fd}"
        )
    finally:
        os.close(fd)


def _open(root: int, names: list[str], flags: int) -> int:
    resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS
    mode = 0o666 if flags & os.O_CREAT else 0
    return openat2(root, "/".join(names) or ".", flags, resolve=resolve, mode=mode)


def _make(root: int, names: list[str]) -> None:
    for depth in range(1, len(names) + 1):
        above = _open(root, names[: depth - 1], _DIRECTORY)
        try:
            os.mkdir(names[depth - 1], dir_fd=above)
        except FileExistsError:
            pass
        finally:
            os.close(above)


def _split(local: str, mounts: Iterable[ResolvedMount]) -> tuple[str, list[str]]:
    """The directory on the way that the sandbox can write to, or "", and the names below it."""
    tops = {
        os.path.realpath(each.host_path)
        for each in mounts
        if each.host_path and each.access == READ_WRITE
    }
    names = os.path.abspath(local).split("/")[1:] if tops else []
    here = "/"
    for depth, name in enumerate(names):
        here = os.path.realpath(os.path.join(here, name))
        if here in tops:
            return here, names[depth + 1 :]
    return "", []
