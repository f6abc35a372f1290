"""Writable layers on disk: a file system in an image of exact size, or a directory whose size is sampled."""

from __future__ import annotations

import errno
import os
from _thread import start_new_thread

from ....errors import InvalidRequest, StorageFull, Unsupported
from ....linux import mounts
from .. import journal
from ..host import identity
from ..host.facts import host
from ..host.mountinfo import kind_at
from ..host.own_places import remove_tree
from ..session import is_below
from . import sampler
from .template import tree
from .writers import Writers

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from typing import Protocol

    from ....launcher.plan import Tree
    from ....model.spec import SandboxSpec
    from ..sizes import Sizes
    from .writers import Owner

    class Watched(Owner, Protocol):
        """The sandbox whose files are in a directory."""

        def end_because(self, why: str) -> None: ...


_FLAGS = mounts.MOUNT_ATTR_NOSUID | mounts.MOUNT_ATTR_NODEV
_BLOCK, _INODE = 4096, 256
_BLOCKS_EACH_GROUP, _INODES_EACH_GROUP = 8 * _BLOCK, _BLOCK // _INODE
_PATH = "/usr/sbin:/sbin:/usr/bin:/bin"
_LEAST_BYTES = 1 << 20
# No journal: the image has no name, so a crash of the host ends it anyhow.
_FEATURES = (
    "none,extent,filetype,dir_index,sparse_super,large_file,huge_file,uninit_bg,dir_nlink,"
    "extra_isize,flex_bg,64bit"
)
_KEEP_FREE_BYTES = 1 << 30  # of the host's file system, at most a twentieth of it
_EVERY_S = 0.5
_IN_MEMORY = ("tmpfs", "ramfs", "rootfs")


