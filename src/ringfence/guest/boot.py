"""The agent's start: from the first process of a guest to one that serves the host."""

from __future__ import annotations

import _signal as signal
import errno
import os
import resource

from ..launcher import init, wire
from ..linux import mounts, namespaces, privileges, seccomp
from . import users
from .agent import Agent
from .groups import Groups
from .tags import Tags

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from .settings import Settings

_CONTROL_FD = 0


def main() -> NoReturn:
    """Serve on standard input until it closes."""
    control = wire.adopt(os.dup(_CONTROL_FD))
    settings, _fds = wire.receive(control)
    if settings is None:
        os._exit(0)
    try:
        groups = _boot(settings) if settings["own_kernel"] else _boot_plainly(settings)
    except OSError as exc:
        init.refuse(control, exc, "agent")
        os._exit(1)
    init.answer(control, b"READY")
    Agent(control, settings, groups).run()
    os._exit(0)


def _boot_plainly(settings: Settings) -> Tags:
    """Under a launcher, which has locked us down already but for the filter that we bring."""
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, _CONTROL_FD)
    os.close(null)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.umask(0o022)
    privileges.adopt_orphans()
    privileges.set_dumpable(False)
    for which, soft, hard in settings["rlimits"]:
        resource.setrlimit(which, (soft, hard))
    if settings["seccomp"]:
        privileges.set_no_new_privs()
        seccomp.install_filter(settings["seccomp"])
    return Tags(settings["tag_key"])


def _boot(settings: Settings) -> Groups:
    """From root of everything inside to what the agent stays."""
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, _CONTROL_FD)
    os.close(null)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for name in os.listdir(settings["place"]):
        os.unlink(os.path.join(settings["place"], name))  # what we were loaded from
    groups = Groups(settings["place"], settings["pids"])
    os.rmdir(settings["place"])
    try:
        # gVisor puts a tmpfs over an empty /tmp: without a size, and apart from what snapshots save.
        mounts.umount2("/tmp", mounts.MNT_DETACH)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
    enter_user_namespace(settings["id_map"])
    users.become_root()
    os.setgroups([])
    privileges.set_dumpable(False)
    for which, soft, hard in settings["rlimits"]:
        resource.setrlimit(which, (soft, hard))
    return groups


def enter_user_namespace(id_map: str) -> None:
    """A user namespace in which the guest's user and those of its files have the ids that they should.

    gVisor serves files with the ids that its host side has, where the owner of everything is 0. A
    child stays behind to map the ids: who has entered may not.
    """
    go_read, go_write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.read(go_read, 1)
            namespaces.write_id_maps(os.getppid(), id_map, id_map, deny_setgroups=False)
            status = 0
        finally:
            os._exit(status)
    namespaces.unshare(namespaces.CLONE_NEWUSER)
    os.write(go_write, b"g")
    os.close(go_write)
    os.close(go_read)
    if os.waitpid(child, 0)[1]:
        raise OSError(errno.EPERM, "ids could not be mapped")
    namespaces.unshare(namespaces.CLONE_NEWUTS)  # ours to name anew after a restore
