"""A tree with mounts, and the walk that turns a path into a node. Raises `OSError` only."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .nodes import (
    EXECUTE,
    READ,
    ROOT_UID,
    WRITE,
    Directory,
    File,
    MemoryDirectory,
    MemoryFile,
    Node,
    NullDevice,
    Quota,
    Symlink,
    oserror,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import BinaryIO

    Parts = tuple[str, ...]

_MOST_LINKS = 40  # include/linux/namei.h MAXSYMLINKS


@dataclass
class Mounted:
    """`node` shown at `parts`; below it, `protected` stays as it is even when writable."""

    parts: Parts
    node: Node
    is_writable: bool
    protected: list[Parts] = field(default_factory=list)


class FileSystem:
    """File system as the processes of a sandbox see it.

    Attributes:
        mounts: Oldest first: of two at one target the newest wins.
    """

    def __init__(self, root: MemoryDirectory) -> None:
        self.root = root
        self.mounts: list[Mounted] = []

    @property
    def quota(self) -> Quota:
        """Limit and use of the tree; mounts do not count."""
        return self.root.quota

    def find(self, path: str, cwd: str = "/", *, follow: bool = True) -> Node:
        """The node at `path`; the last symlink is followed only with `follow`."""
        return self._walk(path, cwd, follow=follow)[1]

    def canonical(self, path: str, cwd: str = "/", *, follow: bool = True) -> str:
        """The path of `find`'s node without symlinks, `.` and `..`."""
        return "/" + "/".join(self._walk(path, cwd, follow=follow)[0])

    def open_read(self, path: str, cwd: str = "/") -> BinaryIO:
        """The content of the file at `path`."""
        node = self.find(path, cwd)
        if isinstance(node, Directory):
            raise oserror(errno.EISDIR)
        if not isinstance(node, File) or not node.allows(READ):
            raise oserror(errno.EACCES)
        return node.open_read()

    def open_write(
        self, path: str, cwd: str = "/", *, append: bool = False, mode: int = 0o644
    ) -> BinaryIO:
        """The content of the file at `path`, which is made if it is not there."""
        try:
            parts, node = self._walk(path, cwd)
        except FileNotFoundError:
            parts, parent = self._new_name(path, cwd)
            return parent.add_file(parts[-1], mode).open_write(append=append)
        if isinstance(node, Directory):
            raise oserror(errno.EISDIR)
        self._check_writable(parts)
        if not isinstance(node, File) or not node.allows(WRITE):
            raise oserror(errno.EACCES)
        return node.open_write(append=append)

    def names(self, path: str, cwd: str = "/") -> list[str]:
        """The names in a directory, sorted; mount points in it are among them."""
        parts, node = self._walk(path, cwd)
        if not isinstance(node, Directory):
            raise oserror(errno.ENOTDIR)
        if not node.allows(READ):
            raise oserror(errno.EACCES)
        mounted = {each.parts[-1] for each in self.mounts if each.parts[:-1] == parts}
        return sorted(mounted.union(node.names()))

    def make_dir(self, path: str, cwd: str = "/") -> None:
        parts, parent = self._new_name(path, cwd)
        parent.add_directory(parts[-1])

    def make_dirs(self, path: str, cwd: str = "/") -> None:
        """A directory and all above it, where they are missing."""
        here = "/" if path.startswith("/") else cwd
        names = list(_split(path))
        for i, name in enumerate(names, 1):
            here = f"{here}/{name}"
            try:
                node = self.find(here)
            except FileNotFoundError:
                self.make_dir(here)
                continue
            if not isinstance(node, Directory):
                raise oserror(errno.EEXIST if i == len(names) else errno.ENOTDIR)

    def make_symlink(self, path: str, target: str, cwd: str = "/") -> None:
        """A new symlink at `path` that says `target`."""
        parts, parent = self._new_name(path, cwd)
        parent.add_symlink(parts[-1], target)

    def remove(self, path: str, cwd: str = "/") -> None:
        """Forget a file, a symlink itself or an empty directory."""
        parts, node = self._walk(path, cwd, follow=False)
        if not parts or any(_is_below(each.parts, parts) for each in self.mounts):
            raise oserror(errno.EBUSY)
        self._check_writable(parts, above=True)
        if isinstance(node, Directory) and node.names():
            raise oserror(errno.ENOTEMPTY)
        self._parent(parts).drop(parts[-1])

    def mount(
        self, target: str, node: Node | None, *, is_writable: bool, protect: Iterable[str] = ()
    ) -> None:
        """Show `node`, or the directory that is there already, at `target`.

        `protect` are paths relative to the target.
        """
        parts = tuple(_split(target))
        for depth in range(1, len(parts)):
            if isinstance(self._lookup(parts[:depth]), File):
                raise oserror(errno.ENOTDIR)
        there = self._lookup(parts) or plant(self.root, target)
        protected = [(*parts, *_split(path)) for path in protect]
        self.mounts.append(Mounted(parts, node or there, is_writable, protected))

    def _walk(self, path: str, cwd: str, *, follow: bool = True) -> tuple[Parts, Node]:
        todo = _split(path if path.startswith("/") else f"{cwd}/{path}")
        done: list[str] = []
        node: Node = self.root
        links = 0
        while todo:
            name = todo.pop(0)
            if name == "..":
                done = done[:-1]
                node = self._known(done)
                continue
            node = self._step(node, (*done, name))
            if isinstance(node, Symlink) and (todo or follow):
                links += 1
                if links > _MOST_LINKS:
                    raise oserror(errno.ELOOP)
                todo = _split(node.target) + todo
                done = [] if node.target.startswith("/") else done
                node = self._known(done)
                continue
            done.append(name)
        return tuple(done), node

    def _step(self, node: Node, parts: Parts) -> Node:
        if not isinstance(node, Directory):
            raise oserror(errno.ENOTDIR)
        if not node.allows(EXECUTE):
            raise oserror(errno.EACCES)
        child = self._mounted(parts) or node.get(parts[-1])
        if child is None:
            raise oserror(errno.ENOENT)
        return child

    def _mounted(self, parts: Parts) -> Node | None:
        return next((each.node for each in reversed(self.mounts) if each.parts == parts), None)

    def _lookup(self, parts: Iterable[str]) -> Node | None:
        """The node at a path that has no symlinks on it."""
        node: Node | None = self.root
        walked: Parts = ()
        for name in parts:
            walked = (*walked, name)
            below = node.get(name) if isinstance(node, Directory) else None
            node = self._mounted(walked) or below
        return node

    def _known(self, parts: Iterable[str]) -> Node:
        node = self._lookup(parts)
        if node is None:
            raise oserror(errno.ENOENT)
        return node

    def _parent(self, parts: Parts) -> Directory:
        parent = self._known(parts[:-1])
        if not isinstance(parent, Directory):
            raise oserror(errno.ENOTDIR)
        if not parent.allows(WRITE | EXECUTE):
            raise oserror(errno.EACCES)
        return parent

    def _new_name(self, path: str, cwd: str) -> tuple[Parts, Directory]:
        """The canonical parts of a free name, and the directory to put it in."""
        head, _, name = path.rstrip("/").rpartition("/")
        if name in ("", ".", ".."):
            raise oserror(errno.EEXIST)
        above = self._walk(head or ("/" if path.startswith("/") else "."), cwd)[0]
        parts = (*above, name)
        parent = self._parent(parts)
        if self._mounted(parts) or parent.get(name):
            raise oserror(errno.EEXIST)
        self._check_writable(parts)
        return parts, parent

    def _check_writable(self, parts: Parts, *, above: bool = False) -> None:
        """EROFS below a read-only mount or a protected path, or with `above` above one."""
        covering = [each for each in self.mounts if _is_below(parts, each.parts)]
        if not covering:
            return
        mount = max(reversed(covering), key=lambda each: len(each.parts))
        hit = any(
            _is_below(parts, path) or (above and _is_below(path, parts)) for path in mount.protected
        )
        if hit or not mount.is_writable:
            raise oserror(errno.EROFS)