class Disk:
    """The writable layer of one sandbox.

    Attributes:
        tree: As the launcher gets it: a directory to open, or nothing but a descriptor.
        fd: A detached mount for the launcher, until `close`; -1 where it opens the directory itself.
        path: The directory that is removed at the end; empty for an image, which has no name.
        why: Why its size is sampled; empty for an image.
        used: Bytes and files at the last look at a directory.
    """

    def __init__(self, tree: Tree, fd: int, path: str = "", why: str = "") -> None:
        self.tree, self.fd, self.path, self.why = tree, fd, path, why
        self.used = 0, 0
        self.sampler: subprocess.Popen[bytes] | None = None
        self.removed = False

    def close(self) -> None:
        """Close our descriptor of the mount; a sandbox has its own."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def remove(self) -> None:
        """Remove the files. Precondition: the sandbox has ended, or was never made."""
        self.close()
        self.removed = True
        if self.sampler is not None:
            self.sampler.kill()
        if self.path:
            remove_tree(self.path)


def place() -> str:
    """The directory for writable layers.

    Raises:
        Unsupported: It is in memory.
        IsolationError: None can be made.
    """
    base = journal.disk_directory()
    if (kind := kind_at(os.path.realpath(base))) in _IN_MEMORY:
        raise Unsupported(
            f"no disk for the writable layer: {base} is a {kind}, in memory",
            operation="disk_root",
            field="disk_root",
            hint=f"set {journal.DISKS} to a directory on a disk",
        )
    return base


def make(sandbox_id: str, label: str, sizes: Sizes, first_host_id: int, spec: SandboxSpec) -> Disk:
    """Make an empty writable layer, owned by the first user inside.

    Args:
        label: See `journal.path_of`.
        first_host_id: 0 where there is one user inside.

    Raises:
        StorageFull: The host's disk has no room for it.
        Unsupported: There is no disk to put it on.
    """
    top = place()
    _check_mounts(spec, top)
    # Root inside builds the layer; where ids are mapped it has one of its own.
    root = identity.host_id(first_host_id, 0) if first_host_id else os.geteuid()
    why = _why_no_image()
    try:
        if not why:
            return _image(top, sizes, root)
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise _no_room(top, sizes.disk_bytes) from exc
        why = f"no image can be mounted here: {exc.strerror}"
    if first_host_id and not host().trusted_root:
        raise Unsupported(
            "this user could not remove the files of other users inside",
            operation=f"disk_root with profile {spec.profile}",
            field="disk_root",
            hint="run Ringfence as root, or use another profile",
        )
    return _directory(top, journal.disk_of(sandbox_id, label), sizes, root, why)


def image_for(
    backend: str, sandbox_id: str, sizes: Sizes, first_host_id: int, spec: SandboxSpec
) -> Disk | None:
    """`make`, for a backend that serves files from an image only; None: in memory, which will do.

    Raises:
        Unsupported: It was asked for by name, and no image can be mounted.
    """
    why = _why_no_image()
    if not why:
        made = make(sandbox_id, "", sizes, first_host_id, spec)
        if not made.path:
            return made
        why = made.why
        made.remove()
    if not spec.disk_root:
        return None
    raise Unsupported(
        f"{backend} keeps files on disk in an image only: {why}",
        backend=backend,
        operation="disk_root",
        field="disk_root",
        hint="run Ringfence as root with loop devices and mke2fs, or use the native backend",
    )


def _check_mounts(spec: SandboxSpec, top: str) -> None:
    """Refuse to show a sandbox the directory that the files of all are in."""
    real = os.path.realpath(top)
    for mount in spec.mounts:
        if mount.is_host_path and is_below(real, os.path.realpath(mount.source)):
            raise InvalidRequest(
                f"{mount.source} contains {top}, where writable layers on disk are",
                field="mounts",
                hint=f"mount a directory below it, or set {journal.DISKS} to another place",
            )


def _why_no_image() -> str:
    if not host().trusted_root:
        return "an ordinary user may not mount an image"
    return "" if _mke2fs() else "mke2fs of e2fsprogs is not installed"


def _mke2fs() -> str:
    import shutil

    return shutil.which("mke2fs", path=_PATH) or ""


def _no_room(top: str, wanted: int) -> StorageFull:
    return StorageFull(
        f"no room for a writable layer of {wanted >> 20} MiB in {top}",
        hint=f"free space there, lower limits.disk_bytes, or set {journal.DISKS}",
    )


def _free(top: str) -> int:
    """Bytes that may still be taken there; a part stays for the host's own programs."""
    info = os.statvfs(top)
    return info.f_bavail * info.f_frsize - min(
        _KEEP_FREE_BYTES, info.f_blocks * info.f_frsize // 20
    )


