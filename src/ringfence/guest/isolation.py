"""Isolation that a container's agent makes before it starts anything; the engine gives it none of
this.

The engine's container has the host's user namespace, a writable /proc, and a /sys. In a user
namespace of its own, with a single id mapped, the agent needs no permission for better. The network
and the mounts below it are its own too, so that helpers of the host can work on them: see
`launcher.jail.contained`.
"""

from __future__ import annotations

import os
import resource
import stat

from ..launcher import build, newroot
from ..linux import mounts, namespaces, privileges
from . import execs, room, users

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .settings import Settings

STEP = "isolation"  # what a host refuses which allows none
_APART = (
    namespaces.CLONE_NEWUSER
    | namespaces.CLONE_NEWNS
    | namespaces.CLONE_NEWNET
    | namespaces.CLONE_NEWCGROUP
)
# Below a launcher that forbids sockets, and so whatever a network of one's own would take.
_ANEW = (
    namespaces.CLONE_NEWUSER
    | namespaces.CLONE_NEWNS
    | namespaces.CLONE_NEWPID
    | namespaces.CLONE_NEWCGROUP
)
# Namespaces whose descriptors the host gets: its helpers enter the first three, and an ordinary
# user may not open them.
NAMESPACES = ("user", "mnt", "net", "pid", "ipc", "uts")
_SHM = "/dev/shm"
_PROC = mounts.MOUNT_ATTR_RDONLY | mounts.MOUNT_ATTR_NOSUID | mounts.MOUNT_ATTR_NODEV
_OF_PROC = mounts.MS_NOSUID | mounts.MS_NODEV | mounts.MS_NOEXEC
_COVER = mounts.MS_RDONLY | mounts.MS_NOSUID | mounts.MS_NODEV | mounts.MS_NOEXEC


def set_up(settings: Settings) -> list[int]:
    """Namespaces, one id, mounts that give nothing, and no capability for good.

    Returns:
        Descriptors of `NAMESPACES`, the host's alone to keep.

    Precondition: one thread, and a file system that is the guest's own already.

    Raises:
        OSError: The host, or what the engine lays around the container, does not allow it.
    """
    owner, group = os.getuid(), os.getgid()
    namespaces.unshare(_ANEW if settings["anew"] else _APART)
    uid = settings["uid"]
    uids, gids = f"{uid} {owner} 1", f"{uid} {group} 1"
    namespaces.write_id_maps(os.getpid(), uids, gids, deny_setgroups=True)
    if settings["anew"]:
        _begin_anew()
    else:
        try:
            build.leave_host_network(_APART)
        except newroot.BuildError as exc:
            raise exc.cause from exc
    mounts.mount("none", "/", "none", mounts.MS_REC | mounts.MS_PRIVATE)
    if settings["anew"]:
        mounts.mount("proc", "/proc", "proc", _OF_PROC)
    newroot.bound_terminals("/dev/pts", newroot.TERMINALS)
    if os.path.exists("/dev/ptmx") and not os.path.islink("/dev/ptmx"):
        # LXC binds that of its own /dev/pts, in which our terminals have no names.
        mounts.mount("/dev/pts/ptmx", "/dev/ptmx", "none", mounts.MS_BIND)
    if settings["room"] is not None:
        room.make(settings["room"], settings["place"])
    if settings["shm_bytes"] and os.path.isdir(_SHM):
        options = f"mode=1777,size={settings['shm_bytes']}"
        mounts.mount("ringfence", _SHM, "tmpfs", mounts.MS_NOSUID | mounts.MS_NODEV, options)
    _restrict_mounts()
    build.bound_user_namespace("/proc", forbid_user_namespaces=True)
    users.keep_score(walled=True)
    execs.keep_usage()
    for path in settings["covered"]:
        _cover(path)
    fd = os.open("/proc", os.O_PATH | os.O_CLOEXEC)
    mounts.mount_setattr(fd, _PROC, recursive=False)
    os.close(fd)
    privileges.lock_securebits()
    privileges.empty_bounding_set()
    privileges.empty_capability_sets()
    return [os.open(f"/proc/self/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in NAMESPACES]


def _begin_anew() -> None:
    """Go on as the first process of a namespace; who we were waits for its end, and holds nothing."""
    pid = os.fork()
    if pid == 0:
        return
    privileges.empty_bounding_set()
    privileges.empty_capability_sets()
    os.closerange(0, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    os.waitpid(pid, 0)
    os._exit(0)


def _restrict_mounts() -> None:
    """No mount honours a set-id bit, and none but those of /dev a device."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        lines = [line.split() for line in file]
    for words in lines:
        target, kind = words[4], words[words.index("-") + 1]
        attributes = mounts.MOUNT_ATTR_NOSUID
        # As mountinfo writes them: a space is \040.
        fd = os.open(target.encode("utf-8", "surrogateescape").decode("unicode_escape"), os.O_PATH)
        is_device = target.startswith("/dev/") and stat.S_ISCHR(os.fstat(fd).st_mode)
        if target != "/dev" and kind != "devpts" and not is_device:
            attributes |= mounts.MOUNT_ATTR_NODEV
        mounts.mount_setattr(fd, attributes, recursive=False)
        os.close(fd)


def _cover(path: str) -> None:
    """Hide a file behind /dev/null, a directory behind one that is empty; what is not there stays so."""
    if os.path.isdir(path):
        mounts.mount("ringfence", path, "tmpfs", _COVER, "mode=0555,size=4k,nr_inodes=1")
    elif os.path.exists(path):
        newroot.cover_with_null("/dev/null", path)
