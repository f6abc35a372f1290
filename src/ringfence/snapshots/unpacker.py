"""Unpacks a snapshot's stream in a process that can do nothing else.

A guest has chosen the names, links and sizes in it. This process may write below the target and nowhere
else; it has no network, and as root no capabilities but those that give files their owners.

What a stream removes becomes a whiteout, as an overlay knows it: a character device 0, 0.
Source: Documentation/filesystems/overlayfs.rst, "whiteouts and opaque directories".
"""

from __future__ import annotations

import errno
import marshal
import os
import resource
import stat
import sys

from ..launcher.helpers import tars, trees
from ..launcher.helpers.layers import GONE, WHITEOUT
from ..model.files import DIRECTORY, FILE, OTHER, SYMLINK
from ..policy.confine import confine
from .layers import WHITEOUT_CTIME, pack_directory, walk

TYPE_CHECKING = False
if TYPE_CHECKING:
    import tarfile

    from ..fork.trees import Entry
    from .layers import Entries, Names

_MOST_DEEP = 256  # remove_tree and others call themselves for each
_CHOWN, _DAC_OVERRIDE, _FOWNER = 1 << 0, 1 << 1, 1 << 3  # capability.h


class _Layer:
    """Preparation of each member before it is unpacked.

    Args:
        owns: Owners are kept, as ids inside; else all is the caller's, who has one id inside.
        is_layer: The stream lies over another one, or an image, and `.wh.NAME` in it removes NAME.
    """

    def __init__(self, *, owns: bool, is_layer: bool) -> None:
        self._owns, self._is_layer = owns, is_layer
        self._ids = os.geteuid(), os.getegid()

    def prepare(self, member: tarfile.TarInfo, target: str) -> bool:
        """Make a whiteout; return whether there is anything to extract."""
        if member.name.count("/") > _MOST_DEEP:
            raise OSError(errno.ENAMETOOLONG, "too many directories in one another", member.name)
        directory, _, name = target.rpartition("/")
        if self._is_layer and name.startswith(WHITEOUT):
            gone = f"{directory}/{name.removeprefix(WHITEOUT)}"
            os.mknod(gone, stat.S_IFCHR, os.makedev(0, 0))
            return False
        if not self._owns:
            member.uid, member.gid = self._ids
        return True


def _look(root: str, digests: dict[int, bytes]) -> tuple[Names, Entries]:
    """Return the names and the entries below `root`.

    Args:
        digests: Of the content of each file, by inode.
    """
    names: Names = {}
    found: Entries = {}
    for path, fd, entries in walk(root):
        names[os.fsencode(path)] = {
            os.fsencode(name): WHITEOUT_CTIME if stat.S_ISCHR(info.st_mode) else info.st_ctime_ns
            for name, info in entries.items()
        }
        found[path] = pack_directory(
            {
                name: _entry(fd, name, info, digests.get(info.st_ino, b"-"))
                for name, info in entries.items()
            }
        )
    return names, found


def _entry(directory: int, name: str, info: os.stat_result, digest: bytes) -> Entry:
    mode = stat.S_IMODE(info.st_mode)
    if stat.S_ISREG(info.st_mode):
        return FILE, info.st_size, mode, digest
    if stat.S_ISDIR(info.st_mode):
        return DIRECTORY, 0, mode, b"-"
    if stat.S_ISLNK(info.st_mode):
        return SYMLINK, 0, 0, os.fsencode(os.readlink(name, dir_fd=directory))
    return (GONE, 0, 0, b"") if stat.S_ISCHR(info.st_mode) else (OTHER, 0, mode, b"-")


def main() -> None:
    """Unpack standard input below the directory argv[1]; write its names and entries to standard output.

    With a further argument the stream is a layer.
    """
    target, *layer = sys.argv[1:]
    owns = os.geteuid() == 0
    prepare = _Layer(owns=owns, is_layer=bool(layer)).prepare
    digests: dict[int, bytes] = {}
    tars.new_digest()  # imports what cannot be imported any more then
    _soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    confine(target, keep=_CHOWN | _DAC_OVERRIDE | _FOWNER if owns else 0, whiteouts=True)
    trees.unpack(0, target, one_file_system=True, prepare=prepare, digests=digests)
    os.chdir("/")
    found = [marshal.dumps(each) for each in _look(target, digests)]
    sys.stdout.buffer.write(marshal.dumps(found))
    sys.stdout.flush()
