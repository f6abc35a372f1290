"""Directory trees as tar streams, made and unpacked inside a sandbox."""

from __future__ import annotations

import errno
import os
import stat
import sys
import tarfile

from . import tars
from .descent import Descent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Of the kernel's making, and of the network's: a restored sandbox may have another one.
_NOT_SAVED = (
    *("/proc", "/dev", "/sys", "/etc/resolv.conf", "/etc/hosts", "/etc/hostname", "/etc/ringfence"),
    "/.ringfence-mounts",  # in gVisor, where what is attached comes from
)
_REPLACED = (FileNotFoundError, NotADirectoryError)
_TYPES = {
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
    stat.S_IFCHR: tarfile.CHRTYPE,
    stat.S_IFBLK: tarfile.BLKTYPE,
}
_MOST_FRAMES = 8_000  # of Python's, one for each level of a tree
_MOST_HOLES = 8 << 30  # bytes that files claim and do not have: each is read and sent as a zero


def pack(
    stream: int,
    path: str,
    *,
    one_file_system: bool,
    progress: Any = None,
    is_ours: bool = False,
    only: list[str] | None = None,
) -> None:
    """Write the tree at `path` to descriptor `stream`, which stays open.

    Args:
        one_file_system: Leave out mounts below, and kernel trees: what a snapshot saves.
        is_ours: See `tars.Writer`.
        only: Paths below `path`: of these and of the directories above them the entries alone.
    """
    device = os.lstat(path).st_dev
    with tars.Writer(stream, is_ours=is_ours) as tar:
        if only is not None:
            pack_whole(_Selection(tar, only), path)
            return
        packer = Packer(tar, device if one_file_system else -1, progress)
        if one_file_system:
            packer.go_above(path)
        pack_whole(packer, path)


def packing(options: str) -> dict[str, Any]:
    """Return the arguments of `pack` that the options of an `out` helper ask for: see `BackendFiles`."""
    if options.startswith("["):
        import json  # only a merge needs it

        return {"is_ours": True, "only": json.loads(options)}
    return {"is_ours": bool(options)}


def pack_whole(packer: Packer, path: str, name: str = ".") -> None:
    """Add the tree at `path` as `name`, by default as the whole of a stream.

    Raises:
        OSError: ENAMETOOLONG where it is some 8,000 directories deep.
    """
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, _MOST_FRAMES))
    try:
        packer.add(path, name)
    except RecursionError as exc:
        why = "more directories in one another than can be packed"
        raise OSError(errno.ENAMETOOLONG, why, path) from exc
    finally:
        packer.close()
        sys.setrecursionlimit(before)


