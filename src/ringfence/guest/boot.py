"""The agent's start: from the first process of a guest to one that serves the host."""

from __future__ import annotations

import _signal as signal
import errno
import os
import resource

from ..launcher import wire
from ..linux import mounts, namespaces, privileges, seccomp
from . import execs, users
from .agent import Agent
from .groups import Groups
from .tags import Tags

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from ..launcher.pid1.notifications import Listener
    from .settings import Settings

_STANDARD_INPUT = 0  # the control at first, and /dev/null from then on


def main(mapper: Mapper | None = None) -> NoReturn:
    """Serve on standard input until it closes.

    Args:
        mapper: Who is there already to map our ids; None: nobody.
    """
    control = wire.adopt(os.dup(_STANDARD_INPUT))
    settings, _fds = wire.receive(control)
    if settings is None:
        os._exit(0)
    step = "agent"
    namespace_fds: list[int] = []
    try:
        if settings["covered"]:
            from . import isolation

            step = isolation.STEP
            namespace_fds = isolation.set_up(settings)
            step = "agent"
        elif not settings["own_kernel"]:
            users.keep_score(walled=False)
            execs.keep_usage()
        groups: Groups | Tags
        listener = None
        if settings["own_kernel"]:
            groups = _boot(settings, mapper)
        else:
            groups, listener = _boot_plainly(settings)
    except OSError as exc:
        wire.refuse(control, exc, step)
        os._exit(1)
    # Where the first process's descriptors can be opened by others, as in gVisor and below Codex, this is a
    # file of the host's memory, without a bound.
    _say_no_more()
    wire.answer(control, b"READY", namespace_fds)
    for fd in namespace_fds:
        os.close(fd)
    Agent(control, settings, groups, *([listener] if listener else [])).run()
    os._exit(0)


def _say_no_more() -> None:
    """Let go of what errors were told by: from here on they are answers.

    Precondition: our standard input is /dev/null by now, open for writing too.
    """
    for standard in (1, 2):
        os.dup2(_STANDARD_INPUT, standard)


def _boot_plainly(settings: Settings) -> tuple[Tags, Listener | None]:
    """Under a launcher, which has locked us down already but for the filter that we bring."""
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, _STANDARD_INPUT)
    os.close(null)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.umask(0o022)
    privileges.set_name(b"ringfence-init")
    privileges.adopt_orphans()
    privileges.set_dumpable(False)
    from ..launcher import lockdown
    from ..launcher.pid1 import netlink_sockets, notifications

    lockdown.apply_rlimits(settings["rlimits"])
    listener = None
    if settings["seccomp"]:
        # The network may be the host's, with sockets of others.
        most = wire.MOST_NETLINK_SOCKETS + netlink_sockets.count()
        privileges.set_no_new_privs()
        listener = notifications.Listener(notifications.guard(serves=True), most)
        seccomp.install_filter(settings["seccomp"])
    return Tags(settings["tag_key"]), listener


def _boot(settings: Settings, mapper: Mapper | None) -> Groups:
    """From root of everything inside to what the agent stays."""
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, _STANDARD_INPUT)
    os.close(null)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if mapper is None:
        program = os.path.join(settings["place"], users.MAPPER)
        mapper = start_mapper(settings["id_map"], program)
    _remove_what_we_came_from(settings["place"])
    groups = Groups(settings["place"], settings["pids"])
    os.rmdir(settings["place"])
    try:
        # gVisor puts a tmpfs over an empty /tmp: without a size, and apart from what snapshots save.
        mounts.umount2("/tmp", mounts.MNT_DETACH)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
    enter_user_namespace(settings, mapper)
    groups.keep()
    return groups


def _remove_what_we_came_from(place: str) -> None:
    """Each by its name: to look what is there is four calls more, and two of them ask the file server."""
    for name in (users.AGENT, users.MAPPER):
        try:
            os.unlink(f"{place}/{name}")
        except FileNotFoundError:
            pass


class Mapper:
    """A child that stays behind to map the ids of a user namespace: who has entered may not.

    Args:
        pid: -1 where it is the only child that there is.
        go: Written to once we have.
    """

    def __init__(self, pid: int, go: int) -> None:
        self.pid, self.go = pid, go


def start_mapper(id_map: str, program: str = "") -> Mapper:
    """Start a process that writes our id maps.

    Args:
        program: An executable for it, if it exists: a fork would cost both of us a copy of every page.
    """
    go_read, go_write = os.pipe()
    if os.path.exists(program):
        actions = [(os.POSIX_SPAWN_DUP2, go_read, 0)]
        child = os.posix_spawn(program, [program], {}, file_actions=actions)
    else:
        child = _fork_mapper(id_map, go_read)
    os.close(go_read)
    return Mapper(child, go_write)


def _fork_mapper(id_map: str, go_read: int) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.read(go_read, 1)
            namespaces.write_id_maps(os.getppid(), id_map, id_map, deny_setgroups=False)
            status = 0
        finally:
            os._exit(status)
    return child


def enter_user_namespace(settings: Settings, mapper: Mapper) -> None:
    """A user namespace in which the guest's user and those of its files have the ids that they should.

    gVisor serves files with the ids that its host side has, where the owner of everything is 0. Names
    of its own come with it: ours to change after a restore.
    """
    namespaces.unshare(namespaces.CLONE_NEWUSER | namespaces.CLONE_NEWUTS)
    os.write(mapper.go, b"g")
    os.close(mapper.go)
    for which, soft, hard in settings["rlimits"]:  # while the ids are mapped
        _, most = resource.getrlimit(which)
        if most != resource.RLIM_INFINITY:  # the host's for who started gVisor: `ulimit -n 1024`
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(which, (soft, hard))
    if os.waitpid(mapper.pid, 0)[1]:
        raise OSError(errno.EPERM, "ids could not be mapped")
    users.become_root()
    os.setgroups([])
    privileges.set_dumpable(False)
