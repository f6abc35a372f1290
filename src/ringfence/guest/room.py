"""A tmpfs with a size limit, for everything that a container's programs may write.

An engine stores a container's files on the host's disk, mostly without a limit.
"""

from __future__ import annotations

import errno
import os
import stat

from ..linux import mounts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypedDict

    class Room(TypedDict):
        """Writable layer to create; plain values, decided by the host."""

        size_bytes: int
        inodes: int
        places: list[str]  # directories: what is in them now is there again


_FLAGS = mounts.MS_NOSUID | mounts.MS_NODEV
_OWN_FILES = "/opt/ringfence/"  # of the template: small, and of nobody's image
_root = -1  # of it, where there is one


def make(room: Room, place: str) -> None:
    """Put it up.

    Args:
        place: A directory where it may be mounted for a moment.

    Raises:
        OSError: The kernel's answer; EOPNOTSUPP where a place has what cannot be there again.
    """
    global _root
    options = f"mode=0700,size={room['size_bytes']},nr_inodes={room['inodes']}"
    mounts.mount("ringfence", place, "tmpfs", _FLAGS, options)
    _root = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    points = _mount_points()
    for i, path in enumerate(room["places"]):
        if not os.path.isdir(path):
            continue
        own = f"{place}/{i}"
        _copy(path, own, points)
        inside = [each for each in points if each.startswith(path + "/")]
        outermost = [each for each in inside if not _has_above(each, inside)]
        shown = [(each, mounts.open_tree(each)) for each in outermost]
        mounts.mount(own, path, "none", mounts.MS_BIND)
        for each, tree in shown:
            mounts.move_mount(tree, each)
            os.close(tree)
    mounts.umount2(place, mounts.MNT_DETACH)


def usage() -> os.statvfs_result:
    """How much of it there is, and how much of that is left; of the root where there is none."""
    return os.statvfs("/" if _root < 0 else _root)


def _copy(path: str, target: str, points: set[str]) -> None:
    """A directory once more: with links and directories, and empty places for what is mounted."""
    os.mkdir(target)
    os.chmod(target, stat.S_IMODE(os.lstat(path).st_mode))
    for name in os.listdir(path):
        source, copy = f"{path}/{name}", f"{target}/{name}"
        mode = os.lstat(source).st_mode
        if stat.S_ISLNK(mode):
            os.symlink(os.readlink(source), copy)
        elif stat.S_ISDIR(mode) and source in points:
            os.mkdir(copy)
        elif stat.S_ISDIR(mode):
            _copy(source, copy, points)
        elif stat.S_ISREG(mode) and source in points:
            os.close(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
        elif stat.S_ISREG(mode) and source.startswith(_OWN_FILES):
            with open(source, "rb") as file, open(copy, "xb") as written:
                written.write(file.read())
                os.fchmod(written.fileno(), stat.S_IMODE(mode))
        else:
            raise OSError(errno.EOPNOTSUPP, "is no directory or link", source)


def _has_above(path: str, others: list[str]) -> bool:
    return any(path.startswith(each + "/") for each in others)


def _mount_points() -> set[str]:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        # As mountinfo writes them: a space is \040.
        found = [line.split()[4].encode("utf-8", "surrogateescape") for line in file]
    return {os.fsdecode(each.decode("unicode_escape").encode("latin-1")) for each in found}
