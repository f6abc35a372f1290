"""The root of a sandbox, built in new namespaces by what becomes its PID 1."""

from __future__ import annotations

import _socket as socket
import _struct as struct
import errno
import fcntl
import posix as os

from ..linux import files, mounts, namespaces
from .newroot import NewRoot, bound_terminals, run_steps, step

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .plan import Plan, Shape, Tree

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1  # include/uapi/linux/sockios.h, if.h


def open_tree(tree: Tree, idmap_fd: int) -> int:
    """A detached, restricted copy of a host path, checked to be what the host process resolved."""
    if not tree["inode"]:  # of the template: a path that only the host's administrator can change
        fd = mounts.open_tree(tree["source"])
        mounts.mount_setattr(fd, tree["attributes"])
        return fd
    # The path was resolved once, by descriptor; here it must name the very same inode again.
    pinned = files.openat2(-100, tree["source"], os.O_PATH, resolve=files.RESOLVE_NO_SYMLINKS)
    try:
        found = os.fstat(pinned)
        if (found.st_dev, found.st_ino) != (tree["device"], tree["inode"]):
            raise OSError(
                errno.ESTALE,
                "the mount source was replaced while the sandbox was being made",
                tree["source"],
            )
        fd = mounts.open_tree("", dir_fd=pinned)
    finally:
        os.close(pinned)
    try:
        restrict_tree(fd, tree, idmap_fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def restrict_tree(fd: int, tree: Tree, idmap_fd: int) -> None:
    """Make a detached tree private to the sandbox: read-only, nosuid, nodev, ids mapped, as planned."""
    mounts.mount_setattr(fd, tree["attributes"])
    if idmap_fd >= 0:
        mounts.mount_setattr(fd, mounts.MOUNT_ATTR_IDMAP, userns_fd=idmap_fd, recursive=False)


def open_trees(wanted: list[Tree]) -> list[int]:
    """Open them in our own mount namespace: an ordinary user may copy mounts only there."""
    return [step(f"open {tree['source']}", open_tree, tree, -1) for tree in wanted]


def build_root(
    shape: Shape, steps: list[tuple[Any, ...]], trees: list[int], layers: list[int], disk: int = -1
) -> int:
    """Build the root, move into it and leave the host's behind; returns the oom_score_adj descriptor.

    Args:
        layers: Trees below the writable layer, the uppermost first; none: the steps make it all.
        disk: A detached mount to write to; -1: a tmpfs.

    Raises:
        BuildError: naming the step that failed.
    """
    scratch = shape["scratch"]
    oom_score_fd: int
    oom_score_fd, proc = step("proc", _mount_proc, scratch, shape)
    if disk >= 0:
        step("disk as root", mounts.move_mount, disk, scratch)
        os.close(disk)
    else:
        options = f"mode=0755,size={shape['root_size_bytes']},nr_inodes={shape['root_inodes']}"
        flags = mounts.MS_NOSUID | mounts.MS_NODEV
        step("tmpfs as root", mounts.mount, "ringfence", scratch, "tmpfs", flags, options)
    os.chdir(scratch)
    os.umask(0)
    dev = -1
    if layers:
        dev = step("layers of the root", enter_layers, layers)
    else:
        if shape["disk"] and shape["disk"]["source"]:
            step("overlay as root", enter_directory)
        _run_here(shape, steps, trees, proc, dev)
    step("pivot_root", mounts.pivot_root, ".", ".")
    step("leave the host's root", mounts.umount2, ".", mounts.MNT_DETACH)
    os.chdir("/")
    if layers:
        # Only now: a link in them may lead to "/", which from here on is its own.
        _run_here(shape, steps, trees, proc, dev)
    os.umask(0o022)
    return oom_score_fd


def _run_here(
    shape: Shape, steps: list[tuple[Any, ...]], trees: list[int], proc: int, dev: int
) -> None:
    root_fd = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    run_steps(NewRoot(root_fd, shape, trees, proc, dev), steps)
    os.close(root_fd)
    if shape["shared_memory_bytes"]:
        # In a /dev that the steps have made: a plain path is safe.
        flags, options = mounts.MS_NOSUID | mounts.MS_NODEV, f"mode=1777,{_of_shared_memory(shape)}"
        step("shared memory", mounts.mount, "ringfence", "dev/shm", "tmpfs", flags, options)


def _of_shared_memory(shape: Shape) -> str:
    return f"size={shape['shared_memory_bytes']},nr_inodes={shape['root_inodes']}"


def enter_layers(layers: list[int]) -> int:
    """Put the private tmpfs over the trees, and go there; returns a tree for its /dev."""
    for name in ("dev", "root"):
        os.mkdir(name, 0o755)
    dev = mounts.open_tree("dev", recursive=False)  # of the same tmpfs: one size bounds both
    overlay(layers, "root")
    return dev


def enter_directory() -> None:
    """Go to an overlay of a directory of the host's: its files shall have a device of their own.

    By the device of a file PID 1 and snapshots tell the sandbox's files from mounted ones.
    """
    for name in ("root", "layer0"):
        os.mkdir(name, 0o755)
    _mount_overlay(["layer0"], "root")


def overlay(layers: list[int], target: str) -> None:
    """Mount trees, the uppermost first, at `target` below the tmpfs that is the current directory; go there.

    They are read-only and shared by all their sandboxes; what is written goes to the tmpfs, whose
    size bounds it. Source: Documentation/filesystems/overlayfs.rst.
    """
    names = [f"layer{number}" for number in range(len(layers))]
    for name in names:
        os.mkdir(name, 0o755)
    for name, layer in zip(names, layers, strict=True):
        mounts.move_mount(layer, name)
        os.close(layer)
    _mount_overlay(names, target)


def _mount_overlay(names: list[str], target: str) -> None:
    for name in ("upper", "work"):
        os.mkdir(name, 0o755)
    # Without userxattr an overlay of a user namespace could not say that a directory is opaque.
    options = f"lowerdir={':'.join(names)},upperdir=upper,workdir=work,userxattr"
    mounts.mount("ringfence", target, "overlay", mounts.MS_NOSUID | mounts.MS_NODEV, options)
    os.chdir(target)


def _mount_proc(scratch: str, shape: Shape) -> tuple[int, int]:
    """Mount our own /proc, do the writes that need it writable, and copy it for the new root, read-only.

    PID 1 marks what it starts as the first to go when memory runs out: it keeps a descriptor that was
    opened here for writing. This mount goes with the host's root around it; detached on its own,
    it would cost another wait for every processor.
    """
    limits: dict[str, bool] = {
        "forbid_user_namespaces": shape["forbid_user_namespaces"],
        "counts_apart": shape["trusted_root"],
    }
    flags = mounts.MS_NOSUID | mounts.MS_NODEV | mounts.MS_NOEXEC
    try:
        mounts.mount("proc", scratch, "proc", flags)
    except OSError as exc:
        if exc.errno != errno.EPERM or not shape["borrows_proc"]:
            raise
        return _borrow_proc(limits)
    bound_user_namespace(scratch, **limits)
    oom_score_fd = os.open(f"{scratch}/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    proc = mounts.open_tree(scratch, recursive=False)
    mounts.mount_setattr(proc, mounts.MOUNT_ATTR_RDONLY)
    return oom_score_fd, proc


def _borrow_proc(limits: dict[str, bool]) -> tuple[int, int]:
    """Copy the caller's /proc with what masks it, read-only, for a kernel that mounts no new one.

    Linux refuses a new /proc while parts of the only visible one are covered, as containers' engines
    do. Source: fs/namespace.c, mnt_already_visible. Its numbers are those of the caller's PID namespace,
    and "self" is whoever asks. The caller's processes are in a user namespace above: the kernel refuses
    whatever takes the right to trace them (environ, mem, maps, fd, root, cwd).
    """
    try:
        bound_user_namespace("/proc", **limits)
    except OSError as exc:
        if exc.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise  # else the engine shows /proc/sys read-only, and the filter alone forbids them
    oom_score_fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    # The masks come along: the kernel copies no tree without the locked mounts in it.
    proc = mounts.open_tree("/proc")
    # Nor is a device in it one: what the null device masks there cannot be opened at all.
    flags = mounts.MOUNT_ATTR_NOSUID | mounts.MOUNT_ATTR_NODEV | mounts.MOUNT_ATTR_NOEXEC
    mounts.mount_setattr(proc, mounts.MOUNT_ATTR_RDONLY | flags)
    return oom_score_fd, proc


def bound_user_namespace(
    proc: str, *, forbid_user_namespaces: bool, counts_apart: bool = False
) -> None:
    """Limit the resources of our whole user namespace, through the /proc mounted at `proc`.

    Args:
        counts_apart: An id of this sandbox alone owns the namespace; else its use counts against the
            caller's own on the host, by default 128 instances in all.
    """
    if forbid_user_namespaces:
        # A nested user namespace would undo every bind; the seccomp filter says no as well.
        _sysctl(f"{proc}/sys/user/max_user_namespaces", b"0")
    # The kernel counts for the owner of the user namespace too: one sandbox must not use up its
    # quota.
    instances, watches = (b"32", b"16384") if counts_apart else (b"8", b"8192")
    for name, most in (("instances", instances), ("watches", watches)):
        _sysctl(f"{proc}/sys/user/max_inotify_{name}", most)


def complete_root(plan: Plan, shape: Shape, trees: list[int]) -> None:
    """Give a root that was built for its shape what the plan adds: its size, and its own mounts.

    Raises:
        BuildError: naming the step that failed.
    """
    size, built = (
        f"size={each['root_size_bytes']},nr_inodes={each['root_inodes']}" for each in (plan, shape)
    )
    if size != built and not shape["disk"]:
        flags = mounts.MS_REMOUNT | mounts.MS_NOSUID | mounts.MS_NODEV
        # Over layers "/" is the overlay; what is written there and /dev are one tmpfs.
        place = "/dev" if shape["layers"] else "/"
        step("size of the root", mounts.mount, "ringfence", place, "tmpfs", flags, size)
    if shape["shared_memory_bytes"] and (size := _of_shared_memory(plan)) != _of_shared_memory(
        shape
    ):
        flags = mounts.MS_REMOUNT | mounts.MS_NOSUID | mounts.MS_NODEV
        step("size of /dev/shm", mounts.mount, "ringfence", "/dev/shm", "tmpfs", flags, size)
    if plan["terminals"]:
        most = plan["terminals"], mounts.MS_REMOUNT
        step("number of terminals", bound_terminals, "/dev/pts", *most)
    if plan["steps"]:
        root_fd = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        os.umask(0)
        run_steps(NewRoot(root_fd, plan, trees), plan["steps"])
        os.umask(0o022)
        os.close(root_fd)


def _sysctl(path: str, value: bytes) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # a kernel without the facility has nothing to limit
    os.write(fd, value)
    os.close(fd)


def make_mounts_private() -> None:
    """Stop mount propagation: later mounts here stay invisible elsewhere."""
    flags = mounts.MS_REC | mounts.MS_PRIVATE
    step("make mounts private", mounts.mount, "none", "/", "none", flags)


def leave_host_network(flags: int) -> None:
    """In a network namespace of our own, bring `lo` up; there is no other interface."""
    if flags & namespaces.CLONE_NEWNET:
        step("bring lo up", _loopback)


def _loopback() -> None:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    answer = fcntl.ioctl(sock.fileno(), _SIOCGIFFLAGS, struct.pack("16sh14x", b"lo", 0))
    flags = struct.unpack("16sh14x", answer)[1]
    fcntl.ioctl(sock.fileno(), _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))
    sock.close()


def point_standard_at_null() -> None:
    """Point 0, 1 and 2 at the sandbox's own /dev/null."""
    null = os.open("/dev/null", os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    if null > 2:
        os.close(null)


def pack(keep: list[int]) -> list[int]:
    """Renumber the descriptors to keep from 3 on, and close every other one."""
    # All copies lie above where the last one goes, so none is overwritten before its turn.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3 + len(keep)) for fd in keep]
    low = [os.dup2(fd, 3 + i, inheritable=False) for i, fd in enumerate(high)]
    files.close_from(3 + len(keep))
    return low
