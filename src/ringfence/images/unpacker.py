"""Layers onto one directory tree, in a process of its own that can do nothing else.

A layer is a stranger's file: its names, links, sizes and compression are all made to be lied about.
This process may write below the target, and nowhere; it has no network, no capabilities, and
limits on memory, entries and bytes. It is told on its command line; see `unpack.py`.

Everything in the tree belongs to whoever unpacks: a sandbox shows it as its user's. Devices, setuid
bits and extended attributes are left out, for nothing inside could use them.

Source: OCI image specification 1.1, "Image Layer Filesystem Changeset".
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
import time
import zlib
from collections.abc import Callable
from typing import Any

from ..linux import files
from ..policy.confine import confine
from .ahead import Ahead, TooLargeError
from .decompress import opened
from .entries import DamagedError, Entries, Entry, Source

_LATEST_NS = (1 << 33) * 10**9
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_MOST_NAME = 4096
_MOST_DEEP = 256  # shutil.rmtree and many others call themselves for each
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class RefusedError(Exception):
    """The layer is not one that may be unpacked; the text says why."""


class Tree:
    """The tree under construction, reached through the descriptor of its root only.

    Args:
        most_bytes, most_entries: Of all layers together.
    """

    def __init__(self, root: int, most_bytes: int, most_entries: int) -> None:
        self.root, self.left_bytes, self.left_entries = root, most_bytes, most_entries
        self._parent: tuple[str, int] | None = None
        self._directories: dict[str, tuple[int, int]] = {}  # what they are to be in the end
        self._made: set[str] = set()  # by the layer under way

    def apply(self, layer: Source) -> None:
        """Unpack a layer on top of the earlier ones."""
        self._made.clear()
        entries = Entries(layer)
        while entry := entries.next():
            self._add(entries, entry)
        entries.rest()
        self._leave()

    def finish(self) -> None:
        """The modes and times of directories, last: a read-only one would refuse its content."""
        for path, (mode, modified_ns) in sorted(self._directories.items(), reverse=True):
            try:
                fd = self._open(path, _DIRECTORY)
            except OSError:
                continue  # a later layer put something else there
            os.fchmod(fd, mode)
            os.utime(fd, ns=(modified_ns, modified_ns))
            os.close(fd)

    def _open(self, path: str, flags: int) -> int:
        # Links of the image lead about within it, as they will for who runs it; never out.
        resolve = files.RESOLVE_IN_ROOT | files.RESOLVE_NO_MAGICLINKS
        return files.openat2(self.root, path or ".", flags, resolve=resolve)

    def _add(self, entries: Entries, entry: Entry) -> None:
        self.left_entries -= 1
        if self.left_entries < 0:
            raise RefusedError("it has more files than the limit")
        path = _normal(entry.name)
        if not path:
            return
        directory, _, name = path.rpartition("/")
        parent = self._enter(directory)
        if not name.startswith(_WHITEOUT):
            self._make(entries, entry, parent, path, name)
            self._made.add(path)
        elif name == _OPAQUE:
            self._empty(parent, directory)
        else:
            self._remove(parent, name[len(_WHITEOUT) :])

    def _enter(self, directory: str) -> int:
        """The descriptor of an entry's directory, made if the layer left it out."""
        if self._parent is None or self._parent[0] != directory:
            self._leave()
            self._parent = directory, self._make_directories(directory)
        return self._parent[1]

    def _leave(self) -> None:
        if self._parent is not None:
            os.close(self._parent[1])
            self._parent = None

    def _make_directories(self, directory: str) -> int:
        try:
            return self._open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            pass
        above, _, name = directory.rpartition("/")
        parent = self._make_directories(above)
        try:
            os.mkdir(name, 0o755, dir_fd=parent)
        finally:
            os.close(parent)
        return self._open(directory, os.O_RDONLY | os.O_DIRECTORY)

    def _make(self, entries: Entries, entry: Entry, parent: int, path: str, name: str) -> None:
        if entry.kind == stat.S_IFDIR:
            self._make_directory(entry, parent, path, name)
        elif entry.kind in _MAKERS:
            make = _MAKERS[entry.kind]
            try:
                make(self, entries, entry, parent, name)
            except FileExistsError:  # of a lower layer, mostly: it is replaced
                self._remove(parent, name)
                make(self, entries, entry, parent, name)
        # Else it is a device: a sandbox has its own.

    def _make_directory(self, entry: Entry, parent: int, path: str, name: str) -> None:
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            found = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if not stat.S_ISDIR(found.st_mode):
                # A link to a directory stays one, as in every other tool: /bin to usr/bin.
                if stat.S_ISLNK(found.st_mode) and self._is_directory(path):
                    return
                self._remove(parent, name)
                os.mkdir(name, 0o700, dir_fd=parent)
            elif stat.S_IMODE(found.st_mode) & 0o700 != 0o700:
                # Of an image below, whose modes are there already: this layer's content comes next.
                os.chmod(name, 0o700, dir_fd=parent)
        self._directories[path] = (entry.mode & 0o1777, _time(entry))

    def _is_directory(self, path: str) -> bool:
        try:
            os.close(self._open(path, os.O_RDONLY | os.O_DIRECTORY))
        except OSError:
            return False
        return True

    def _write(self, entries: Entries, entry: Entry, parent: int, name: str) -> None:
        fd = os.open(name, _NEW_FILE, entry.mode & 0o777, dir_fd=parent)
        try:
            self.left_bytes -= entry.size
            if self.left_bytes < 0:
                raise RefusedError("it is larger than the limit")
            entries.copy(fd)
            if entry.mode & stat.S_ISVTX:
                os.fchmod(fd, entry.mode & 0o1777)
            modified_ns = _time(entry)
            os.utime(fd, ns=(modified_ns, modified_ns))
        finally:
            os.close(fd)

    def _symlink(self, _entries: Entries, entry: Entry, parent: int, name: str) -> None:
        os.symlink(entry.target, name, dir_fd=parent)
        _touch(entry, parent, name)

    def _fifo(self, _entries: Entries, entry: Entry, parent: int, name: str) -> None:
        os.mkfifo(name, entry.mode & 0o777, dir_fd=parent)
        _touch(entry, parent, name)

    def _link(self, _entries: Entries, entry: Entry, parent: int, name: str) -> None:
        directory, _, target = _normal(entry.target).rpartition("/")
        if not target:
            raise RefusedError(f"{entry.name!r} is a link without a target")
        try:
            source = self._open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as exc:
            raise RefusedError(f"{entry.name!r} links to {entry.target!r}: {exc.strerror}") from exc
        try:
            found = os.stat(target, dir_fd=source, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                raise RefusedError(f"{entry.name!r} is a hard link to a directory")
            os.link(target, name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError as exc:
            raise RefusedError(
                f"{entry.name!r} links to {entry.target!r}, which does not exist"
            ) from exc
        finally:
            os.close(source)

    # -- removing -------------------------------------------------------------------------------

    def _empty(self, directory: int, path: str) -> None:
        """Remove the entries of lower layers; entries that this layer already made stay."""
        for name in os.listdir(directory):
            inner = f"{path}/{name}" if path else name
            if inner not in self._made:
                self._remove(directory, name)

    def _remove(self, parent: int, name: str) -> None:
        if name in ("", ".", ".."):
            raise RefusedError(f"it removes {name!r}")
        try:
            os.unlink(name, dir_fd=parent)
        except FileNotFoundError:
            return
        except OSError as exc:
            if exc.errno not in (errno.EISDIR, errno.EPERM):
                raise
            remove_tree(parent, name)


def remove_tree(parent: int, name: str) -> None:
    """Remove the directory `name` in `parent` and all below; no link is followed."""
    waiting = [(os.dup(parent), name)]
    while waiting:
        above, here = waiting[-1]
        fd = os.open(here, _DIRECTORY, dir_fd=above)
        try:
            inner = _without_files(fd)
            if inner:
                waiting.append((os.dup(fd), inner))
                continue
        finally:
            os.close(fd)
        os.rmdir(here, dir_fd=above)
        os.close(above)
        waiting.pop()


def _without_files(directory: int) -> str:
    """Unlink what is no directory; returns one of the directories."""
    os.fchmod(directory, 0o700)
    inner = ""
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                inner = entry.name
            else:
                os.unlink(entry.name, dir_fd=directory)
    return inner


def _normal(name: str) -> str:
    """A member's name without leading and doubled slashes and dots.

    Raises:
        RefusedError: It climbs out, no file can have it, or it is deeper than anybody can remove it.
    """
    if len(name) > _MOST_NAME or "\0" in name:
        raise RefusedError("it has an invalid file name")
    if name.count("/") > _MOST_DEEP:
        raise RefusedError(f"it has directories nested deeper than {_MOST_DEEP}")
    name = name.removeprefix("./").rstrip("/")
    if name and "/." not in name and "//" not in name and name[0] not in "/.":
        return name
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise RefusedError(f"{name!r} leads outside the image")
    return "/".join(parts)


def _time(entry: Entry) -> int:
    return min(max(entry.modified_ns, 0), _LATEST_NS)


def _touch(entry: Entry, parent: int, name: str) -> None:
    modified_ns = _time(entry)
    os.utime(name, ns=(modified_ns, modified_ns), dir_fd=parent, follow_symlinks=False)


_MAKERS: dict[int, Callable[[Tree, Entries, Entry, int, str], None]] = {
    stat.S_IFREG: Tree._write,
    stat.S_IFLNK: Tree._symlink,
    stat.S_IFIFO: Tree._fifo,
    0: Tree._link,
}


def main() -> None:
    """`[root fd, most bytes, most entries, [[layer fd, compression, diff id], ...]]` on argv.

    Without a root, -1, the layers are only compared with their digests.
    """
    root, most_bytes, most_entries, layers = json.loads(sys.argv[1])
    started = time.monotonic()
    try:
        streams = [opened(fd, compression) for fd, compression, _ in layers]  # nothing is read yet
        confine(*([os.readlink(f"/proc/self/fd/{root}")] if root >= 0 else []))
        os.umask(0)
        tree = Tree(root, most_bytes, most_entries)
        for number, (opened_layer, (_, _, diff_id)) in enumerate(
            zip(streams, layers, strict=True), 1
        ):
            stream = Ahead(opened_layer, most_bytes + (most_entries << 10))
            if root >= 0:
                tree.apply(stream)
            else:
                Entries(stream).rest()
            found = stream.digest()
            if diff_id and found != diff_id:
                raise RefusedError(f"layer {number} is {found}, and should be {diff_id}")
        tree.finish()
        size = most_bytes - tree.left_bytes
        answer: dict[str, Any] = {"bytes": size, "entries": most_entries - tree.left_entries}
    except (RefusedError, DamagedError) as exc:
        answer = {"refused": str(exc)}
    except TooLargeError:
        answer = {"refused": "it is larger than the limit"}
    except (EOFError, ValueError, MemoryError, zlib.error) as exc:
        answer = {"refused": f"it is damaged: {exc!r}"}
    except OSError as exc:
        damaged = exc.errno is None  # of a decompressor
        kind = "refused" if damaged else "errno"
        answer = {kind: str(exc) if damaged else exc.errno, "text": str(exc)}
    answer["duration_s"] = time.monotonic() - started
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()