def _image(top: str, sizes: Sizes, root: int) -> Disk:
    """An ext4 file system in a file without a name: gone with its mount, whoever is killed."""
    from . import loops

    size, inodes = _dimensions(sizes)
    if size > _free(top):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), top)
    file = os.open(top, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        # All of it now: a host whose disk is full later cannot make a write inside fail.
        os.posix_fallocate(file, 0, size)
        _format(file, inodes, root)
        device, path = loops.attach(file)
    finally:
        os.close(file)
    try:
        settings = {"source": path, "noinit_itable": "", "nodiscard": "", "errors": "remount-ro"}
        fd = mounts.new_mount("ext4", settings, _FLAGS)
    finally:
        os.close(device)
    os.rmdir("lost+found", dir_fd=fd)
    return Disk(_tree("", 0, 0), fd)


def _dimensions(sizes: Sizes) -> tuple[int, int]:
    """Bytes and inodes of an image that holds as many bytes of files, and no more inodes, than that.

    mke2fs rounds inodes up to a whole block in each group.
    """
    groups = max(1, -(-sizes.disk_bytes // (_BLOCKS_EACH_GROUP * _BLOCK)))
    inodes = max(1, sizes.inodes // (groups * _INODES_EACH_GROUP)) * groups * _INODES_EACH_GROUP
    size = sizes.disk_bytes // _BLOCK * _BLOCK + inodes * _INODE
    return max(_LEAST_BYTES, size), inodes


def _format(file: int, inodes: int, root: int) -> None:
    import subprocess

    command = [_mke2fs(), "-q", "-F", "-t", "ext4", "-b", str(_BLOCK), "-I", str(_INODE)]
    command += ["-m", "0", "-N", str(inodes), "-O", _FEATURES]
    command += ["-E", f"root_owner={root}:{root},lazy_itable_init=1,nodiscard"]
    made = subprocess.run(
        [*command, f"/proc/self/fd/{file}"],
        pass_fds=[file],
        env={"MKE2FS_CONFIG": "/dev/null", "PATH": _PATH},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if made.returncode:
        said = made.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise OSError(errno.EIO, f"mke2fs: {said[0]}")


def _directory(top: str, path: str, sizes: Sizes, root: int, why: str) -> Disk:
    if sizes.disk_bytes > _free(top):
        raise _no_room(top, sizes.disk_bytes)
    os.mkdir(path, 0o700)  # a program in it may have set-id bits
    files = f"{path}/files"
    try:
        os.mkdir(files, 0o755)
        os.chown(files, root, root)
        info = os.stat(files)
        fd = -1
        if host().trusted_root:
            fd = mounts.open_tree(files, recursive=False)
            mounts.mount_setattr(fd, _FLAGS)
        return Disk(_tree(files, info.st_dev, info.st_ino), fd, path, why)
    except BaseException:
        remove_tree(path)
        raise


def again(sandbox_id: str, label: str) -> Disk:
    """Return the writable layer of a sandbox that an earlier process has made."""
    path = journal.disk_of(sandbox_id, label)
    if not os.path.isdir(path):
        return Disk(_tree("", 0, 0), -1)
    why = _why_no_image() or "no image could be mounted when it was made"
    return Disk(_tree(f"{path}/files", 0, 0), -1, path, why)


def _tree(source: str, device: int, inode: int) -> Tree:
    return {**tree(source, _FLAGS), "device": device, "inode": inode}


# -- sizes that are sampled ------------------------------------------------------------------------


def watch(disk: Disk, sizes: Sizes, sandbox: Watched) -> None:
    """Sample a directory, in a process of its own. What writes when it is over its size is ended."""
    import subprocess
    import sys

    command = [sys.executable, "-I", "-S", sampler.__file__, f"{disk.path}/files", str(_EVERY_S)]
    try:
        disk.sampler = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError as exc:
        sandbox.end_because(f"the size of its files cannot be sampled: {exc.strerror}")
        return
    start_new_thread(_look, (disk, sizes, sandbox))


def _look(disk: Disk, sizes: Sizes, sandbox: Watched) -> None:
    process = disk.sampler
    assert process is not None
    assert process.stdout is not None
    why, writers = "", Writers(sandbox)
    for line in process.stdout:
        size, count = map(int, line.split())
        before, disk.used = disk.used, (size, count)
        try:
            is_full = _free(disk.path) < 0
        except OSError:
            break  # it has been removed
        over = _over(sizes, size, count)
        if is_full:
            why = "the disk of the host is nearly full"
        elif size > sizes.disk_bytes + max(sizes.disk_bytes, _KEEP_FREE_BYTES):
            why = over
        elif disk.used != before:
            found = writers.look()
            grows = size > before[0] or count > before[1]
            if over and not writers.relieve(found, over, grows=grows):
                why = over
        if why:
            break
    process.kill()
    process.wait()
    process.stdout.close()
    if not disk.removed:
        sandbox.end_because(why or "the program that samples the size of its files has ended")


def _over(sizes: Sizes, size: int, count: int) -> str:
    """Say what is over its limit; empty: nothing is."""
    if size > sizes.disk_bytes:
        return f"its files take {size} bytes, more than limits.disk_bytes, {sizes.disk_bytes}"
    if count > sizes.inodes:
        return f"it has {count} files, more than limits.inodes, {sizes.inodes}"
    return ""
