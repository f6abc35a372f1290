"""Unpacked snapshots: read-only directories that are mounted below the writable layers of sandboxes.

The stream of a snapshot stays what is durable and verified. Its directory is made from it, once for all
sandboxes that are restored, and made again after a restart of the machine: nothing waits for the disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import marshal
import os
import shutil
import stat
import struct
import subprocess
import sys

from ..launcher.helpers.layers import GONE
from ..model.files import DIRECTORY, FILE, OTHER, SYMLINK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..fork.trees import Entry

    Names = dict[bytes, dict[bytes, int]]
    Entries = dict[str, bytes]  # packed, by directory, relative to the top
    Directory = tuple[str, int, dict[str, os.stat_result]]

LEAST_BYTES = 4 << 20
"""Size of the smallest stream that is worth a directory: in less time a smaller one is unpacked inside."""
MOST = 24
"""Layers on top of one another; the snapshot above them is a whole one again. An overlay takes 500."""
WHITEOUT_CTIME = -1
_KINDS = (FILE, DIRECTORY, SYMLINK, OTHER, GONE)
_HEAD = struct.Struct("<BHQ")  # of an entry: kind, mode, size
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TREE, _READY, _NAMES, _ENTRIES, _NEW = "tree", "unpacked", "names", "entries", ".new"
_PARTIAL = f".{_TREE}-"
_CODE = "import sys; sys.path[:] = {path!r}; from ringfence.snapshots.unpacker import main; main()"


def tree_of(snapshot: str) -> str:
    """Return the directory of a snapshot's files, to be mounted read-only."""
    return os.path.join(snapshot, _TREE)


