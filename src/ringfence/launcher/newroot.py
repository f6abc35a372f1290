"""Steps of a plan, which build a root: each verb, and its function."""

from __future__ import annotations

import _stat as stat
import errno
import posix as os

from ..linux import files, mounts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .plan import Shape

TERMINALS = (
    24  # by default: sysctl kernel.pty.max is 4096 for everybody, 1024 of them for the host's own
)
BOOT_ID = "/proc/sys/kernel/random/boot_id"
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class BuildError(Exception):
    """A step could not be done; `step` says which, `cause` is the kernel's answer."""

    def __init__(self, step: str, cause: OSError) -> None:
        super().__init__(f"{step}: {cause}")
        self.step, self.cause = step, cause


class NewRoot:
    """The root under construction, always reached through the descriptor of its directory."""

    def __init__(
        self, root_fd: int, shape: Shape, trees: list[int], proc: int = -1, dev: int = -1
    ) -> None:
        self.fd, self.shape, self.trees, self.proc, self.dev = root_fd, shape, trees, proc, dev
        self.covers = "/dev"  # where what covers a denied path is made

    def open(self, path: str, flags: int = os.O_PATH) -> int:
        """Open `path`, absolute in the new root; no symlink on the way is followed."""
        # A symlink planted in a mounted host directory must not redirect a mount (CVE-2021-30465).
        resolve = files.RESOLVE_IN_ROOT | files.RESOLVE_NO_SYMLINKS | files.RESOLVE_NO_MAGICLINKS
        return files.openat2(self.fd, path, flags, resolve=resolve)

    def make_dir(self, path: str, mode: int = 0o755) -> None:
        """Create `path` and its parents; an existing directory stays as it is."""
        parent = os.dup(self.fd)
        for name in path.strip("/").split("/"):
            try:
                os.mkdir(name, mode, dir_fd=parent)
            except FileExistsError:
                pass
            child = os.open(
                name, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent
            )
            os.close(parent)
            parent = child
        os.close(parent)

    def make_mount_point(self, target: str, is_dir: bool) -> None:
        """Create a directory or an empty file to mount on, and its parents; what exists stays."""
        if is_dir:
            self.make_dir(target)
            return
        parent, _, name = target.rpartition("/")
        if parent:
            self.make_dir(parent)
        directory = self.open(parent or "/", os.O_PATH | os.O_DIRECTORY)
        try:
            os.close(os.open(name, _NEW_FILE, 0o644, dir_fd=directory))
        except FileExistsError:
            pass
        finally:
            os.close(directory)

    def attach(self, tree: int, target: str) -> None:
        """Attach a detached tree at `target`, made to fit (directory on directory, file on file)."""
        self.make_mount_point(target, stat.S_ISDIR(os.fstat(tree).st_mode))
        mountpoint = self.open(target)
        try:
            mounts.move_mount(tree, "", dir_fd=mountpoint)
        finally:
            os.close(mountpoint)
            os.close(tree)


def run_steps(root: NewRoot, steps: list[tuple[Any, ...]]) -> None:
    """Apply the steps of a plan, in order.

    Raises:
        BuildError: naming the step that failed.
    """
    for verb, *args in steps:
        step(f"{verb} {args[0] if args else ''}", _VERBS[verb], root, *args)


def run_or_undo(root: NewRoot, steps: list[tuple[Any, ...]]) -> None:
    """The same in a root that is in use: where a step fails, no tree of the host's stays mounted there.

    Raises:
        BuildError: naming the step that failed.
    """
    kept = [os.dup(tree) for tree in root.trees]
    try:
        run_steps(root, steps)
    except BuildError:
        for fd in reversed(kept):
            # By descriptor: what a path leads to is for those inside to change.
            try:
                os.fchdir(fd)
                mounts.umount2(".", mounts.MNT_DETACH)
            except OSError:
                pass  # not mounted yet; or a file, which nothing comes after
        raise
    finally:
        for fd in kept:
            os.close(fd)