class Packer:
    """Writes trees as members of a tar stream.

    Every name is taken in its directory, which is held open: a tree may be deeper than a path is long, and a
    guest could lead us out of it, with a symlink in the place of a directory between two looks.
    """

    def __init__(
        self, tar: tars.Writer, device: int, progress: Any, left_out: Collection[str] = ()
    ) -> None:
        self._left_out = {*_NOT_SAVED, *left_out}
        self._tar, self._device, self._progress = tar, device, progress
        self._names: dict[tuple[int, int], str] = {}  # of files with several, by inode and device
        self._place: Descent | None = None  # the directory that is looked at
        self._levels: list[bool] = []  # of `_enter`: whether we went into it
        self._holes = 0

    def go_above(self, path: str) -> None:
        """Go to the directory that has the absolute `path`, through no symlink: a guest may put one there.

        Raises:
            OSError: ENOTDIR where there is one.
        """
        above = path.strip("/").split("/")[:-1]
        if above or path.strip("/"):
            self._place = Descent(os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            for name in above:
                self._place.enter(name)

    def close(self) -> None:
        """Close the directories that are still held, as after an error."""
        if self._place is not None:
            self._place.close()
            self._place = None

    def add(self, path: str, name: str) -> None:
        """Add what is at `path`, and all below it."""
        if self._add_one(path, name):
            below = os.path.join(path, "")
            for entry in self._enter(path):
                self.add(below + entry, f"{name}/{entry}")
            self._leave()

    def _add_one(self, path: str, name: str) -> bool:
        """Add what is at `path` alone; returns whether there may be more below it."""
        try:
            info = self._stat(path)
            elsewhere = self._device_of(info) != self._device
            if self._device >= 0 and (elsewhere or path in self._left_out):
                return False
            member = self._member(path, name, info)
            if member is None:
                return False
            if member.isreg():
                self._add_file(path, info, member)
            else:
                self._tar.add(member)
            return stat.S_ISDIR(info.st_mode)
        except FileNotFoundError:
            return False  # it went away while we looked: a running sandbox may do that

    def _stat(self, path: str) -> os.stat_result:
        return os.stat(self._at(path), dir_fd=self._inside, follow_symlinks=False)

    @property
    def _inside(self) -> int | None:
        return None if self._place is None else self._place.fd

    def _at(self, path: str) -> str:
        """Return the name relative to the directory that this process is in."""
        return path if self._place is None else path[path.rfind("/") + 1 :]

    def _open(self, path: str, flags: int) -> int:
        flags |= os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(self._at(path), flags, dir_fd=self._inside)

    def _enter(self, path: str) -> list[str]:
        """Go into a directory, until `_leave`; returns the names in it."""
        self._levels.append(False)
        try:
            if self._place is None:
                self._place = Descent(self._open(path, os.O_DIRECTORY))
            else:
                self._place.enter(os.path.basename(path))
        except _REPLACED:
            return []  # it is gone, or something else has taken its place
        self._levels[-1] = True
        return sorted(os.listdir(self._place.fd))

    def _leave(self) -> None:
        if not self._levels.pop() or self._place is None:
            return
        if self._place.depth:
            self._place.leave()
        else:
            self.close()

    def _device_of(self, info: os.stat_result) -> int:
        return info.st_dev

    def _member(self, path: str, name: str, info: os.stat_result) -> tarfile.TarInfo | None:
        """Build the header for `path`; None for a file that means nothing elsewhere."""
        member = tarfile.TarInfo(name)
        member.type = _TYPES.get(stat.S_IFMT(info.st_mode), b"")
        one_system = self._device >= 0
        if not member.type and one_system:
            return None  # a socket: it means nothing without its process
        if not one_system and not (member.isreg() or member.isdir() or member.issym()):
            raise OSError(errno.EINVAL, "is not a file, directory or link", path)
        member.mode, member.mtime = info.st_mode, info.st_mtime
        member.uid, member.gid = info.st_uid, info.st_gid
        if member.isreg():
            self._name_inode(member, info)
        elif member.issym():
            member.linkname = self._target(path)
        elif member.ischr() or member.isblk():
            member.devmajor, member.devminor = os.major(info.st_rdev), os.minor(info.st_rdev)
        return member

    def _name_inode(self, member: tarfile.TarInfo, info: os.stat_result) -> None:
        """A file; or another name of one that has been written."""
        first = member.name
        if info.st_nlink > 1:
            first = self._names.setdefault((info.st_ino, info.st_dev), first)
        if first != member.name:
            member.type, member.linkname = tarfile.LNKTYPE, first
        else:
            member.size = info.st_size

    def _target(self, path: str) -> str:
        try:
            return os.readlink(self._at(path), dir_fd=self._inside)
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                raise
            # Something else has taken its place; as good as gone.
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from exc

    def _add_file(self, path: str, info: os.stat_result, member: tarfile.TarInfo) -> None:
        self._holes += max(0, info.st_size - info.st_blocks * 512)
        if self._holes > _MOST_HOLES:
            raise OSError(errno.EFBIG, f"sparse files claim more than {_MOST_HOLES} bytes", path)
        fd = self._open(path, os.O_NONBLOCK)
        try:
            self._tar.add(member, fd)
        finally:
            os.close(fd)
        if self._progress:
            self._progress(self._tar.offset, path)


class _Selection(Packer):
    """Packs chosen paths and the directories above them; nothing behind a symlink.

    Args:
        paths: Relative to the top; those that are not there are left out.
    """

    def __init__(self, tar: tars.Writer, paths: list[str]) -> None:
        super().__init__(tar, -1, None)
        self._wanted: dict[str, Any] = {}
        for path in paths:
            place = self._wanted
            for name in path.split("/"):
                place = place.setdefault(name, {})

    def add(self, path: str, name: str) -> None:
        wanted = self._wanted
        if not self._add_one(path, name) or not wanted:
            return
        there = self._enter(path)
        for entry in there if len(there) < len(wanted) else sorted(wanted):
            if entry in wanted and entry not in ("", ".", ".."):
                self._wanted = wanted[entry]
                self.add(os.path.join(path, entry), f"{name}/{entry}")
        self._wanted = wanted
        self._leave()


def unpack(
    stream: int,
    path: str,
    *,
    one_file_system: bool,
    prepare: Any = None,
    place: Any = None,
    digests: dict[int, bytes] | None = None,
) -> None:
    """Unpack a tar stream below `path`, creating it; existing files are replaced.

    Whoever sent the stream may write below `path` and nowhere else: a name that climbs, or that goes
    through a symlink, is refused.

    Args:
        one_file_system: Restoring a snapshot: owners are restored too.
        prepare: Called with each member and its path; false where there is nothing to extract.
        place: Called with each name in the stream; returns the one below `path`. None: the same.
        digests: Filled with the digest of the content of each file, by inode: see `tars.new_digest`.
    """
    try:
        _unpack(stream, path, one_file_system, prepare, place, digests)
    except tarfile.TarError as exc:
        raise OSError(errno.EINVAL, f"is not a whole, uncompressed tar stream: {exc}") from exc


def _unpack(
    stream: int,
    path: str,
    one_file_system: bool,
    prepare: Any,
    place: Any,
    digests: dict[int, bytes] | None,
) -> None:
    os.umask(0)
    os.makedirs(path, mode=0o755, exist_ok=True)
    directories = []
    way = _Way(path)
    with tars.Reader(stream, closefd=True) as tar:
        for member in tar:
            member.mode &= 0o1777  # no setuid: the filter would refuse it too
            if place is not None:
                member.name = place(member.name)
                member.linkname = place(member.linkname) if member.islnk() else member.linkname
            target = way.to(member.name)
            if prepare is not None and not prepare(member, target):
                continue
            _extract(tar, member, way, target, one_file_system, digests)
            if member.isdir():
                directories.append(member)
    for member in reversed(directories):
        _finish_directory(way.to(member.name), member)


class _Way:
    """From the names in a stream to places below `root`; no symlink is on the way to any of them.

    The directory of a name becomes the current one of this process: a path may be longer than the kernel takes.
    """

    def __init__(self, root: str) -> None:
        self._place = Descent(os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), os.O_PATH)
        self._here: list[str] = []
        self._last = ""  # the directory in the stream that this is
        os.fchdir(self._place.fd)

    def to(self, name: str) -> str:
        """Go to the directory of that name; returns its path there.

        Raises:
            OSError: EINVAL for a name that is absolute or climbs, ELOOP where a symlink is on the way.
        """
        directory, _, last = name.rpartition("/")
        is_plain = last not in ("", ".", "..") and "\0" not in last
        if is_plain and directory and directory == self._last:
            return f"./{last}"
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if name.startswith("/") or ".." in parts or "\0" in name:
            raise OSError(errno.EINVAL, "is outside the destination", name)
        self._last = ""
        self._go(parts[:-1], name)
        self._last = directory
        return f"./{parts[-1]}" if parts else "."

    def _go(self, there: list[str], name: str) -> None:
        same = min(len(there), len(self._here))
        if there[:same] != self._here[:same]:
            same = next(i for i in range(same) if there[i] != self._here[i])
        while len(self._here) > same:
            self._place.leave()
            self._here.pop()
        for part in there[same:]:
            try:
                self._place.enter(part)
            except NotADirectoryError as exc:
                if stat.S_ISLNK(os.lstat(part, dir_fd=self._place.fd).st_mode):
                    raise OSError(errno.ELOOP, "would go through a symlink", name) from exc
                raise
            self._here.append(part)
        os.fchdir(self._place.fd)

    def link(self, source: str, target: str) -> None:
        """Give the file of another name in the stream the name `target` too."""
        first = self.to(source)
        fd = os.dup(self._place.fd)
        try:
            there = self.to(target)
            _clear(there)
            os.link(first, there, src_dir_fd=fd, follow_symlinks=False)
        finally:
            os.close(fd)


