"""Changes of a sandbox to its image, as a layer: a tar stream in which `.wh.NAME` deletes NAME.

Files of the image are recognised by their ctime, which nobody can set: an overlay shows that of the
image's file until the first change copies it up. Device numbers do not tell: a copied file keeps
the image's.

Source: OCI image specification 1.1, "Whiteouts"; Documentation/filesystems/overlayfs.rst.
"""

from __future__ import annotations

import errno
import marshal
import os
import stat
import tarfile

from . import tars, trees

TYPE_CHECKING = False
if TYPE_CHECKING:
    Names = dict[bytes, dict[bytes, int]]  # directory to what the image has in it, and its ctime

WHITEOUT = ".wh."
GONE = "gone"
"""Kind of the entry of what a layer removes."""
_MOUNTS = "/proc/self/mountinfo"


def pack(
    stream: int,
    names: int,
    path: str,
    *,
    one_file_system: bool,
    mounted: set[str] | None = None,
    passes_over: bool = False,
) -> None:
    """Write to `stream` what differs from the image in the directory `path`, without symlinks on the way.

    Args:
        names: Descriptor of a marshalled `Names`, the host's.
        mounted: What is not the sandbox's own but shown in it; None: every mount point there is.
        passes_over: Leave out directories whose ctime is known. An overlay copies all directories above a
            file up before it copies the file; a kernel above it, such as gVisor's, may show older ctimes.
    """
    del one_file_system
    places = find_mounted() if mounted is None else mounted
    with open(names, "rb", closefd=False) as file:
        known: Names = marshal.load(file)
    with tars.Writer(stream) as tar:
        device = os.lstat(path).st_dev
        packer = _LayerPacker(tar, device, known, places, passes_over=passes_over)
        packer.go_above(path)
        trees.pack_whole(packer, path)


def find_mounted(fd: int = -1) -> set[str]:
    """Where something is mounted: proc_pid_mountinfo(5).

    Args:
        fd: Of our own directory in /proc, where the one that is in sight is another's.
    """
    place = os.open(
        "mountinfo" if fd >= 0 else _MOUNTS, os.O_RDONLY, dir_fd=fd if fd >= 0 else None
    )
    with open(place, encoding="utf-8", errors="surrogateescape") as file:
        points = {line.split(" ")[4] for line in file}
    for escaped, plain in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        points = {point.replace(escaped, plain) for point in points}
    return points - {"/"}


class _LayerPacker(trees.Packer):
    def __init__(
        self, tar: tars.Writer, device: int, names: Names, mounted: set[str], *, passes_over: bool
    ) -> None:
        super().__init__(tar, device, None)
        self._in_image, self._mounted, self._passes_over = names, mounted, passes_over

    def add(self, path: str, name: str) -> None:
        try:
            info = self._stat(path)
        except FileNotFoundError:
            return
        if path in trees._NOT_SAVED or path in self._mounted:
            return
        here = os.fsencode(path)[1:]
        directory, _, last = here.rpartition(b"/")
        is_known = self._in_image.get(directory, {}).get(last) == info.st_ctime_ns
        is_directory = stat.S_ISDIR(info.st_mode)
        if is_known and (self._passes_over or not is_directory):
            return
        check_name(path)
        if not is_directory:
            self._add_one(path, name)
            return
        if not self._add_one(path, name):
            return
        entries = self._enter(path)
        for gone in sorted(self._in_image.get(here, {}).keys() - set(map(os.fsencode, entries))):
            self._tar.add(tarfile.TarInfo(f"{name}/{WHITEOUT}{os.fsdecode(gone)}"))
        for entry in self._differing(here, entries):
            self.add(os.path.join(path, entry), f"{name}/{entry}")
        self._leave()

    def _differing(self, here: bytes, entries: list[str]) -> list[str]:
        """Leave out what is known, at little cost: one changed file may be among very many."""
        known, place = self._in_image.get(here), self._place
        if not known or place is None:
            return entries
        found = []
        for entry in entries:
            try:
                info = os.stat(entry, dir_fd=place.fd, follow_symlinks=False)
            except FileNotFoundError:
                continue
            is_known = known.get(os.fsencode(entry)) == info.st_ctime_ns
            if not is_known or not (self._passes_over or not stat.S_ISDIR(info.st_mode)):
                found.append(entry)
        return found

    def _device_of(self, info: os.stat_result) -> int:
        """`add` has looked already, and the files of an overlay are of several devices."""
        del info
        return self._device


def check_name(path: str) -> None:
    """Raises OSError for what could not be told from a whiteout."""
    if os.path.basename(path).startswith(WHITEOUT):
        raise OSError(errno.EINVAL, "a name that begins with .wh. cannot be saved", path)


def unpack(stream: int, path: str, *, one_file_system: bool) -> None:
    """Put a layer back over a fresh sandbox of the same image."""
    trees.unpack(stream, path, one_file_system=one_file_system, prepare=prepare)


def prepare(member: tarfile.TarInfo, target: str) -> bool:
    """Make way for a member; whether there is anything to extract."""
    directory, _, name = target.rpartition("/")
    is_whiteout = name.startswith(WHITEOUT)
    if is_whiteout:
        target = f"{directory}/{name.removeprefix(WHITEOUT)}"
    try:
        is_directory = stat.S_ISDIR(os.lstat(target).st_mode)
    except FileNotFoundError:
        return not is_whiteout
    if is_directory and (is_whiteout or not member.isdir()):
        trees.remove(target, one_file_system=True)
    elif is_whiteout or (member.isdir() and not is_directory):
        os.unlink(target)
    return not is_whiteout
