"""The agent without namespaces: Landlock and filters confine it, and a guardian outlives it.

The guardian is the process that the host starts. It is outside of the agent's Landlock domain and
the subreaper of all that runs below: when the agent or the host ends, it kills every descendant.
Without a PID namespace every number of a process may be another user's or the host's, so that
no signal goes to -1 and a process counts as the sandbox's by its tag only.
"""

from __future__ import annotations

import _signal as signal
import errno
import os
import select
import time

from ...launcher import lockdown, wire
from ...launcher.pid1 import processes, terminals
from ...linux import landlock, libc, privileges, seccomp
from .. import users
from ..agent import Agent
from ..execs import OomScore
from ..tags import Tags, tag_of
from . import asking, inet_diag, metadata
from .forks import Forks
from .shared_memory import Segments, SharedMemory
from .sockets import Sockets

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from tarfile import TarInfo
    from typing import NoReturn

    from ..settings import Settings
    from .metadata import Judged
    from .shared_memory import Shared
    from .sockets import Network, Way

    class LandlockSettings(Settings):
        """First message to a guardian."""

        ids: int  # uid and gid to become first; 0: those that it has; -1: the same, without rights
        ruleset: tuple[int, int, int, int]  # accesses handled: files, network, scopes; the ABI
        rules: list[tuple[str, int]]  # an empty path: that of the next descriptor which came along
        refused: bytes  # a second filter, for execs only
        judged: Judged  # calls about metadata that the agent makes
        network: Network
        shared: Shared
        segments: dict[int, str]  # calls about System V shared memory, by number
        scheduling: list[int]  # numbers of calls that read how a thread is scheduled
        forks: list[int]  # numbers of calls that make a process; empty where the kernel limits them
        tag_base: int  # tags of this sandbox are `TAGS` numbers from here downwards


TAGS = 1 << 20
_MAKE_CHAR = 1 << 6  # LANDLOCK_ACCESS_FS_MAKE_CHAR: a ruleset needs one; granted nowhere at all
# LANDLOCK_ACCESS_FS_REFER: a ruleset that does not handle it refuses links and renames between directories.
_REFER = 1 << 13
_PAUSE_S = 0.001
UNASKED = b"READY unasked"
"""Answer of an agent that no filter asks: a filter around it has a listener."""
ENDED_ALL = 3
"""Exit status of a guardian after which nothing of its sandbox runs."""


def main(control: wire.Socket) -> NoReturn:
    """Start the agent, and see to it that nothing is left when it or the host ends."""
    settings, fds = wire.receive(control)
    if settings is None:
        os._exit(0)
    try:
        _become(settings["ids"])
        users.is_root = False  # there is one user, whatever its number is
        privileges.set_dumpable(False)
        privileges.set_no_new_privs()
        privileges.adopt_orphans()
        privileges.set_name(b"ringfence-guard")
        watched, held = os.pipe()
        asked, asks = wire.socketpair()
        agent = os.fork()
        if agent == 0:
            os.close(held)
            asked.close()
            users.new_terminal = lambda rows, columns: _ask_terminal(asks, rows, columns)
            _serve(control, settings, fds, watched)
        asks.close()
    except OSError as exc:
        wire.refuse(control, exc, "guardian")
        os._exit(1)
    for fd in fds:
        os.close(fd)
    poll = select.poll()
    poll.register(control.fileno(), 0)  # POLLHUP is always told
    agent_fd = os.pidfd_open(agent)
    poll.register(agent_fd, select.POLLIN)
    poll.register(asked.fileno(), select.POLLIN)
    while [fd for fd, _events in poll.poll()] == [asked.fileno()] and _open_terminal(asked):
        pass
    # First, as the agent goes on with it if this process is killed meanwhile. Mostly nothing runs, and no
    # process of the host is looked at.
    _end_programs(settings["tag_base"], agent)
    signal.pidfd_send_signal(agent_fd, signal.SIGKILL)
    os.waitpid(agent, 0)
    end_all(settings["tag_base"])
    os._exit(ENDED_ALL)


