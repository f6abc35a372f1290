"""LXC as a launcher: `lxc-start` runs the agent as PID 1 of a container of its own.

LXC makes cgroups in every hierarchy, leaves some behind, and takes seconds to remove them. Ours hold the
container already, so LXC as root starts in a mount namespace where it sees none, and makes none.
"""

from __future__ import annotations

import os
import shutil

from ...errors import BackendUnavailable
from ..local.host import ranges
from ..local.host.facts import host
from ..local.host.mountinfo import MountLine
from ..local.mounts import template
from .launchers import Launcher

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_CONFIG = """\
lxc.rootfs.path = dir:{root}
lxc.rootfs.mount = {own}/root
lxc.uts.name = ringfence
lxc.net.0.type = empty
lxc.apparmor.profile = unconfined
lxc.console.path = none
lxc.autodev = 1
lxc.tty.max = 0
lxc.pty.max = 1024
lxc.cap.keep = none
lxc.no_new_privs = 1
lxc.cgroup.relative = 1
lxc.init.uid = {uid}
lxc.init.gid = {uid}
lxc.mount.entry = tmpfs dev/shm tmpfs nosuid,nodev,mode=1777,create=dir 0 0
"""
# With newuidmap on PATH, LXC asks for host root's ranges in /etc/subuid: root needs none, and has none.
_AS_ROOT = 'umount -l /sys/fs/cgroup; mount -t tmpfs ringfence /run && PATH=/ exec "$@"'
_SEALS = {
    "namespaces": "LXC gives it its own user, mount, pid, ipc, uts and network namespaces",
    "capabilities": "LXC drops all",
    "no_new_privs": "LXC sets it",
    "network": "a namespace with nothing but lo",
    "read_only_mounts": "LXC mounts the host's files read-only",
}
_IDLE = ("sync.c:", "lxc_start.c:", "__lxc_start:", "do_start:", 'set "gid" to "5"')


class LxcLauncher(Launcher):
    """See `Launcher`; each container has a configuration file of its own."""

    maps_ids = True

    def check(self) -> None:
        """See `Launcher`.

        Raises:
            BackendUnavailable: Also where an ordinary user has no second id for the container's root.
        """
        super().check()
        if not host().trusted_root:
            _subordinate_id()

    def prepare(
        self, words: Mapping[str, str], shown: list[tuple[str, str]], *, isolated: bool
    ) -> None:
        owner = int(words["host_id"])
        root = owner + 1 if host().trusted_root else _subordinate_id()
        os.mkdir(f"{words['own']}/root", 0o755)
        mounts = _mounts(words, shown, isolated=isolated)
        if not host().trusted_root:
            # LXC makes what is missing as the container's root, whom we could not empty it of.
            for _source, target, *_ in mounts:
                _make_parents(words["root"], target)
        with open(f"{words['own']}/config", "x", encoding="utf-8") as file:
            file.write(_CONFIG.format(**words))
            for kind in "ug":
                file.write(f"lxc.idmap = {kind} 0 {root} 1\n")
                file.write(f"lxc.idmap = {kind} {words['uid']} {owner} 1\n")
            file.writelines(_mount(*each) for each in mounts)

    def environment(self, words: Mapping[str, str]) -> dict[str, str]:
        """Its lock files go to its own directory, also where it would look for them below a home."""
        own = words["own"]
        return {**super().environment(words), "HOME": own, "XDG_RUNTIME_DIR": own}


def lxc(path: str = "lxc-start") -> Launcher:
    """`lxc-start`: a container per sandbox, its root mapped to an id without rights, under our filter."""
    found = os.path.realpath(shutil.which(path) or path)
    command = (found, "-F", "-n", "sandbox", "-P", "{own}", "-f", "{own}/config", "--")
    hidden = ("unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", _AS_ROOT, "sh")
    argv = (*hidden, *command) if host().trusted_root else command
    return LxcLauncher(
        name="lxc",
        argv=argv,
        within=argv,
        programs=(path, "unshare"),
        seals=_SEALS,
        filtered=True,
        idle=_IDLE,
    )


def _subordinate_id() -> int:
    """The first id of this user's ranges: the container's root, as which nothing of the guest's runs."""
    try:
        return ranges.find().slots[0]
    except ranges.NoRangeError as exc:
        raise BackendUnavailable(f"lxc: {exc.why}", hint=exc.fix) from exc


def _mounts(
    words: Mapping[str, str], shown: list[tuple[str, str]], *, isolated: bool
) -> list[tuple[str, str, str, str]]:
    """Source, target, type and options of what LXC mounts over the root."""
    options = "nosuid,nodev,noexec"
    # An agent that sets up isolation maps ids by its own /proc, and covers it then.
    found = [
        (
            "proc",
            "/proc",
            "proc",
            f"{options},create=dir" if isolated else f"{options},create=dir,ro",
        )
    ]
    for source, target in ((words["etc"], "/etc"), (words["agent"], "/.ringfence"), *shown):
        kind = "dir" if os.path.isdir(source) else "file"
        # LXC makes only the mount at the top read-only.
        for below in _mounts_in(source):
            place = target + below.removeprefix(source)
            found.append((below, place, "none", f"rbind,ro,nosuid,nodev,create={kind}"))
    if not isolated:
        for path in template.masked():
            if os.path.isdir(path):
                found.append(("tmpfs", path, "tmpfs", "ro,size=4k"))
            else:
                found.append(("/dev/null", path, "none", "bind"))
    return found


def _make_parents(root: str, target: str) -> None:
    """Make the directories above `target`, up to a link: what is below one is in a mount."""
    path = root
    for name in target.split("/")[1:-1]:
        path = f"{path}/{name}"
        if os.path.islink(path):
            return
        if not os.path.isdir(path):
            os.mkdir(path, 0o755)


def _mounts_in(source: str) -> list[str]:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        targets = [MountLine(line).target for line in file]
    return [source, *sorted({each for each in targets if each.startswith(f"{source}/")})]


def _mount(source: str, target: str, kind: str, options: str) -> str:
    # As in fstab(5): a space would end the word.
    words = [each.replace("\\", "\\134").replace(" ", "\\040") for each in (source, target[1:])]
    return f"lxc.mount.entry = {words[0]} {words[1]} {kind} {options} 0 0\n"