def _extract(
    tar: tars.Reader,
    member: tarfile.TarInfo,
    way: _Way,
    target: str,
    owners: bool,
    digests: dict[int, bytes] | None,
) -> None:
    if member.isdir():
        if os.path.islink(target):
            raise OSError(errno.ELOOP, "would go through a symlink", member.name)
        os.makedirs(target, mode=0o755, exist_ok=True)
    elif member.isreg():
        _extract_file(tar, member, target, owners, digests)
        return
    elif member.issym():
        _clear(target)
        os.symlink(member.linkname, target)
    elif member.islnk():
        way.link(member.linkname, member.name)
        return
    elif not owners:
        raise OSError(errno.EINVAL, "is not a file, directory or link", member.name)
    elif member.isfifo():
        _clear(target)
        os.mkfifo(target, member.mode)
    else:
        return  # a device: what is restored has those of the sandbox
    if owners:
        _own(target, member)
    if not member.isdir():
        os.utime(target, (member.mtime, member.mtime), follow_symlinks=False)


def _extract_file(
    tar: tars.Reader,
    member: tarfile.TarInfo,
    target: str,
    owners: bool,
    digests: dict[int, bytes] | None,
) -> None:
    try:
        fd = os.open(target, _NEW, member.mode)
    except FileExistsError:
        _clear(target)
        fd = os.open(target, _NEW, member.mode)
    try:
        if digests is None:
            tar.copy(fd)
        else:
            digest = tars.new_digest()
            tar.copy(fd, digest)
            digests[os.fstat(fd).st_ino] = digest.digest()
        if owners:
            _own(fd, member)
        os.utime(fd, (member.mtime, member.mtime))
    finally:
        os.close(fd)


