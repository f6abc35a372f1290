"""Protected paths: read-only inside a writable mount, also where they do not exist yet.

An absent path is given a placeholder, an empty directory on the host (for two files of git, a file
that says nothing new), because the kernel can protect only what exists; every directory on the way
is pinned by a mount of itself, because a directory that merely contains a mount point can still be
renamed. Placeholders are removed when the last sandbox that needs them ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time

from ....errors import InvalidRequest
from ....launcher import placeholders
from ....linux import files
from ....model.mount import READ_WRITE
from ....policy.protected import NESTED, OWN, wanted
from ..session import is_below

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ....launcher.plan import Tree
    from ....model.mount import Mount
    from ....model.session import ResolvedMount
    from ....model.spec import SandboxSpec

_ARGUMENTS: dict[str, tuple[bool, ...]] = {"protect": (), "pin": (), "hide": (False,)}
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PATIENCE_S, _PAUSE_S = 2.0, 0.002  # for other sandboxes on the same directory
_OPEN_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class _Below:
    """Directories below a source, each opened once, one name at a time, never through a symlink."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._opened: dict[tuple[str, ...], int] = {}

    def open(self, names: Sequence[str]) -> int:
        """A descriptor that lasts until `close`."""
        key = tuple(names)
        if key not in self._opened:
            if key:
                fd = os.open(key[-1], _OPEN_DIR, dir_fd=self.open(key[:-1]))
            else:
                fd = os.open(self.source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._opened[key] = fd
        return self._opened[key]

    def path(self, names: Sequence[str]) -> str:
        return "/".join([self.source, *names])

    def close(self) -> None:
        for fd in self._opened.values():
            os.close(fd)
        self._opened.clear()


_DIGEST_LETTERS = 64  # of SHA-256


class Protected:
    """Protection of one mount.

    Attributes:
        placeholders: (directory, name, device, inode) of each placeholder made, outermost first.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[Any, ...]] = []
        self.placeholders: list[tuple[str, str, int, int]] = []
        self.locks: list[int] = []  # descriptors that keep others from removing what we need

    def remove_placeholders(self) -> None:
        """Remove those that are still what we made and that no other sandbox needs."""
        for fd in self.locks:
            # Closing would not do: the holder, or a child before its exec, may have a copy a little longer.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)
        self.locks.clear()
        placeholders.remove(self.placeholders)
        self.placeholders.clear()


def prepare_mount_point(
    target: str, source: str, mounts: Sequence[ResolvedMount]
) -> tuple[Protected, str] | None:
    """In a writable mount of the host's, an absent directory to mount on lives as long as the sandbox.

    Args:
        target, source: Of what is to be mounted.
        mounts: Those there are, outermost first.

    Returns:
        What was made, and the target of the mount that it is in; None where nothing has to be.
    """
    around = [m for m in mounts if is_below(target, m.target) and target != m.target]
    outer = max(around, key=lambda m: m.target.count("/"), default=None)
    if outer is None or not outer.host_path or outer.access != READ_WRITE:
        return None
    inner = target[len(outer.target) + 1 :]
    if not os.path.isdir(source) or os.path.lexists(os.path.join(outer.host_path, inner)):
        return None
    return prepare(outer.target, outer.host_path, inner, "pin"), outer.target


def protect_mount(mount: Mount, spec: SandboxSpec, tree: Tree) -> Protected:
    """Decide and prepare the protection of one writable mount.

    Raises:
        InvalidRequest: A named path cannot be protected: a symlink is on the way.
    """
    if not os.path.isdir(tree["source"]):
        return Protected()
    paths = wanted(mount, spec, tree["source"])
    return _patiently(mount.target, tree["source"], paths, "protect")


def hold_template(source: str) -> Protected | None:
    """Lock the files of a template that are mounted, so that they stay as long as the sandbox does.

    The fd store keeps the lock when a server stops, which sandboxes outlive: see `images.store`.

    Args:
        source: Directory of the host; None is returned where it is in no template.
    """
    store, _, inside = source.partition("/roots/")
    name = inside.partition("/")[0]
    if len(name) != _DIGEST_LETTERS or name.strip("0123456789abcdef"):
        return None
    held = Protected()
    try:
        # Nothing waits here: a file of that name may be a guest's.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        held.locks.append(os.open(f"{store}/roots/{name}/image", flags))
        fcntl.flock(held.locks[0], fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        pass  # without the lock, only a removal meanwhile would be noticed
    return held


def prepare(target: str, source: str, path: str, verb: str) -> Protected:
    """Decide and prepare one step, `verb`, for a path below host directory `source`, shown at `target`.

    Raises:
        InvalidRequest: A symlink is on the way, or its stand-in cannot be made.
    """
    return _patiently(target, source, [(path, True)], verb)


def _patiently(target: str, source: str, paths: list[tuple[str, bool]], verb: str) -> Protected:
    give_up = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return _protect_all(target, source, paths, verb)
        except InvalidRequest as exc:
            # Another sandbox on this directory is just starting or ending.
            if not exc.retryable or time.monotonic() > give_up:
                raise
        time.sleep(_PAUSE_S)


def _protect_all(target: str, source: str, paths: list[tuple[str, bool]], verb: str) -> Protected:
    result = Protected()
    pinned: set[str] = set()
    below = _Below(source)
    try:
        for path, named in paths:
            try:
                _protect_one(result, target, below, path, named, pinned, verb)
            except (FileNotFoundError, FileExistsError) as exc:
                raise _changing(path) from exc
            except PermissionError as exc:
                raise _hidden(source, path) from exc
    except BaseException:
        result.remove_placeholders()
        raise
    finally:
        below.close()
    return result


def _changing(path: str) -> InvalidRequest:
    return InvalidRequest(
        f"{path}: another process is using it",
        field="protect",
        hint="try again: another sandbox of this directory may be ending",
        retryable=True,
    )


def _hidden(source: str, path: str) -> InvalidRequest:
    # Whoever owns a directory may open it again, from inside too: what is in it has to be protected.
    return InvalidRequest(
        f"{source}: this user may not look whether {path} is there, to protect it: Permission denied",
        field="mounts.source",
        hint=f"let this user read {source} and its {path.split('/')[0]}, mount it read-only, or "
        "--unprotect all",
    )


def _protect_one(
    result: Protected,
    target: str,
    below: _Below,
    path: str,
    named: bool,
    pinned: set[str],
    verb: str,
) -> None:
    names = path.split("/")
    for depth in range(1, len(names) + 1):
        done = "/".join(names[:depth])
        if done in pinned:
            continue
        last = depth == len(names)
        kind = _kind(below, names[:depth])
        if kind == "symlink":
            _refuse_symlink(done, path, named)
        if kind == "absent":
            if last and not named and names[-1] in placeholders.STATES:
                # A stand-in would tell git that there is something to go on with.
                result.placeholders.append((below.path(names[:-1]), names[-1], 0, 0))
                return
            if names[-1] == "config" and not named:
                return  # an empty stand-in would break `git init`
            if not named and path not in OWN and not _may_write(below, names[: depth - 1]):
                return  # nor can the sandbox
            kind = _make_placeholder(result, below, names[:depth])
        _keep(result, below, names[:depth], path)
        inside = f"{target}/{done}"
        if last or kind != "directory":
            # `.git` may be a file that points elsewhere: then that file is what to protect.
            result.steps.append((verb, inside, *_ARGUMENTS[verb]))
            return
        pinned.add(done)
        result.steps.append(("pin", inside))


def _refuse_symlink(done: str, path: str, named: bool) -> None:
    raise InvalidRequest(
        f"{path}: {done} is a symbolic link, which cannot be made read-only",
        field="protect",
        hint="name the link's target instead"
        if named
        else f"--unprotect {path if path in OWN else NESTED} leaves it writable",
    )


def _kind(below: _Below, names: list[str]) -> str:
    try:
        mode = os.stat(names[-1], dir_fd=below.open(names[:-1]), follow_symlinks=False).st_mode
    except FileNotFoundError:
        return "absent"
    if stat.S_ISLNK(mode):
        return "symlink"
    return "directory" if stat.S_ISDIR(mode) else "file"


def _may_write(below: _Below, names: list[str]) -> bool:
    return os.access(f"/proc/self/fd/{below.open(names)}", os.W_OK)


def _make_placeholder(result: Protected, below: _Below, names: list[str]) -> str:
    parent = below.open(names[:-1])
    kind = "file" if _is_read_inside(parent, names[-1]) else "directory"
    try:
        if kind == "file":
            _make_file(parent, names[-1])
        else:
            os.mkdir(names[-1], placeholders.MARK | 0o755, dir_fd=parent)
        made = os.stat(names[-1], dir_fd=parent, follow_symlinks=False)
        mode = made.st_mode | (0o600 if kind == "file" else 0o700)
        if mode != made.st_mode:
            # It was made under a strange umask: we could not look at it ourselves.
            files.chmod_nofollow(parent, names[-1], stat.S_IMODE(mode))
        directory = below.path(names[:-1])
        result.placeholders.append((directory, names[-1], made.st_dev, made.st_ino))
        if os.geteuid() == 0:
            owner = os.fstat(parent)
            os.chown(names[-1], owner.st_uid, owner.st_gid, dir_fd=parent, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError as exc:
        # A directory that is there and takes nothing new, as /proc, is not one that somebody removed.
        if exc.errno == errno.ENOENT and not os.fstat(parent).st_nlink:
            raise
        raise _no_stand_in(below.source, names, exc.errno or errno.EIO) from exc
    return kind


def _is_read_inside(parent: int, name: str) -> bool:
    """Return whether a directory in its place would break a reader: Yarn, where Yarn is in use.

    Elsewhere the placeholder is no file, since git would report it as a change.
    """
    if name == ".yarnrc.yml":
        return os.access("yarn.lock", os.F_OK, dir_fd=parent, follow_symlinks=False)
    return name in placeholders.FILES


def _no_stand_in(source: str, names: list[str], number: int) -> InvalidRequest:
    why = os.strerror(number)
    hint = "make the mount's source writable for you, or mount it read-only"
    if number == errno.ENOENT:
        why, hint = f"no directory can be made in {source}", "mount it read-only"
    return InvalidRequest(
        f"{'/'.join(names)}: {why}: the stand-in for an absent protected path could not be made",
        field="protect",
        hint=hint,
    )


def _keep(result: Protected, below: _Below, names: list[str], path: str) -> None:
    """Hold what is a placeholder, ours or another sandbox's, and share its removal.

    Raises:
        InvalidRequest: Somebody, a sandbox perhaps, does not let go of it.
    """
    parent = below.open(names[:-1])
    fd = -1
    try:
        fd = os.open(names[-1], _OPEN, dir_fd=parent)
        if not placeholders.is_one(fd, names[-1]):
            return
        if not _lock(fd) or not _is_still(fd, parent, names[-1]):
            raise _changing(path)
        info = os.fstat(fd)
        made = (below.path(names[:-1]), names[-1], info.st_dev, info.st_ino)
        if made not in result.placeholders:
            result.placeholders.append(made)
        result.locks.append(fd)
        fd = -1
    except PermissionError:
        return  # not ours to read, nor ours to remove
    finally:
        if fd >= 0:
            os.close(fd)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still(fd: int, parent: int, name: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(name, dir_fd=parent, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _make_file(parent: int, name: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(name, flags, 0o644, dir_fd=parent)
    try:
        os.write(fd, placeholders.FILES[name])
    except BaseException:
        os.unlink(name, dir_fd=parent)
        raise
    finally:
        os.close(fd)