def step(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call `function`; its failure names the step."""
    try:
        return function(*args)
    except OSError as exc:
        raise BuildError(name, exc) from exc


# The skeleton is made first, in an empty tmpfs that nobody else can reach: plain paths, relative to
# the new root as current directory, are safe there and save three calls each.


def _dir(root: NewRoot, path: str, mode: int, owned: bool) -> None:
    os.mkdir(path[1:], mode)
    if owned:
        os.chown(path[1:], root.shape["uid"], root.shape["gid"], follow_symlinks=False)


def _symlink(_root: NewRoot, path: str, target: str) -> None:
    os.symlink(target, path[1:])


def _file(_root: NewRoot, path: str, content: bytes, mode: int) -> None:
    fd = os.open(path[1:], _NEW_FILE, mode)
    os.write(fd, content)
    os.close(fd)


def _rewrite(root: NewRoot, path: str, content: bytes) -> None:
    """Another content for a file that the template has made."""
    fd = root.open(path, os.O_WRONLY | os.O_TRUNC)
    os.write(fd, content)
    os.close(fd)


def _show(root: NewRoot, target: str, index: int, is_dir: bool) -> None:
    """Bind a part of the template; its parent directory exists."""
    if is_dir:
        os.mkdir(target[1:], 0o755)
    else:
        os.close(os.open(target[1:], _NEW_FILE, 0o644))
    mounts.move_mount(root.trees[index], target[1:])
    os.close(root.trees[index])


# These meet an image's files, from within it: what is there stays, unless it must be replaced.


def _image_dir(root: NewRoot, path: str, mode: int, owned: bool) -> None:
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        os.close(root.open(path, os.O_PATH | os.O_DIRECTORY))  # it is one, and not a link
        return
    if owned:
        os.chown(path, root.shape["uid"], root.shape["gid"], follow_symlinks=False)


def _image_file(root: NewRoot, path: str, content: bytes, mode: int, replace: bool) -> None:
    directory, _, name = path.rpartition("/")
    parent = root.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        if replace:
            try:
                os.unlink(name, dir_fd=parent)
            except FileNotFoundError:
                pass
        fd = os.open(name, _NEW_FILE, mode, dir_fd=parent)
        os.write(fd, content)
        os.close(fd)
    except FileExistsError:
        pass  # the image's own
    finally:
        os.close(parent)


def _image_link(root: NewRoot, path: str, target: str) -> None:
    directory, _, name = path.rpartition("/")
    parent = root.open(directory or "/", os.O_PATH | os.O_DIRECTORY)
    try:
        os.symlink(target, name, dir_fd=parent)
    except FileExistsError:
        pass
    finally:
        os.close(parent)


def _image_dev(root: NewRoot) -> None:
    root.attach(root.dev, "/dev")


def _image_proc(root: NewRoot) -> None:
    root.attach(root.proc, "/proc")


# These meet trees of the host's and, in a live sandbox, of the guest's making.


def _bind(root: NewRoot, target: str, index: int) -> None:
    root.attach(root.trees[index], target)


def _mount_point(root: NewRoot, path: str, is_dir: bool) -> None:
    """Make it for others to mount on, who are told what is wrong as the kernel would tell us."""
    root.make_mount_point(path, is_dir)
    if not is_dir and stat.S_ISDIR(_stat(root, path).st_mode):
        raise OSError(errno.EINVAL, "is a directory")


def _session_dir(root: NewRoot, path: str) -> None:
    """A directory of the session's own, in the writable layer, owned by the sandbox's user."""
    root.make_dir(path)
    fd = root.open(path, os.O_RDONLY | os.O_DIRECTORY)
    os.fchown(fd, root.shape["uid"], root.shape["gid"])
    os.close(fd)


def _bind_inside(root: NewRoot, source: str, target: str, attributes: int) -> None:
    """Bind a path of the new root onto another one of it."""
    fd = root.open(source)
    tree = mounts.open_tree("", dir_fd=fd)
    os.close(fd)
    if attributes:
        mounts.mount_setattr(tree, attributes)
    root.attach(tree, target)


def _pin(root: NewRoot, path: str) -> None:
    """Make `path` a mount point of itself: it can be neither renamed nor removed."""
    _bind_inside(root, path, path, 0)


def _protect(root: NewRoot, path: str) -> None:
    """Make an existing path read-only, although the mount around it is writable."""
    _bind_inside(root, path, path, mounts.MOUNT_ATTR_RDONLY)


def _share(_root: NewRoot, path: str) -> None:
    """Propagate later mounts below `path` to the copies of our mounts; not the other way round."""
    mounts.mount("none", path[1:], "none", mounts.MS_SHARED)


def _hide(root: NewRoot, path: str, make: bool) -> None:
    """Put something at `path` that nobody may read or write; where nothing is, only if asked to."""
    if make:
        _hold_way(root, path)
    try:
        fd = root.open(path)
    except (FileNotFoundError, NotADirectoryError):
        if not make:
            return
        root.make_dir(path)
        fd = root.open(path)
    is_dir = stat.S_ISDIR(os.fstat(fd).st_mode)
    os.close(fd)
    cover = "denied.d" if is_dir else "denied"
    covers = root.open(root.covers, os.O_PATH | os.O_DIRECTORY)
    try:
        if is_dir:
            os.mkdir(cover, 0, dir_fd=covers)
        else:
            os.close(os.open(cover, _NEW_FILE, 0, dir_fd=covers))
    except FileExistsError:
        pass
    finally:
        os.close(covers)
    _bind_inside(root, f"{root.covers}/{cover}", path, mounts.MOUNT_ATTR_RDONLY)


def _hold_way(root: NewRoot, path: str) -> None:
    """Pin what those inside could rename on the way to `path`: made again, it would not be hidden."""
    above = ""
    for name in path.strip("/").split("/")[:-1]:
        here = f"{above}/{name}"
        root.make_dir(here)
        directory, entry = (_stat(root, each) for each in (above or "/", here))
        owner = root.shape["uid"]
        is_sticky = directory.st_mode & stat.S_ISVTX and entry.st_uid != owner
        if directory.st_uid == owner or (directory.st_mode & stat.S_IWOTH and not is_sticky):
            _pin(root, here)
        above = here


def _stat(root: NewRoot, path: str) -> os.stat_result:
    fd = root.open(path)
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)


def _mask(_root: NewRoot, path: str) -> None:
    """Hide a file of our own /proc behind /dev/null, a directory behind an empty read-only one."""
    try:
        is_dir = stat.S_ISDIR(os.lstat(path[1:]).st_mode)
    except FileNotFoundError:
        return
    if is_dir:
        mounts.mount("dev/empty", path[1:], "none", mounts.MS_BIND)
        flags = mounts.MS_NOSUID | mounts.MS_NODEV | mounts.MS_NOEXEC
        read_only = flags | mounts.MS_REMOUNT | mounts.MS_BIND | mounts.MS_RDONLY
        mounts.mount("none", path[1:], "none", read_only)
        return
    cover_with_null("dev/null", path[1:])


def cover_with_null(null: str, path: str) -> None:
    """Bind the null device over a file."""
    device = os.lstat(null)
    # A swapped /dev/null would turn the mask into a window (CVE-2025-31133).
    if not stat.S_ISCHR(device.st_mode) or device.st_rdev != os.makedev(1, 3):
        raise OSError(errno.EPERM, "/dev/null is not the null device")
    mounts.mount(null, path, "none", mounts.MS_BIND)


def boot_id() -> bytes:
    """A random UUID (RFC 9562, version 4) as random(4) shows one."""
    data = bytearray(os.urandom(16))
    data[6], data[8] = data[6] & 0x0F | 0x40, data[8] & 0x3F | 0x80
    text = data.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}\n".encode()


def _boot_id(root: NewRoot) -> None:
    """Cover the host's boot id: by it, sandboxes of one host could be told to be so."""
    _image_file(root, "/dev/boot_id", boot_id(), 0o444, replace=True)
    try:
        mounts.mount("dev/boot_id", BOOT_ID[1:], "none", mounts.MS_BIND)
    except FileNotFoundError:
        pass  # the host's own is masked
    os.unlink("dev/boot_id")  # a mount needs no name


def _proc(root: NewRoot) -> None:
    os.mkdir("proc", 0o555)
    mounts.move_mount(root.proc, "proc")
    os.close(root.proc)


def _devpts(_root: NewRoot) -> None:
    os.mkdir("dev/pts", 0o755)
    bound_terminals("dev/pts", TERMINALS)
    os.symlink("pts/ptmx", "dev/ptmx")


def bound_terminals(place: str, most: int, flags: int = 0) -> None:
    """Mount, or with MS_REMOUNT change, a devpts of the sandbox's own with at most so many terminals."""
    flags |= mounts.MS_NOSUID | mounts.MS_NOEXEC
    options = f"newinstance,ptmxmode=0666,mode=620,max={most}"
    mounts.mount("devpts", place, "devpts", flags, options)


_VERBS: dict[str, Callable[..., None]] = {
    "dir": _dir,
    "symlink": _symlink,
    "file": _file,
    "rewrite": _rewrite,
    "show": _show,
    "bind": _bind,
    "mount_point": _mount_point,
    "session_dir": _session_dir,
    "bind_inside": _bind_inside,
    "pin": _pin,
    "protect": _protect,
    "share": _share,
    "hide": _hide,
    "mask": _mask,
    "proc": _proc,
    "boot_id": _boot_id,
    "devpts": _devpts,
    "image_dir": _image_dir,
    "image_file": _image_file,
    "image_link": _image_link,
    "image_dev": _image_dev,
    "image_proc": _image_proc,
}