def _clear(target: str) -> None:
    try:
        os.unlink(target)
    except FileNotFoundError:
        pass


def _own(target: str | int, member: tarfile.TarInfo) -> None:
    follows = isinstance(target, int)  # a descriptor has nothing to follow
    found = os.stat(target, follow_symlinks=follows)
    if (found.st_uid, found.st_gid) != (member.uid, member.gid):
        os.chown(target, member.uid, member.gid, follow_symlinks=follows)


def _finish_directory(target: str, member: tarfile.TarInfo) -> None:
    """Last, so that a read-only directory does not refuse its own content."""
    try:
        if stat.S_IMODE(os.lstat(target).st_mode) != member.mode:
            os.chmod(target, member.mode)
        os.utime(target, (member.mtime, member.mtime))
    except PermissionError:
        return  # /tmp and the like: not the sandbox user's, and already as they should be


def remove(path: str, *, one_file_system: bool) -> None:
    """Remove a directory and all below it; symlinks are removed, never followed.

    Without recursion and without paths, for a guest's tree may be deeper than any stack and longer than any
    path; and with an end: who adds files meanwhile gets ENOTEMPTY.
    """
    del one_file_system
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    place = Descent(os.open(path, flags))
    try:
        waiting = [_empty(place.fd)]
        while waiting:
            if waiting[-1]:
                place.enter(waiting[-1][-1])
                waiting.append(_empty(place.fd))
                continue
            waiting.pop()
            if waiting:
                place.leave()
                os.rmdir(waiting[-1].pop(), dir_fd=place.fd)
    finally:
        place.close()
    os.rmdir(path)


def _empty(directory: int) -> list[str]:
    """Remove what is no directory; returns the directories."""
    with os.scandir(directory) as found:
        entries = [(each.name, each.is_dir(follow_symlinks=False)) for each in found]
    for name, is_directory in entries:
        if not is_directory:
            os.unlink(name, dir_fd=directory)
    return [name for name, is_directory in entries if is_directory]


OPERATIONS: dict[str, Any] = {"out": pack, "in": unpack, "remove": remove}
