"""Helpers that enter the namespaces which the agent of a container made for itself.

Each is forked by `enter`, does one thing there and is gone. It is in none of the container's PID namespaces
and cgroups: no guest sees it, and it works while the container stands still. One id is mapped there, so it is
the container's user, with every right over what is that user's and none over what is not.
"""

from __future__ import annotations

import errno
import os
import tarfile

from ...linux import mounts
from .. import enter, newroot
from ..helpers import layers, tars, trees

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_COVERS = mounts.MS_NOSUID | mounts.MS_NODEV | mounts.MS_NOEXEC


def _furnish(request: dict[str, Any], fds: list[int]) -> None:
    """Mount what the user mounts: request has trees and steps, fds what pins the sources.

    What it has in `hidden` is done last, and covered by what lies in a file system of its own: `place` is
    where that may be mounted for a moment.
    """
    user_fd, mount_fd, *pins = fds
    if request["trusted_root"]:
        made = [enter.host_tree(tree, pins[tree["fd"]]) for tree in request["trees"]]
    else:
        made = enter.trees_of_own_namespace(request["trees"]) if request["trees"] else []
    enter.join(user_fd, mount_fd, request["uid"], request["uid"])
    root_fd = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    shape: Any = request
    os.chdir("/")
    os.umask(0o022)
    root = newroot.NewRoot(root_fd, shape, made)
    newroot.run_or_undo(root, request["steps"])
    if request["hidden"]:
        _hide(root, request["hidden"], request["place"])


def _hide(root: newroot.NewRoot, steps: list[tuple[Any, ...]], place: str) -> None:
    try:
        mounts.mount("ringfence", place, "tmpfs", _COVERS, "mode=0700,size=4k,nr_inodes=4")
    except OSError as exc:
        raise newroot.BuildError("hide", exc) from exc
    root.covers = place
    try:
        for step in steps:
            if not (step[0] == "hide" and step[2] and _is_out_of_reach(root, step[1])):
                newroot.run_steps(root, [step])
    finally:
        mounts.umount2(place, mounts.MNT_DETACH)


def _is_out_of_reach(root: newroot.NewRoot, path: str) -> bool:
    """Return whether `path` is absent, and no program inside can create it: they lack our rights too."""
    try:
        os.close(root.open(path))
    except FileNotFoundError:
        try:
            root.make_dir(path)
        except PermissionError:
            return True
    except OSError:
        pass  # the step that hides it reports a better error
    return False


def _save(request: dict[str, Any], fds: list[int]) -> None:
    """Stream what was changed: fds end with a pipe; request says what, as whoever keeps the files tells.

    `changed` and `gone` are paths; `own` are directories whose whole content is the sandbox's, but for what
    lies in `hosts`, or wherever else something is mounted.

    Precondition: the container stands still.
    """
    user_fd, mount_fd, out = fds
    ourselves = os.open("/proc/self", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    enter.join(user_fd, mount_fd, request["uid"], request["uid"])
    os.chdir("/")
    mounted = layers.find_mounted(ourselves).difference(request["own"]).union(request["hosts"])
    with tars.Writer(out) as tar:
        packer = _ChangePacker(tar, request["uid"], mounted)
        gone = set(request["gone"])
        for path in sorted({*request["changed"], *gone}):
            packer.add_change(path, path in gone)
        for path in request["own"]:
            packer.add(path, f".{path}")


class _ChangePacker(trees.Packer):
    def __init__(self, tar: tars.Writer, uid: int, mounted: set[str]) -> None:
        super().__init__(tar, 0, None)
        self._uid, self._mounted = uid, mounted

    def add_change(self, path: str, gone: bool) -> None:
        """Add a changed path; paths below it are reported separately.

        Raises:
            OSError: EILSEQ for a name that is not UTF-8: the engine reported it as another one.
        """
        if self._is_mounted(path):
            return
        if gone:
            if "\ufffd" in path:
                raise OSError(errno.EILSEQ, "a name that is not UTF-8 cannot be saved", path)
            directory, _, name = path.rpartition("/")
            self._tar.add(tarfile.TarInfo(f".{directory}/{layers.WHITEOUT}{name}"))
        try:
            is_users = self._is_users(path)
        except FileNotFoundError as exc:
            if gone:
                return
            raise OSError(errno.EILSEQ, "a name that is not UTF-8 cannot be saved", path) from exc
        if is_users:
            layers.check_name(path)
            self._add_one(path, f".{path}")

    def add(self, path: str, name: str) -> None:
        if not self._is_mounted(path) and self._is_users(path):
            layers.check_name(path)
            super().add(path, name)

    def _is_mounted(self, path: str) -> bool:
        return any(path == each or path.startswith(each + "/") for each in self._mounted)

    def _is_users(self, path: str) -> bool:
        """Return whether the user inside owns it: files of others come from the container's maker."""
        return self._stat(path).st_uid == self._uid

    def _device_of(self, info: os.stat_result) -> int:
        """Where mounts are has been said."""
        del info
        return self._device


def _load(request: dict[str, Any], fds: list[int]) -> None:
    """Put back what `_save` has written: fds end with the content.

    Precondition: nothing of the guest's has run there yet.
    """
    user_fd, mount_fd, content = fds
    uid = request["uid"]
    enter.join(user_fd, mount_fd, uid, uid)

    def prepare(member: tarfile.TarInfo, target: str) -> bool:
        member.uid = member.gid = uid  # there is nobody else
        return layers.prepare(member, target)

    trees.unpack(content, "/", one_file_system=True, prepare=prepare)


OPERATIONS: dict[str, Callable[[dict[str, Any], list[int]], None]] = {
    "furnish": _furnish,
    "save": _save,
    "load": _load,
}