def _end_programs(base: int, agent: int) -> None:
    """Kill what runs below the agent, which starts nothing any more."""
    below = f"/proc/{agent}/task/{agent}/children"  # CONFIG_PROC_CHILDREN
    while processes.read(below) or not os.path.exists(below):
        found = [pid for pid in members(base) if pid != agent]
        if not found:
            return
        signal_members(found, base, signal.SIGKILL)
        time.sleep(_PAUSE_S)


def _open_terminal(asked: wire.Socket) -> bool:
    """Open a terminal for the agent, which Landlock keeps from all of /dev/pts: others of its user are there.

    Returns False when the agent is gone.
    """
    size, _fds = wire.receive(asked)
    if size is None:
        return False
    opened: list[int] = []
    try:
        master, name = terminals.new_terminal("/dev/ptmx", *size)
        opened.append(master)
        opened.append(os.open(name, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
        wire.send(asked, 0, opened)
    except OSError as exc:
        wire.send(asked, exc.errno or errno.EIO)
    finally:
        for fd in opened:
            os.close(fd)
    return True


def _ask_terminal(asks: wire.Socket, rows: int, columns: int) -> tuple[int, int]:
    """The master and the slave of a terminal that the guardian opens.

    Raises:
        OSError: As opening it does; EIO where the guardian is gone.
    """
    wire.send(asks, (rows, columns))
    number, fds = wire.receive(asks)
    if number != 0:
        number = number or errno.EIO
        raise OSError(number, os.strerror(number))
    master, slave = fds
    return master, slave


def _become(uid: int) -> None:
    if not uid:
        return
    if uid > 0:
        privileges.empty_bounding_set()
        os.setgroups([])
        privileges.lock_securebits()
    else:
        _give_up_rights()
    if uid > 0:
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    privileges.empty_capability_sets()


def _give_up_rights() -> None:
    """Root may lack CAP_SETPCAP, for which both ask: `docker run --cap-drop ALL`.

    Without them no_new_privs alone keeps a program of root's from having the capabilities of the bounding set.
    """
    try:
        privileges.empty_bounding_set()
        privileges.lock_securebits()
    except PermissionError:
        pass


def _serve(
    control: wire.Socket, settings: LandlockSettings, fds: list[int], watched: int
) -> NoReturn:
    """Confine the caller, then answer the host."""
    try:
        null = os.open("/dev/null", os.O_RDWR)
        for standard in range(3):
            os.dup2(null, standard)
        os.close(null)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.umask(0o022)
        os.setsid()
        privileges.adopt_orphans()
        privileges.set_name(b"ringfence-init")
        libc.prlimit64(0, processes.RLIMIT_RTTIME, settings["tag_base"], settings["tag_base"])
        lockdown.apply_rlimits(settings["rlimits"])
        privileges.set_dumpable(True)  # else /proc/self is root's; no program runs yet
        oom_score = OomScore()
        privileges.set_dumpable(False)
        _restrict(settings, fds)
        judged, key = settings["judged"], settings["tag_key"]
        network, shared = settings["network"], settings["shared"]
        listeners = inet_diag.find(network["v4"])  # later a filter asks about its sockets
        asked_fd = asking.guard(
            judged["calls"],
            network["calls"],
            shared["calls"],
            settings["segments"],
            settings["scheduling"],
            settings["forks"],
            key,
        )
        seccomp.install_filter(settings["seccomp"])
    except OSError as exc:
        wire.refuse(control, exc, "landlock")
        os._exit(1)
    for fd in fds:
        os.close(fd)
    handled = settings["ruleset"]
    users.confine = lambda: confine(handled, settings["refused"])
    wire.answer(control, b"READY" if asked_fd >= 0 else UNASKED)
    sockets = Sockets(asked_fd, network, key, listeners)
    changes = metadata.Metadata(asked_fd, judged, key)
    base = settings["tag_base"]
    forks = Forks(
        *(asked_fd, settings["forks"], key, settings["pids"]), lambda: count(base, zombies=True)
    )
    if settings["forks"]:
        users.fork = forks.fork
    asked = asking.Questions(
        *(asked_fd, changes, sockets, SharedMemory(asked_fd, shared)),
        *(Segments(asked_fd, settings["segments"], key), settings["scheduling"]),
        lambda pid: _is_member(pid, base),
        forks,
    )
    agent = LandlockAgent(control, settings, watched, sockets, asked)
    agent.execs.oom_score = oom_score
    agent.run()
    # The guardian does the same; it may have been killed together with the host.
    end_all(base)
    os._exit(0)


def _restrict(settings: LandlockSettings, fds: list[int]) -> None:
    files, network, scoped, abi = settings["ruleset"]
    del network  # the agent connects for its programs
    ruleset = landlock.create_ruleset(files, 0, scoped, abi=abi)
    more = iter(fds)
    for path, access in settings["rules"]:
        landlock.allow_beneath(ruleset, path or f"/proc/self/fd/{next(more)}", access)
    landlock.restrict_self(ruleset)
    os.close(ruleset)


def confine(handled: tuple[int, int, int, int], refused: bytes) -> None:
    """Called in the child of each exec: a domain below the agent's, and the second filter.

    No process of an exec can signal or trace the agent, or the processes of another exec.
    """
    _files, network, scoped, abi = handled
    ruleset = landlock.create_ruleset(_MAKE_CHAR | _REFER, network, scoped, abi=abi)
    landlock.allow_beneath(ruleset, "/", _REFER)  # the agent's own domain judges them
    landlock.restrict_self(ruleset)
    os.close(ruleset)
    seccomp.install_filter(refused)


def members(base: int, *, zombies: bool = False) -> list[int]:
    """Processes with a tag of one sandbox, without this one."""
    me = os.getpid()
    numbers = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [
        pid
        for pid in numbers
        if pid != me and _is_member(pid, base) and (zombies or not processes.is_zombie(pid))
    ]


def count(base: int, *, zombies: bool = False) -> int:
    """How many processes and threads one sandbox has."""
    return sum(max(1, processes.threads(pid)) for pid in members(base, zombies=zombies))


def _is_member(pid: int, base: int) -> bool:
    tag = processes.tag_of(pid)
    if not tag and os.geteuid() == 0:
        tag = tag_of(pid)  # prlimit(2) asks root for CAP_SYS_RESOURCE, the file for nothing
    return base - TAGS < tag <= base


def kill_members(base: int) -> bool:
    found = members(base)
    signal_members(found, base, signal.SIGKILL)
    return bool(found)


def signal_members(found: Iterable[int], base: int, signum: int) -> None:
    """Send a signal by descriptors: a number may be another process's by then."""
    for pid in found:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if _is_member(pid, base):
                signal.pidfd_send_signal(pidfd, signum)
        except ProcessLookupError:
            pass
        finally:
            os.close(pidfd)


def end_all(base: int) -> None:
    """Kill until this process has no child left. Precondition: it is the subreaper of them all."""
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        kill_members(base)
        time.sleep(_PAUSE_S)


class LandlockTags(Tags):
    """Assignment of processes to execs by tags that no other sandbox of the host has."""

    is_alone = False

    def __init__(self, key: int, base: int) -> None:
        super().__init__(key)
        self._base = base

    def _all(self) -> list[int]:
        """Return all processes of the sandbox: none where we, their subreaper, have no child."""
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return []  # without a look at each process of the host, at the end of each command
        return members(self._base)

    def count(self) -> int:
        return count(self._base)

    def enter(self, number: int) -> None:
        processes.set_tag(self._key, self._base - number)

    def members(self, number: int) -> list[int]:
        wanted = self._base - number
        return [pid for pid in self._all() if processes.tag_of(pid) == wanted]


class _Guardian:
    """End of the guardian, as the agent's listener: then the agent kills all, and ends."""

    def __init__(self, fd: int, base: int) -> None:
        self.fd, self._base = fd, base

    def serve_one(self) -> NoReturn:
        """Called when the guardian's end of the pipe is closed."""
        end_all(self._base)
        os._exit(1)


class LandlockAgent(Agent):
    """An agent among the processes of the host."""

    def __init__(
        self,
        control: wire.Socket,
        settings: LandlockSettings,
        watched: int,
        sockets: Sockets,
        asked: asking.Questions,
    ) -> None:
        groups = LandlockTags(settings["tag_key"], settings["tag_base"])
        guardian = _Guardian(watched, settings["tag_base"])
        super().__init__(control, settings, groups, guardian, asked)
        self.sockets = sockets
        self.file_locks = None  # /proc/locks is the whole host's

    def _by_child(
        self,
        reply: wire.Socket,
        fds: list[int],
        become: Callable[[], None],
        work: Callable[[], None],
    ) -> None:
        """See `Agent`. Its calls about metadata are judged too, so that the agent must be able to read it.

        Landlock keeps the programs inside, whose domain is below, from tracing it.
        """

        def show() -> None:
            become()
            privileges.set_dumpable(True)

        super()._by_child(reply, fds, show, work)

    def _timeout_ms(self) -> float | None:
        """See `Agent`; called in each turn, so connections that wait are looked at here."""
        self.sockets.look()
        waits = self.sockets.wait_s(), super()._timeout_ms()
        own = None if waits[0] is None else waits[0] * 1000 + 1
        return min((wait for wait in (own, waits[1]) if wait is not None), default=None)

    def _dial(self, version: int, port: int) -> int:
        """See `Agent`: to the address at which a server of the sandbox's really listens."""
        return self.sockets.dial(version, port)

    def _do_save(
        self, reply: wire.Socket, fds: list[int], places: list[tuple[str, str]], links: list[str]
    ) -> None:
        """Write the trees at these paths, under these names, to the pipe that came along, as tar.

        Args:
            links: Paths of symlinks to mounts, which are left out.
        """
        become = users.become_for_good(self.settings["uid"])
        self._by_child(reply, fds, become, lambda: _pack(fds[0], places, links))

    def _do_load(
        self,
        reply: wire.Socket,
        fds: list[int],
        root: str,
        places: list[tuple[str, str]],
        links: list[str],
    ) -> None:
        """Unpack what `save` has written, below `root`, but nothing in the place of a link."""
        become = users.become_for_good(self.settings["uid"])
        self._by_child(reply, fds, become, lambda: _unpack(fds[0], root, places, links))

    def _do_network(self, _reply: wire.Socket, _fds: list[int], way: Way | None) -> bytes:
        """Take another way out, after a change of the policy."""
        self.sockets.network["way"] = way
        return b""


def _pack(out: int, places: list[tuple[str, str]], links: list[str]) -> None:
    from ...launcher.helpers import tars, trees  # tarfile is large, and few agents save

    with tars.Writer(out) as tar:
        packer = trees.Packer(tar, os.lstat(places[0][0]).st_dev, None, left_out=links)
        for path, name in places:
            trees.pack_whole(packer, path, f".{name}")


def _unpack(content: int, root: str, places: list[tuple[str, str]], links: list[str]) -> None:
    from ...launcher.helpers import trees

    def prepare(member: TarInfo, _target: str) -> bool:
        member.uid, member.gid = os.getuid(), os.getgid()  # there is nobody else
        path = os.path.normpath(f"{root}/{member.name}")
        return not any(path == each or path.startswith(f"{each}/") for each in links)

    trees.unpack(
        *(content, root),
        one_file_system=True,
        prepare=prepare,
        place=lambda name: _place(root, places, name),
    )


def _place(root: str, places: list[tuple[str, str]], name: str) -> str:
    """Where in this sandbox's directories a saved name is.

    Raises:
        OSError: EINVAL where it has no such directory.
    """
    for path, saved in places:
        if name == f".{saved}" or name.startswith(f".{saved}/"):
            return f"{path[len(root) + 1 :]}{name[len(saved) + 1 :]}"
    raise OSError(errno.EINVAL, "has no place in this sandbox", name)