@contextlib.contextmanager
def alone(snapshot: str) -> Iterator[None]:
    """Keep other processes from unpacking a snapshot during the block: they would replace what is in use."""
    fd = os.open(snapshot, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def unpack(snapshot: str, content: int, *, is_layer: bool) -> bool:
    """Unpack the stream `content` for the snapshot in the directory `snapshot`.

    Args:
        is_layer: `.wh.NAME` in it removes NAME from what it lies over.

    Precondition: `alone`, and the snapshot is not unpacked.

    Returns:
        False where that cannot be: deeper than 256 directories, a full disk, or a file system without
        whiteouts (Linux before 5.8). The stream is then unpacked in each sandbox.
    """
    partial = os.path.join(snapshot, f"{_PARTIAL}{os.getpid()}")
    tidy(snapshot)
    try:
        os.mkdir(partial, 0o755)
        names, entries = marshal.loads(_run(partial, content, is_layer=is_layer))
        _replace(partial, tree_of(snapshot))
        info = os.stat(tree_of(snapshot))
        _write(os.path.join(snapshot, _NAMES), names)
        _write(os.path.join(snapshot, _ENTRIES), entries)
        # A copy of it, in another state directory or after a restart, is not it.
        ready = json.dumps([_boot(), info.st_dev, info.st_ino])
        _write(os.path.join(snapshot, _READY), ready.encode())
    except OSError:
        remove_tree(partial)
        with contextlib.suppress(OSError):
            _write(os.path.join(snapshot, _READY), json.dumps(_failed()).encode())
        return False
    return True


def tidy(snapshot: str) -> None:
    """Remove what an `unpack` has left that was killed. Precondition: none is under way."""
    with contextlib.suppress(OSError):
        for name in os.listdir(snapshot):
            if name.startswith(_PARTIAL):
                remove_tree(os.path.join(snapshot, name))
            elif name.endswith(_NEW):
                os.unlink(os.path.join(snapshot, name))


def has_failed(snapshot: str) -> bool:
    """Return whether `unpack` has failed since this boot: then it is not tried at each restore."""
    try:
        with open(os.path.join(snapshot, _READY), "rb") as file:
            return bool(json.load(file) == _failed())
    except (OSError, ValueError):
        return False


def hold(snapshot: str) -> int:
    """Return a descriptor that keeps an unpacked snapshot there while it is open; -1 if it is not unpacked."""
    path = os.path.join(snapshot, _READY)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        info = os.stat(tree_of(snapshot))
        is_there = os.path.samestat(os.fstat(fd), os.stat(path))
        if is_there and [_boot(), info.st_dev, info.st_ino] == json.loads(os.read(fd, 4096)):
            return fd
    except (OSError, ValueError):
        pass
    os.close(fd)
    return -1


def is_held(snapshot: str) -> bool:
    """Return whether anybody has what `hold` returned."""
    try:
        fd = os.open(os.path.join(snapshot, _READY), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def open_names(snapshot: str) -> int:
    """Return a descriptor of the names of a snapshot that lies over nothing, as `names_of` tells them."""
    return os.open(os.path.join(snapshot, _NAMES), os.O_RDONLY | os.O_CLOEXEC)


def entries_of(snapshot: str, most_bytes: int) -> Entries | None:
    """Return what an unpacked snapshot has and removes, by directory; None: in more bytes than that.

    Raises:
        FileNotFoundError: It was unpacked by a version that wrote none down.
    """
    with open(os.path.join(snapshot, _ENTRIES), "rb") as file:
        if os.fstat(file.fileno()).st_size > most_bytes:
            return None
        entries: Entries = marshal.load(file)
    return entries


def pack_directory(entries: dict[str, Entry]) -> bytes:
    """Pack what is in a directory; the same gives the same bytes."""
    return marshal.dumps({name: _pack_entry(*entries[name]) for name in sorted(entries)})


def _pack_entry(kind: str, size: int, mode: int, rest: bytes) -> bytes:
    return _HEAD.pack(_KINDS.index(kind), mode, size) + rest


def unpack_directory(packed: bytes) -> dict[str, bytes]:
    """Return the packed entries of a directory by name."""
    entries: dict[str, bytes] = marshal.loads(packed)
    return entries


def unpack_entry(packed: bytes) -> Entry:
    """Return an entry."""
    kind, mode, size = _HEAD.unpack_from(packed)
    return _KINDS[kind], size, mode, packed[_HEAD.size :]


def as_file(names: Names) -> int:
    """A descriptor of marshalled names."""
    fd = os.memfd_create("ringfence-names", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        marshal.dump(names, file)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def names_of(snapshots: list[str], below: Names) -> Names:
    """Return the names and change times of what sandboxes see: see `launcher.helpers.layers`.

    Args:
        snapshots: Directories of unpacked snapshots, the lowest first.
        below: Names of the image under them, which is changed; empty without one.
    """
    for snapshot in snapshots:
        with open(os.path.join(snapshot, _NAMES), "rb") as file:
            own: Names = marshal.load(file)
        gone: set[bytes] = set()
        for directory, entries in own.items():
            known = below.setdefault(directory, {})
            for name, ctime in entries.items():
                path = directory + b"/" + name if directory else name
                if path in below and path not in own:  # removed, or no directory any more
                    gone.add(path)
                if ctime == WHITEOUT_CTIME:
                    known.pop(name, None)
                else:
                    known[name] = ctime
        if gone:
            _forget(below, gone)
    return below


def _forget(names: Names, gone: set[bytes]) -> None:
    """Remove directories and all below them, in one pass: a guest may have removed very many."""
    for each in sorted(names, key=len):  # what is above comes first
        if each.rpartition(b"/")[0] in gone:
            gone.add(each)
    for each in gone:
        names.pop(each, None)


def remove_tree(path: str) -> None:
    """Remove a directory with all below it, also directories that their owner may not read."""
    with contextlib.suppress(OSError):
        for _path, here, entries in walk(path):
            for name, info in entries.items():
                if stat.S_ISDIR(info.st_mode) and info.st_mode & 0o700 != 0o700:
                    os.chmod(name, 0o700, dir_fd=here)
    shutil.rmtree(path, ignore_errors=True)


def walk(root: str) -> Iterator[Directory]:
    """Yield each directory below `root`: its path from there, a descriptor, and what is in it by name.

    A directory is opened after it was yielded as an entry. No symlink is followed, as `os.fwalk` does.

    Raises:
        OSError: A directory may not be read.
    """
    fd = os.open(root, _OPEN_DIRECTORY)
    try:
        yield from _walk("", fd)
    finally:
        os.close(fd)


def _walk(path: str, here: int) -> Iterator[Directory]:
    entries = {name: os.stat(name, dir_fd=here, follow_symlinks=False) for name in os.listdir(here)}
    yield path, here, entries
    for name, info in entries.items():
        if stat.S_ISDIR(info.st_mode):
            fd = os.open(name, _OPEN_DIRECTORY, dir_fd=here)
            try:
                yield from _walk(f"{path}/{name}" if path else name, fd)
            finally:
                os.close(fd)


def _run(target: str, content: int, *, is_layer: bool) -> bytes:
    code = _CODE.format(path=[os.path.abspath(each) for each in sys.path if each])
    os.lseek(content, 0, os.SEEK_SET)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, target, *(["layer"] if is_layer else [])],
        stdin=content,
        capture_output=True,
        env={"LC_ALL": "C.UTF-8"},
        cwd="/",
        check=False,
    )
    if done.returncode:
        raise OSError(done.stderr.decode(errors="replace").strip().rpartition("\n")[2])
    return done.stdout


def _replace(source: str, target: str) -> None:
    """Rename a directory to a name that a directory of an earlier boot may have."""
    with contextlib.suppress(FileNotFoundError):
        old = f"{source}-old"
        os.rename(target, old)
        remove_tree(old)
    os.rename(source, target)


def _write(path: str, content: bytes) -> None:
    try:
        with open(f"{path}{_NEW}", "wb") as file:
            file.write(content)
        os.rename(f"{path}{_NEW}", path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(f"{path}{_NEW}")
        raise


def _failed() -> list[str | int]:
    return [_boot(), 0, 0]  # no file has the inode 0


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