def _is_below(parts: Parts, above: Parts) -> bool:
    return parts[: len(above)] == above


def plant(root: MemoryDirectory, path: str) -> MemoryDirectory:
    """The directory at `path`, made by the sandbox's builder where it is missing."""
    here = root
    for name in _split(path):
        child = here.get(name) or here.add_directory(name)
        if not isinstance(child, MemoryDirectory):
            raise oserror(errno.ENOTDIR)
        here = child
    return here


def make_root(quota: Quota, programs: Iterable[str]) -> MemoryDirectory:
    """The tree of a new sandbox: system directories that belong to root, and a home."""
    root = MemoryDirectory(0o755, quota, ROOT_UID)
    for path in ("/usr/bin", "/etc", "/dev", "/proc", "/home/sandbox", "/tmp", "/var/tmp"):
        plant(root, path)
    for path in ("/usr", "/usr/bin", "/etc", "/dev", "/proc", "/home", "/var"):
        plant(root, path).owner = ROOT_UID
    usr_bin = plant(root, "/usr/bin")
    for name in programs:
        usr_bin.children[name] = MemoryFile(0o755, quota, ROOT_UID)
    root.children["bin"] = Symlink("usr/bin", ROOT_UID)
    plant(root, "/dev").children["null"] = NullDevice(0o666, ROOT_UID)
    return root


def _split(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]
